"""What a caller gets back: finished requests, completions, and the pieces of a stream.

Plain data, no engine behind it. Field names are vLLM's; `RequestMetrics` stands in request.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from minillm.request import RequestMetrics
from minillm.sampler import Logprob


@dataclass
class CompletionOutput:
    """One of the `n` completions of a prompt.

    finish_reason  "stop" | "length" | "abort" | "error"; None while it runs
    stop_reason    the stop string or stop token id that ended it, or what cut it short; None for end-of-text
    logprobs       per token {token id: Logprob}, only when asked for
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A prompt and everything that came of it. `num_cached_tokens` prompt tokens were found in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0

    def to_dict(self) -> dict:
        """The same as JSON-ready dictionaries and lists."""
        return asdict(self)


@dataclass
class StreamChunk:
    """What one step added to one completion.

    text           may be empty while half a character or the start of a stop string is held back
    token_ids      the tokens of this step
    logprobs       one dictionary per token, only when asked for
    finish_reason  and stop_reason, as in CompletionOutput, in the chunk that ends this completion
    output         the whole RequestOutput, in the chunk that ends the request
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    output: RequestOutput | None = None

    @property
    def finished(self) -> bool:
        """Has this completion ended?"""
        return self.finish_reason is not None
