"""How one request chooses its tokens and when it ends, under vLLM's names.

A request carries one of these; `sampler.py` draws by it. It is frozen and validated when it is made. The defaults of a
model (`LLM.default_sampling_params`) come from its own files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minillm.errors import ConfigError
from minillm.option_checks import between, integer, known, option, positive, several, truth


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and when it ends. Field names and meanings are vLLM's.

    temperature 0 is greedy. Raises ConfigError naming the field and its range.
    """

    n: int = option(1, "completions of each prompt; its K and V are computed once")
    temperature: float = option(1.0, "above 1 evens the odds of tokens out, below sharpens them; 0 takes the likeliest")
    top_p: float = option(1.0, "draw from the likeliest tokens that together have this probability")
    top_k: int = option(0, "draw from so many of the likeliest tokens; 0 or -1: from all")
    min_p: float = option(0.0, "leave out tokens below this share of the likeliest one's probability")
    seed: int | None = option(
        None, "same seed and prompt: same tokens, whatever else runs; default: one for each request, from the engine's"
    )
    stop: tuple[str, ...] = option((), "texts that end the answer where they first appear")
    stop_token_ids: tuple[int, ...] = option((), "tokens that end the answer, besides the model's own")
    ignore_eos: bool = option(False, "go on behind the model's end-of-text token, to max_tokens")
    max_tokens: int = option(128, "most tokens that are generated")
    min_tokens: int = option(0, "tokens before which no stop token and no end-of-text token is drawn")
    logprobs: int | None = option(None, "also return the log-probabilities of so many likeliest tokens; default: none")
    presence_penalty: float = option(0.0, "-2 to 2, taken from the logit of a token that was generated before")
    frequency_penalty: float = option(0.0, "-2 to 2, taken from a token's logit each time that it was generated")
    repetition_penalty: float = option(1.0, "above 1 makes tokens of prompt and answer less likely, below 1 more")
    include_stop_str_in_output: bool = option(False, "keep the text or token that ended the answer")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")
    priority: int = option(0, "smaller is served first; equal ones in order of arrival")

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, several(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            truth(name, getattr(self, name))
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ConfigError(f"stop={self.stop!r} must hold non-empty strings")
        if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in self.stop_token_ids):
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
