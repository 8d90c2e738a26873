"""What callers hand to `LLM`, as lists: prompts, conversations, and SamplingParams for each of them.

Whatever can be told from the types alone is refused here; what stands inside of a prompt is for the tokenizer and the
scheduler to check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from minillm.errors import ConfigError, PromptError
from minillm.sampling_params import SamplingParams

Prompt = str | list[int]
Message = dict[str, str]


def prompts_of(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt, or anything that yields them, as a list. Raises PromptError."""
    if isinstance(prompts, str):
        return [prompts]
    several = _in_order(prompts, "a prompt is text or a list of token ids")
    return [several] if several and all(isinstance(p, int) for p in several) else several


def conversations_of(messages: Iterable[Message] | Iterable[list[Message]]) -> list[list[Message]]:
    """One conversation, or anything that yields them, as a list. Raises PromptError."""
    several = _in_order(messages, 'a conversation is a list of messages such as {"role": "user", "content": "Hi"}')
    return [several] if several and isinstance(several[0], Mapping) else several


def params_of(sampling_params, count: int, default: SamplingParams) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts; None: the default. Raises PromptError or ConfigError."""
    params = default if sampling_params is None else sampling_params
    params = list(params) if isinstance(params, (list, tuple)) else [params] * count
    for wrong in (p for p in params if not isinstance(p, SamplingParams)):
        raise ConfigError(
            f"sampling_params={wrong!r:.80} must be SamplingParams(...), not {type(wrong).__name__}: one, a list of "
            f"them, or None for the model's own"
        )
    if len(params) != count:
        raise PromptError(f"{count} prompts but {len(params)} sampling_params; give one, or one for each")
    return params


def check_pieces(pieces: Iterable[str]) -> None:
    """Raises PromptError for what cannot be a text that arrives in pieces."""
    if isinstance(pieces, (bytes, Mapping)) or not isinstance(pieces, Iterable):
        raise PromptError(
            f"pieces={pieces!r:.80} is no text: give a file opened as text, or whatever iterates over str"
        )


def _in_order(values: Iterable, expected: str) -> list:
    """What may be a generator, gone through once."""
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise PromptError(f"{expected}, one or a list of them, not {type(values).__name__}")
    return list(values)
