"""One request on its way down the street: its tokens, how many are computed, and its timestamps.

A request has no phase. It has `num_tokens` tokens (prompt and generated) of which
`num_computed_tokens` lie in the cache; whoever schedules it closes that gap. This file holds state
only: the scheduler decides, the engine commits. Built in lesson 12.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import pairwise

from minillm.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class RequestMetrics:
    """Times in seconds; None until known. TTFT and e2e count from arrival, before tokenisation.

    tokenize_s   text to ids
    queue_s      arrival (after tokenisation) to the first step that computes this request
    prefill_s    that step's start to the first token
    ttft_s       arrival to the first token = tokenize_s + queue_s + prefill_s
    itl_s        every gap between consecutive tokens
    tpot_s       their mean
    e2e_s        arrival to the last token
    ttft_parts   the same TTFT by kind of work, only when the engine was asked to profile
    arrival      of a prompt that came in pieces: what its arrival hid, see pipeline/growing.py
    """

    tokenize_s: float = 0.0
    queue_s: float | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    e2e_s: float | None = None
    num_preemptions: int = 0
    ttft_parts: dict[str, float] | None = None
    arrival: dict[str, float] | None = None


@dataclass(eq=False)
class Request:
    """State of one sequence. `eq=False`: two requests are the same only if they are the same object."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    arrival_time: float = 0.0  # clock seconds, when the caller handed the prompt over
    tokenize_s: float = 0.0
    index: int = 0  # which of the n completions of its parent
    num_pending_forks: int = 0  # children still to be born after prefill
    is_open: bool = False  # more of the prompt is still to come

    token_ids: list[int] = field(default_factory=list)  # prompt + generated
    num_computed_tokens: int = 0  # tokens whose K and V lie in the cache
    block_table: list[int] = field(default_factory=list)
    num_published_blocks: int = 0  # leading full blocks already offered to the prefix cache
    prefix_key: tuple[int, int] = (0, 0)  # which publication the next block continues, see BlockPool.publish
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token id or string, or why the length ended

    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)  # clock seconds, one per generated token
    text_ended_time: float | None = None  # clock seconds, when the last piece of a prompt had been read
    arrival: dict[str, float] | None = None  # see RequestMetrics

    def __post_init__(self):
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def priority(self) -> int:
        return self.params.priority

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def is_sampled_after(self, n: int) -> bool:
        """Is its next token drawn when n more tokens are computed? Never while more of the prompt is to come."""
        return self.num_computed_tokens + n == len(self.token_ids) and not self.is_open

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def metrics(self) -> RequestMetrics:
        """The timestamps as durations; fields stay None until they have happened."""
        queued_at = self.arrival_time + self.tokenize_s
        result = RequestMetrics(tokenize_s=self.tokenize_s, num_preemptions=self.num_preemptions)
        if self.first_scheduled_time is not None:
            result.queue_s = self.first_scheduled_time - queued_at
        if self.token_times:
            first, last = self.token_times[0], self.token_times[-1]
            result.prefill_s = first - self.first_scheduled_time
            result.ttft_s = first - self.arrival_time
            if self.arrival is not None:
                result.arrival = {**self.arrival, "ttft_after_text_s": first - self.text_ended_time}
            result.itl_s = [b - a for a, b in pairwise(self.token_times)]
            if result.itl_s:
                result.tpot_s = (last - first) / len(result.itl_s)
            result.e2e_s = last - self.arrival_time
        return result
