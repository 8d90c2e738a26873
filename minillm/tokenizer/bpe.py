"""Byte-pair encoding itself: the byte alphabet, the merges of one word, and how merges are learnt.

A word is a string over 256 characters, one for each byte value, so that any text can be written and no
token is ever unknown. Cutting text into words is `pretokenize.py`; ids and special tokens are
`tokenizer.py`. Follows Sennrich et al. 2016 (arXiv:1508.07909), on bytes as in GPT-2 (Radford et al. 2019).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise

Pair = tuple[str, str]


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte value; vocabularies are stored in it.

    Printable Latin-1 bytes stand for themselves; the other 68 (controls, space, ...) take the characters
    from U+0100 on, in order. A space becomes "Ġ", a newline "Ċ".
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


BYTE_TO_CHAR = tuple(_byte_alphabet())
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}
_LATIN1_TO_ALPHABET = dict(enumerate(BYTE_TO_CHAR))


def to_alphabet(text: str) -> str:
    """The UTF-8 bytes of `text`, one alphabet character each: " é" -> "ĠÃ©"."""
    return text.encode("utf-8").decode("latin-1").translate(_LATIN1_TO_ALPHABET)


def to_bytes(token: str) -> bytes:
    """The bytes an alphabet string stands for. A string with any other character is plain text: its UTF-8."""
    try:
        return bytes([CHAR_TO_BYTE[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def merge_word(symbols: list[str], ranks: Mapping[Pair, int]) -> list[str]:
    """Join neighbours, always the pair with the lowest rank and among equals the leftmost, until no pair has one.

    symbols  the characters of one word
    ranks    pair -> position in the list of merges; learnt earlier means lower
    A heap of candidates and links to the neighbours make this n log n for a word of n characters, where a
    rescan after every merge would be n squared: a 100,000-letter "word" must not stall a server.
    """
    parts = list(symbols)
    n = len(parts)
    right = list(range(1, n + 1))  # index of the next living part; n is the end
    left = list(range(-1, n - 1))
    candidates = [(ranks[pair], i, *pair) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
    heapq.heapify(candidates)

    def offer(i: int, j: int) -> None:
        pair = (parts[i], parts[j])
        if pair in ranks:
            heapq.heappush(candidates, (ranks[pair], i, *pair))

    while candidates:
        _, i, first, second = heapq.heappop(candidates)
        j = right[i]
        if parts[i] != first or j == n or parts[j] != second:
            continue  # one of the two was merged with someone else meanwhile
        parts[i], parts[j] = first + second, ""
        right[i] = right[j]
        if right[i] < n:
            left[right[i]] = i
            offer(i, right[i])
        if left[i] >= 0:
            offer(left[i], i)
    return [part for part in parts if part]


def train_merges(word_counts: Mapping[str, int], num_tokens: int) -> list[Pair]:
    """The merges that add `num_tokens` tokens to the 256 bytes: join the most frequent pair, again and again.

    word_counts  word over the byte alphabet -> how often it occurs
    Ties go to the pair whose first part was made first, then whose second part was; single bytes count in
    the order of their alphabet characters. Returns fewer merges when no pair is left.
    """
    words = [list(word) for word in word_counts]
    counts = list(word_counts.values())
    made = {char: order for order, char in enumerate(sorted(BYTE_TO_CHAR))}  # token -> order of creation
    pair_counts: Counter[Pair] = Counter()
    words_with: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pair_counts[pair] += counts[index]
            words_with[pair].add(index)

    merges: list[Pair] = []
    enough = len(made) + num_tokens
    while len(made) < enough and pair_counts:
        best = max(pair_counts, key=lambda pair: (pair_counts[pair], -made[pair[0]], -made[pair[1]]))
        merges.append(best)
        made.setdefault("".join(best), len(made))
        for index in words_with.pop(best):  # only words that hold the pair change
            before, after = words[index], join_pair(words[index], best)
            words[index] = after
            for pair in pairwise(before):
                pair_counts[pair] -= counts[index]
                if pair_counts[pair] == 0:
                    del pair_counts[pair]
            for pair in pairwise(after):
                pair_counts[pair] += counts[index]
                words_with[pair].add(index)
    return merges


def join_pair(word: list[str], pair: Pair) -> list[str]:
    """Every occurrence of `pair` in `word` joined, from the left: ["a", "a", "a"] with ("a", "a") -> ["aa", "a"]."""
    joined, i = [], 0
    while i < len(word):
        if tuple(word[i : i + 2]) == pair:
            joined.append(word[i] + word[i + 1])
            i += 2
        else:
            joined.append(word[i])
            i += 1
    return joined
