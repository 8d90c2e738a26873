"""How surprised a model is by a text: perplexity over windows, with the standard error that belongs to it.

The text is cut into windows of a fixed length that overlap: each scores only the tokens that no window before it has
scored, so that all but the first ones see at least `window - stride` tokens. Perplexity is exp of the mean negative
log-probability. Two ways to run one model are compared window by window (`nats_above`), where most of what makes one
window harder than another cancels. Used by `compare_precision.py`; lesson 16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from minillm.errors import PromptError

JARGON_FILE = Path(__file__).parent / "data" / "jargon_file" / "text.txt"
"""The Jargon File 4.4.7 in part, public domain: 103 kB, see the README.md beside it."""
WINDOW, STRIDE = 1024, 512


@dataclass(frozen=True)
class Perplexity:
    """What was scored in each window.

    losses  negative log-probabilities, summed
    counts  tokens
    """

    losses: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def nats(self) -> float:
        """Mean negative log-probability of a token."""
        return sum(self.losses) / self.tokens

    @property
    def value(self) -> float:
        return math.exp(self.nats)

    @property
    def standard_error(self) -> float:
        """Of `value`, from how much the windows differ: what another text of this kind and length would change."""
        return self.value * _error_of_mean(self.losses, self.counts)

    def nats_above(self, other: Perplexity) -> tuple[float, float]:
        """(mean, its standard error) of how many nats per token this is above another measurement of these windows.

        Raises ValueError when the other one was not measured on the same windows.
        """
        if self.counts != other.counts:
            raise ValueError(f"windows differ: {self.counts} tokens beside {other.counts}; measure both on one text")
        differences = [a - b for a, b in zip(self.losses, other.losses, strict=True)]
        return sum(differences) / self.tokens, _error_of_mean(differences, self.counts)


def perplexity(
    llm,
    ids: Sequence[int],
    window: int = WINDOW,
    stride: int = STRIDE,
    use_tqdm: bool = True,
    title: str = "perplexity",
) -> Perplexity:
    """Score token ids [n] through `LLM.score`, with a progress bar under this title.

    Raises PromptError when there are too few tokens for two windows, without which there is no standard error, when a
    window does not fit the engine, or for ids and sizes that are none.
    """
    ids = llm.tokenizer.check_ids(ids)
    for name, value in (("window", window), ("stride", stride)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PromptError(f"{name}={value!r} must be an integer of at least 1: so many tokens")
    if stride >= window:
        raise PromptError(f"stride={stride} must be from 1 to window - 1 = {window - 1}, so that windows overlap")
    if len(ids) <= window:
        raise PromptError(f"{len(ids)} tokens are one window of {window}; a standard error needs more than one")
    starts = range(0, len(ids) - window + stride, stride)
    losses, counts = [], []
    with _progress_bar(len(starts), title) if use_tqdm else nullcontext() as bar:
        for start in starts:
            scores = llm.score(ids[start : start + window], start=1 if start == 0 else window - stride)
            losses.append(-math.fsum(scores))
            counts.append(len(scores))
            if bar is not None:
                bar.update()
    return Perplexity(tuple(losses), tuple(counts))


def _error_of_mean(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Standard error of sum(sums) / sum(counts) over windows taken as independent draws (a ratio estimate)."""
    mean, n = sum(sums) / sum(counts), len(sums)
    squares = sum((total - mean * count) ** 2 for total, count in zip(sums, counts, strict=True))
    return math.sqrt(squares * n / (n - 1)) / sum(counts)


def _progress_bar(total: int, title: str):
    from tqdm import tqdm

    return tqdm(total=total, desc=title, unit="window")
