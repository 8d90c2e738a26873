"""The caller's side of a request: one prompt is a job, and each of its `n` completions a sequence.

The scheduler knows requests only; here each of them is paired with the text made from it so far, and the
siblings of one prompt are kept together until the last has ended. Holds state, decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.detokenizer import Detokenizer
from minillm.outputs import CompletionOutput, RequestOutput
from minillm.request import Request


@dataclass
class Sequence:
    """One completion in flight: the scheduler's request and the text made from it so far."""

    request: Request
    detokenizer: Detokenizer
    logprobs: list[dict] = field(default_factory=list)

    def output(self) -> CompletionOutput:
        r = self.request
        logprobs = None if r.params.logprobs is None else self.logprobs
        return CompletionOutput(
            r.index, self.detokenizer.text, r.output_token_ids, logprobs, r.finish_reason, r.stop_reason
        )


@dataclass
class Job:
    """One prompt of the caller and its `n` sequences, in order of birth."""

    sequences: list[Sequence]
    parts_at_start: dict[str, float] | None = None  # profile clock when the first step began
    ttft_parts: dict[str, float] | None = None

    @property
    def first(self) -> Request:
        return self.sequences[0].request

    @property
    def finished(self) -> bool:
        return self.first.num_pending_forks == 0 and all(s.request.finished for s in self.sequences)

    def output(self) -> RequestOutput:
        metrics = self.first.metrics()
        metrics.ttft_parts = self.ttft_parts
        ends = [s.request.token_times[-1] for s in self.sequences if s.request.token_times]
        if ends:
            metrics.e2e_s = max(ends) - self.first.arrival_time
        return RequestOutput(
            request_id=self.first.request_id,
            prompt=self.first.prompt,
            prompt_token_ids=self.first.prompt_token_ids,
            outputs=[s.output() for s in self.sequences],
            finished=self.finished,
            metrics=metrics,
            num_cached_tokens=self.first.num_cached_tokens,
        )
