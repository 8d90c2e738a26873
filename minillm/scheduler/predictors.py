"""Guesses at the next prompt, made from the past alone: what `speculative_prefill` computes while nobody waits.

A predictor sees each request when it arrives and again when it has ended, and lists beginnings that the next
prompts may have. What of them is already in the cache, what fits, and when there is time for it is the
scheduler's business. Bring your own by writing these three methods. Built in lesson 13.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from minillm.config import EngineConfig
from minillm.request import Request

Guess = tuple[Sequence[int], int]
"""(token ids, n): some next prompt may begin with the first n of these tokens."""


class Predictor(Protocol):
    """What the scheduler asks of one."""

    def arrived(self, request: Request) -> None:
        """A prompt was accepted: the first `request.num_prompt_tokens` of `request.token_ids`."""

    def ended(self, request: Request) -> None:
        """A request is complete; prompt and answer are `request.token_ids`."""

    def predict(self) -> Iterable[Guess]:
        """Beginnings of prompts that are likely to come, the likeliest first."""


class FrequentPrefixes:
    """Beginnings that several past prompts share: system prompts, templates, and prompts that come again.

    Of each of the last `history` prompts, the longest prefix in whole blocks that at least `min_count` of them
    begin with; the most frequent first.
    """

    def __init__(self, block_size: int, history: int = 256, min_count: int = 2):
        self.block_size = block_size
        self.history = history
        self.min_count = min_count
        self._prompts: deque[tuple[Sequence[int], list[int]]] = deque()  # token ids, keys of the prompt's prefixes
        self._counts: Counter[int] = Counter()  # prompts that begin with the prefix of this key
        self._guesses: list[Guess] | None = None  # None: to be made again

    def arrived(self, request: Request) -> None:
        keys = self._keys(request.token_ids, request.num_prompt_tokens)
        self._prompts.append((request.token_ids, keys))
        self._counts.update(keys)
        if len(self._prompts) > self.history:
            _, forgotten = self._prompts.popleft()
            self._counts.subtract(forgotten)
        self._guesses = None

    def ended(self, request: Request) -> None:
        """What a prompt was answered says nothing about how the next one begins."""

    def predict(self) -> list[Guess]:
        if self._guesses is None:
            found: dict[int, Guess] = {}
            for token_ids, keys in reversed(self._prompts):
                shared = sum(self._counts[key] >= self.min_count for key in keys)  # counts fall along a prompt
                if shared:
                    found.setdefault(keys[shared - 1], (token_ids, shared * self.block_size))
            self._guesses = [found[key] for key in sorted(found, key=lambda key: -self._counts[key])]
        return self._guesses

    def _keys(self, token_ids: Sequence[int], length: int) -> list[int]:
        """One key for each prefix in whole blocks. Two prefixes of one key would only make a worse guess."""
        keys, key = [], 0
        for start in range(0, length - self.block_size + 1, self.block_size):
            key = hash((key, tuple(token_ids[start : start + self.block_size])))
            keys.append(key)
        return keys


class Conversations:
    """After an answer its conversation goes on: the next prompt begins with all that has been said.

    The last `history` conversations that nobody has continued yet, the latest first. Right after the answer all of
    it is in the cache anyway; the guess pays when other prompts have pushed it out before the reader has typed on.
    """

    def __init__(self, history: int = 32):
        self._open: deque[Sequence[int]] = deque(maxlen=history)

    def arrived(self, request: Request) -> None:
        """If this prompt continues a conversation, that one is no longer at its end."""
        for said in self._open:
            n = len(said)
            if n <= request.num_prompt_tokens and request.token_ids[0:n] == said[0:n]:
                self._open.remove(said)
                return

    def ended(self, request: Request) -> None:
        self._open.appendleft(request.token_ids)

    def predict(self) -> list[Guess]:
        return [(token_ids, len(token_ids)) for token_ids in self._open]


def make_predictor(config: EngineConfig) -> Predictor:
    """The predictor that `config.speculative_predictor` names."""
    if config.speculative_predictor == "conversation":
        return Conversations()
    return FrequentPrefixes(config.block_size)
