"""Byte-pair encoding the slow way, and with one thing wrong at a time, for diagnoses: every pair is counted and looked
at again after every merge. Bytes are shown as strings of the characters 0 to 255 (latin-1), which is plain data.
`learn` goes from words to merges, `recover` from the tokens that merges have made back to the merges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

Pair = tuple[bytes, bytes]
Ranks = dict[Pair, int]


def single_bytes(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def as_text(tokens: Iterable[object]) -> list[object]:
    """Tokens as plain data; what is not bytes is named by its type."""
    return [t.decode("latin-1") if isinstance(t, bytes) else {"not bytes": type(t).__name__} for t in tokens]


def learn(
    words: dict[str, int],
    num_merges: int,
    cut: Callable[[str], list[bytes]] = lambda word: single_bytes(word.encode()),
    join: Callable[[list[bytes], Pair], list[bytes]] | None = None,
    smallest: bool = True,
    across: bool = False,
) -> list[list[object]]:
    """The merges that `words` (word -> count) teach: the most frequent pair, among equals the smallest, joined.

    Everything but the first two arguments is a slip. `across` counts pairs over the edges of words too.
    """
    parts = [(cut(word), count) for word, count in words.items()]
    if across:
        parts = [([token for tokens, count in parts for token in tokens * count], 1)]
    merges = []
    while len(merges) < num_merges:
        counts: Counter[Pair] = Counter()
        for tokens, count in parts:
            for pair in pairwise(tokens):
                counts[pair] += count
        if not counts:
            break
        equals = [pair for pair, count in counts.items() if count == max(counts.values())]
        best = min(equals) if smallest else max(equals)
        merges.append(as_text(best))
        parts = [((join or join_pair)(tokens, best), count) for tokens, count in parts]
    return merges


def join_pair(tokens: list[bytes], pair: Pair) -> list[bytes]:
    joined, i = [], 0
    while i < len(tokens):
        together = tuple(tokens[i : i + 2]) == pair
        joined.append(tokens[i] + tokens[i + 1] if together else tokens[i])
        i += 2 if together else 1
    return joined


def join_overlapping(tokens: list[bytes], pair: Pair) -> list[bytes]:
    """A slip: a part that one merge has used up is used again by the next."""
    hits = [tuple(tokens[i : i + 2]) == pair for i in range(len(tokens))]
    kept = [i for i in range(len(tokens)) if hits[i] or i == 0 or not hits[i - 1]]
    return [tokens[i] + tokens[i + 1] if hits[i] else tokens[i] for i in kept]


def whole_characters(word: str) -> list[bytes]:
    """A slip: the first tokens are characters, not bytes."""
    return [char.encode() for char in word]


Split = Callable[[bytes, Ranks], tuple[bytes, ...]]


def recover(vocabulary: list[bytes], split: Split) -> list[list[object]]:
    """The pair of each token, first learnt first: `split` cuts a token with the merges of those before it."""
    ranks: Ranks = {}
    for token in vocabulary:
        ranks[split(token, ranks)] = len(ranks)
    return [as_text(pair) for pair in ranks]


def by_merging(order: Callable = lambda rank, i: (rank, i), cut: Callable = single_bytes) -> Split:
    """Merges what is first in `order` (a pair's rank, its place) until two parts are left. Defaults are no slip."""

    def split(token: bytes, ranks: Ranks) -> tuple[bytes, ...]:
        parts = cut(token)
        while len(parts) > 2:
            found = [(order(ranks[pair], i), i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
            if not found:
                break
            i = min(found)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return tuple(parts)

    return split


def by_halves(step: int) -> Split:
    """A slip: the first cut into two known tokens, shortest left half first (step 1) or longest (step -1)."""

    def split(token: bytes, ranks: Ranks) -> tuple[bytes, bytes]:
        known = {first + second for first, second in ranks} | set(single_bytes(token))
        halves = [(token[:i], token[i:]) for i in range(1, len(token))][::step]
        return next((pair for pair in halves if set(pair) <= known), halves[0])

    return split


def encoded_again(token: bytes) -> list[bytes]:
    """A slip: the number of a byte is taken for a character, which has two bytes from 128 on."""
    return [chr(number).encode() for number in token]
