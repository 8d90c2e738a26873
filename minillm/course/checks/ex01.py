"""What the exercise on tokens is checked against: learning merges, using them, and text that arrives in pieces.

Words are chosen so that one slip shows in one place: only some have a letter twice in a row, only some are not ASCII, in
only some does the leftmost pair lose. Bytes travel as strings of characters 0 to 255 (latin-1). The oracle scans every
pair again after every merge; the engine's tokenizer is not used. Built in lesson 01.
"""

from __future__ import annotations

import codecs
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from minillm.course.grader.task import Case, Record, Task, Verdicts

HIDES = ("minillm.tokenizer", "minillm.detokenizer", "codecs.getincrementaldecoder")
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Pair = tuple[bytes, bytes]

# ---- learning merges -----------------------------------------------------------------------------

LEARN_ITEMS = ("three words", "merged again", "how often", "word edges", "in a row", "ties", "beyond ASCII", "runs out")


def learn_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    a, b, c, d, e, f, g, h = r.sample(LETTERS, 8)
    low, high = sorted((a, b))
    often, seldom = r.randint(6, 9), r.randint(2, 5)
    return [
        _learn("three words", {"hug": 4, "pug": 2, "hugs": 1}, 1),
        _learn("merged again", {a + b + c + d: often, a + b + c: seldom, a + b: 1}, 3),
        _learn("how often", {a + b: often + seldom, c + d + e: 1, c + d + f: 1, c + d + g: 1}, 1),
        _learn("word edges", {a + b: 1, b + a: 1, c + d: 2, a + b + e: 1, b + a + f: 1, a + b + g: 1}, 1),
        _learn("in a row", {a * 5 + b: often, c + a * 3: seldom}, 3),
        _learn("ties", {high + e: often, low + f: often, g + h: 1}, 1),
        _learn("beyond ASCII", {"é" + a: often, "è" + a: seldom, r.choice("日本語") + b: 1}, 2),
        _learn("runs out", {a + b: often, c: seldom}, r.randint(4, 8)),
    ]


def _learn(item: str, words: dict[str, int], num_merges: int) -> Case:
    return {"items": [item], "words": words, "num_merges": num_merges}


def learn_drive(learn_merges, case: Case) -> Record:
    return {"merges": [_as_strings(pair) for pair in learn_merges(dict(case["words"]), case["num_merges"])]}


def learn_judge(case: Case, record: Record) -> Verdicts:
    words, num_merges, got = case["words"], case["num_merges"], record.get("merges")
    slips = {
        "each word counts as often as it occurs, not once": _merges(dict.fromkeys(words, 1), num_merges),
        "a pair was counted across the edge between two words": _merges(words, num_merges, across=True),
        "the merge takes a part that the merge before has used up: after a merge, go on behind it": _merges(
            words, num_merges, join=_join_overlapping
        ),
        "equal counts: the smaller pair, by Python's order of bytes, goes first": _merges(words, num_merges, sign=-1),
        "the word was cut into characters; the first tokens are its UTF-8 bytes": _merges(words, num_merges, cut=_chars),
    }
    return {item: _explain(got, _merges(words, num_merges), slips, "the list of merges") for item in case["items"]}


def _merges(
    words: dict[str, int],
    num_merges: int,
    cut: Callable[[str], list[bytes]] = lambda word: _bytes(word.encode()),
    join: Callable[[list[bytes], Pair], list[bytes]] | None = None,
    sign: int = 1,
    across: bool = False,
) -> list[list[str]]:
    """The oracle, and with another argument one of the slips."""
    join = join or _join
    parts = [(cut(word), count) for word, count in words.items()]
    if across:
        parts = [([part for tokens, count in parts for part in tokens * count], 1)]
    merges: list[list[str]] = []
    while len(merges) < num_merges:
        counts: Counter[Pair] = Counter()
        for tokens, count in parts:
            for pair in pairwise(tokens):
                counts[pair] += count
        if not counts:
            break
        most = max(counts.values())
        best = sorted(pair for pair in counts if counts[pair] == most)[0 if sign > 0 else -1]
        merges.append(_as_strings(best))
        parts = [(join(tokens, best), count) for tokens, count in parts]
    return merges


def _join(tokens: list[bytes], pair: Pair) -> list[bytes]:
    joined, i = [], 0
    while i < len(tokens):
        together = tuple(tokens[i : i + 2]) == pair
        joined.append(tokens[i] + tokens[i + 1] if together else tokens[i])
        i += 2 if together else 1
    return joined


def _join_overlapping(tokens: list[bytes], pair: Pair) -> list[bytes]:
    hits = [tuple(tokens[i : i + 2]) == pair for i in range(len(tokens))]
    kept = [i for i in range(len(tokens)) if hits[i] or i == 0 or not hits[i - 1]]
    return [tokens[i] + tokens[i + 1] if hits[i] else tokens[i] for i in kept]


# ---- using them ----------------------------------------------------------------------------------

ENCODE_ITEMS = ("one merge", "in order", "lowest rank first", "merged again", "in a row", "nothing to merge")


def encode_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    a, b, c, d, e = (letter.encode() for letter in r.sample(LETTERS, 5))
    tail = [letter.encode() for letter in r.sample(LETTERS.upper(), r.randint(2, 4))]
    chain = [(b"".join(tail[:i]), tail[i]) for i in range(1, len(tail))]
    return [
        _encode("one merge", b"hugs", [(b"u", b"g")]),
        _encode("in order", a + b + c + d, [(a, b), (c, d)]),
        _encode("lowest rank first", b"lighthouse", [(b"o", b"u"), (b"t", b"h"), (b"g", b"h"), (b"h", b"o")]),
        _encode("lowest rank first", a + b + c + d, [(b, c), (a, b), (c, d)]),
        _encode("merged again", b"".join(tail) + e, chain),
        _encode("in a row", a * r.choice((3, 5)) + b, [(a, a)]),
        _encode("nothing to merge", d + "é".encode() + e, [(a, b)]),
        _encode("nothing to merge", b"", [(a, b)]),
    ]


def _encode(item: str, word: bytes, merges: list[Pair]) -> Case:
    return {"items": [item], "word": word.decode("latin-1"), "merges": [_as_strings(pair) for pair in merges]}


def encode_drive(encode_word, case: Case) -> Record:
    ranks = {tuple(_as_bytes(pair)): rank for rank, pair in enumerate(case["merges"])}
    return {"tokens": _as_strings(encode_word(case["word"].encode("latin-1"), ranks))}


def encode_judge(case: Case, record: Record) -> Verdicts:
    word = case["word"].encode("latin-1")
    ranks = {tuple(_as_bytes(pair)): rank for rank, pair in enumerate(case["merges"])}
    got = record.get("tokens")
    slips = {
        "the leftmost pair was merged, not the one with the lowest rank": _tokens(word, ranks, lambda rank, i: i),
        "the highest rank went first; learnt earlier means lower": _tokens(word, ranks, lambda rank, i: (-rank, i)),
        "the merging ends too early: what a merge makes may be merged again": _tokens(word, ranks, rounds=1),
        "among equal pairs the leftmost goes first": _tokens(word, ranks, lambda rank, i: (rank, -i)),
        "the longest known token was taken from the left, whatever the ranks say": _longest(word, ranks),
    }
    wrong = _explain(got, _tokens(word, ranks), slips, "the list of tokens")
    if wrong and isinstance(got, list) and all(isinstance(token, str) for token in got) and "".join(got) != case["word"]:
        wrong = f"the tokens {got} joined are not the word: bytes were lost or doubled"
    return dict.fromkeys(case["items"], wrong)


def _tokens(word: bytes, ranks: dict[Pair, int], order=lambda rank, i: (rank, i), rounds: int = 1000) -> list[str]:
    """The oracle, and with another order of merges one of the slips."""
    tokens = _bytes(word)
    for _ in range(rounds):
        found = [(order(ranks[pair], i), i) for i, pair in enumerate(pairwise(tokens)) if pair in ranks]
        if not found:
            break
        i = min(found)[1]
        tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
    return _as_strings(tokens)


def _longest(word: bytes, ranks: dict[Pair, int]) -> list[str]:
    known, tokens = {first + second for first, second in ranks}, []
    while word:
        size = next(size for size in range(len(word), 0, -1) if size == 1 or word[:size] in known)
        tokens.append(word[:size])
        word = word[size:]
    return _as_strings(tokens)
