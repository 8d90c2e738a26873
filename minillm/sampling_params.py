"""How one request chooses its tokens and when it ends, under vLLM's names.

A request carries one of these; `sampler.py` draws by it. It is frozen and validated when it is made. The defaults of a
model (`LLM.default_sampling_params`) come from its own files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minillm.errors import ConfigError
from minillm.option_checks import between, integer, known, positive, several, truth


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and when it ends. Field names and meanings are vLLM's.

    temperature 0 is greedy. Raises ConfigError naming the field and its range.
    """

    n: int = 1  # completions of this prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None  # same seed, same prompt: same tokens, whatever else runs in the batch
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int = 128
    min_tokens: int = 0
    logprobs: int | None = None  # also return the log-probabilities of this many most likely tokens
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0  # smaller is served first; equal ones in order of arrival

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, several(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            truth(name, getattr(self, name))
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ConfigError(f"stop={self.stop!r} must hold non-empty strings")
        if any(not isinstance(t, int) or t < 0 for t in self.stop_token_ids):
            raise ConfigError(f"stop_token_ids={self.stop_token_ids!r} must hold token ids")
        positive("n", self.n)
        positive("max_tokens", self.max_tokens)
        between("temperature", self.temperature, 0.0, 100.0)
        between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        between("min_p", self.min_p, 0.0, 1.0)
        between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        between("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        integer("top_k", self.top_k, -1)
        integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.logprobs is not None:
            integer("logprobs", self.logprobs, 0)
        if self.seed is not None:
            integer("seed", self.seed, -(2**63))
        integer("priority", self.priority, -(2**31))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_options(cls, **options) -> SamplingParams:
        """SamplingParams from keyword options; an unknown one is refused with the nearest known name."""
        return cls(**known(cls, options))

    def updated(self, **options) -> SamplingParams:
        """A copy with some fields changed; unknown names are refused."""
        return replace(self, **known(type(self), options))
