"""What the exercise on tokens is checked against: learning merges, recovering them, and text that arrives in pieces.

Words are chosen so that one slip shows in one place: only some repeat a letter in a row, only some are not ASCII, in
some alone the leftmost pair is not the one to merge. The oracle (bpe_oracle.py) is slow and plain; that of streams is
Python's own incremental decoder. The engine's tokenizer is not used. Built in lesson 01.
"""

from __future__ import annotations

import codecs
import random
import re
from collections.abc import Sequence

from minillm.course.checks import bpe_oracle as oracle
from minillm.course.grader.task import MISSING, Case, Record, Task, Verdicts

HIDES = ("minillm.tokenizer", "minillm.detokenizer")
READY_MADE = ("codecs.getincrementaldecoder", "codecs.BufferedIncrementalDecoder", "codecs.StreamReader")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIGN = "\ufffd"  # what stands for bytes that are no text

# ---- learning merges -----------------------------------------------------------------------------

LEARN_ITEMS = ("three words", "merged again", "how often", "word edges", "in a row", "ties", "beyond ASCII", "runs out")


def learn_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    a, b, c, d, e, f, g, h = r.sample(LETTERS, 8)
    low, high = sorted((a, b))
    often, seldom = r.randint(6, 9), r.randint(2, 5)
    umlaut = r.choice("éßñøжשλ")
    edges = [c + a, b + d, e + a, b + f, g + a, b + h, c + d + e, c + d + f]
    words = {
        "three words": ({"hug": 4, "pug": 2, "hugs": 1}, 1),
        "merged again": ({a + b: 1, a + b + c: seldom, a + b + c + d: often}, 3),
        "how often": ({a + b: often + seldom, c + d + e: 1, c + d + f: 1, c + d + g: 1}, 1),
        "word edges": (dict.fromkeys(edges, 1), 1),
        "in a row": ({a * 5 + b: often, c + a * 3: seldom}, 2),
        "ties": ({high + e: often, low + f: often}, 1),
        "beyond ASCII": ({umlaut: often, umlaut + a: seldom}, 1),
        "runs out": ({a + b: 1}, r.randint(4, 8)),
    }
    return [{"items": [item], "words": counts, "num_merges": merges} for item, (counts, merges) in words.items()]


def learn_drive(learn_merges, case: Case) -> Record:
    merges = learn_merges(dict(case["words"]), case["num_merges"])
    return {"merges": None if merges is None else [oracle.as_text(pair) for pair in merges]}


def learn_judge(case: Case, record: Record) -> Verdicts:
    given = case["words"], case["num_merges"]
    slips = {
        "each word counts as often as it occurs, not once": oracle.learn(dict.fromkeys(given[0], 1), given[1]),
        "a pair was counted across the edge between two words": oracle.learn(*given, across=True),
        "a part that one merge has used up was merged again: after a merge, go on behind it": oracle.learn(
            *given, join=oracle.join_overlapping
        ),
        "of pairs with equal counts the smaller one, as Python orders bytes, goes first": oracle.learn(
            *given, smallest=False
        ),
        "the word was cut into characters; the first tokens are the bytes of its UTF-8": oracle.learn(
            *given, cut=oracle.whole_characters
        ),
    }
    return dict.fromkeys(case["items"], explain(record.get("merges"), oracle.learn(*given), slips))


def explain(got: object, wanted: list, slips: dict[str, list]) -> str:
    """ "" when `got` is right, else the slip that gives just this, else what came instead."""
    if got == wanted:
        return ""
    if got is None:
        return f"the result {MISSING}"
    if foreign := re.search(r"'not bytes': '(\w+)'", repr(got)):
        return f"a token is {foreign[1]}, not bytes: a word's bytes are `word.encode()`, one of them `bytes([number])`"
    return next((slip for slip, values in slips.items() if got == values), f"{show(got)}, expected {show(wanted)}")


def show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


# ---- from a vocabulary back to its merges --------------------------------------------------------

RECOVER_ITEMS = ("two bytes", "longer tokens", "two ways", "long halves", "in a row", "half characters")


def recover_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    a, b, c, d, e, f = r.sample(LETTERS, 6)
    long = "".join(r.sample(LETTERS.upper(), r.randint(4, 6)))
    smile, umlaut = (r.choice(signs).encode().decode("latin-1") for signs in ("🙂🌊🎈", "éßñøλ"))
    vocabularies = [
        ("two bytes", [a + b, c + d, e + a]),
        ("longer tokens", ["ug", "hug", "pug", "hugs"]),
        ("longer tokens", [long[:i] for i in range(2, len(long) + 1)]),
        ("longer tokens", [long[-i:] for i in range(2, len(long) + 1)]),
        ("two ways", [b + c, a + b, a + b + c, d + e, e + f, d + e + f]),
        ("long halves", [d + e, c + d + e, a + b, b + c + d + e, a + b + c + d + e]),
        ("long halves", [a + b, a + b + c, d + e, a + b + c + d, a + b + c + d + e]),
        ("in a row", [a * 2, a * 3]),
        ("in a row", [a * 2, a * 4, a * 5]),
        ("half characters", [smile[:2], smile[:3], umlaut, smile, a + umlaut]),
    ]
    return [{"items": [item], "vocabulary": tokens} for item, tokens in vocabularies]


def recover_drive(recover_merges, case: Case) -> Record:
    merges = recover_merges([token.encode("latin-1") for token in case["vocabulary"]])
    return {"merges": None if merges is None else [oracle.as_text(pair) for pair in merges]}


def recover_judge(case: Case, record: Record) -> Verdicts:
    splits = {
        "where one pair stands in several places, the leftmost goes first": oracle.by_merging(
            lambda rank, i: (rank, -i)
        ),
        "the first cut into two known tokens was taken; which of several is right the ranks say": oracle.by_halves(1),
        "what is known at the left was taken; the pair with the lowest rank goes first, wherever it stands": (
            oracle.by_halves(-1)
        ),
        "the highest rank went first; a merge that was learnt earlier has the lower rank": oracle.by_merging(
            lambda rank, i: (-rank, i)
        ),
        "a byte from 128 on was encoded once more: `bytes([number])` is one byte": oracle.by_merging(
            cut=oracle.encoded_again
        ),
    }
    vocabulary, merges = [token.encode("latin-1") for token in case["vocabulary"]], record.get("merges")
    parts = next((len(pair) for pair in merges if len(pair) != 2), 2) if isinstance(merges, list) else 2
    if parts != 2:
        return dict.fromkeys(case["items"], f"a merge joins two parts, this one has {parts}: stop when two are left")
    slips = {sentence: oracle.recover(vocabulary, split) for sentence, split in splits.items()}
    wanted = oracle.recover(vocabulary, oracle.by_merging())
    return dict.fromkeys(case["items"], explain(merges, wanted, slips))


# ---- text in pieces ------------------------------------------------------------------------------

STREAM_ITEMS = (
    "ASCII at once",
    "a cut character",
    "any split",
    "broken bytes",
    "unfinished end",
    "the sign itself",
    "a second text",
)
BY_PIECE = ("ASCII at once", "a cut character", "any split", "the sign itself")  # else only the whole counts


def stream_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    word = "".join(r.choices(LETTERS, k=5))
    mixed = "".join(r.choices("aé中🙂ß日🌊 z", k=12)).encode()
    cuts = sorted(r.sample(range(1, len(mixed)), min(6, len(mixed) - 1)))
    pieces = [mixed[i:j] for i, j in zip([0, *cuts], [*cuts, len(mixed)], strict=True)]
    smile = "🙂".encode()
    texts = {
        "ASCII at once": [[word[:2].encode(), b" ", word[2:].encode()]],
        "a cut character": [[b"caf", b"\xc3", b"\xa9", b"!"], [smile[:2], smile[2:]], oracle.single_bytes(smile)],
        "any split": [pieces],
        "broken bytes": [[word.encode(), r.choice((b"\xff", b"\xfe", b"\xc0", b"\x80")), b"end"]],
        "unfinished end": [[word.encode(), r.choice((b"\xc3", b"\xe4", b"\xf0\x9f"))]],
        "the sign itself": [[word.encode(), SIGN.encode(), b"?"]],
        "a second text": [[b"one", b"\xc3"], [word.encode(), b"."]],
    }
    return [
        {"items": [item], "texts": [[piece.decode("latin-1") for piece in text] for text in texts[item]]}
        for item in STREAM_ITEMS
    ]


def stream_drive(TextStream, case: Case) -> Record:
    stream, shown = TextStream(), []
    for text in case["texts"]:
        shown.append([*(stream.push(piece.encode("latin-1")) for piece in text), stream.flush()])
    return {"shown": shown}


def stream_judge(case: Case, record: Record) -> Verdicts:
    (item,) = case["items"]
    texts = [[piece.encode("latin-1") for piece in text] for text in case["texts"]]
    shown = record.get("shown")
    if not _are_texts(shown, texts):
        return {item: f"push and flush have to return a str each time, not {_first_other(shown)}"}
    wanted = [in_pieces(text) for text in texts]
    if shown == wanted or (item not in BY_PIECE and [*map("".join, shown)] == [*map("".join, wanted)]):
        return {item: ""}
    whole, right = (["".join(text) for text in result] for result in (shown, wanted))
    slips = {
        "text was held back that was complete: only an unfinished character has to wait": whole == right,
        f"bytes that are no text were dropped; each becomes {SIGN}": whole
        == [b"".join(text).decode(errors="ignore") for text in texts],
        "something of the first text was left when the second began": item == "a second text" and whole[0] == right[0],
        "an unfinished character was given up too early: its other bytes come with the next piece": any(
            got.count(SIGN) > text.count(SIGN) for got, text in zip(whole, right, strict=True)
        ),
    }
    return {item: next((slip for slip, found in slips.items() if found), f"{show(shown)}, expected {show(wanted)}")}


def _are_texts(shown: object, texts: Sequence[Sequence[bytes]]) -> bool:
    return (
        isinstance(shown, list)
        and [len(s) if isinstance(s, list) else -1 for s in shown] == [len(text) + 1 for text in texts]
        and all(isinstance(piece, str) for s in shown for piece in s)
    )


def _first_other(shown: object) -> str:
    pieces = [piece for text in shown if isinstance(text, list) for piece in text] if isinstance(shown, list) else []
    return next((type(piece).__name__ for piece in pieces if not isinstance(piece, str)), show(shown))


def in_pieces(pieces: Sequence[bytes]) -> list[str]:
    """What may be shown after each piece, and at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [*(decoder.decode(piece) for piece in pieces), decoder.decode(b"", final=True)]


TASKS = (
    Task(
        "ex01.1",
        "learn_merges",
        "learning merges",
        len(LEARN_ITEMS),
        LEARN_ITEMS,
        learn_cases,
        learn_drive,
        learn_judge,
        HIDES,
    ),
    Task(
        "ex01.2",
        "recover_merges",
        "merges from a vocabulary",
        len(RECOVER_ITEMS),
        RECOVER_ITEMS,
        recover_cases,
        recover_drive,
        recover_judge,
        HIDES,
    ),
    Task(
        "ex01.3",
        "TextStream",
        "text in pieces",
        len(STREAM_ITEMS),
        STREAM_ITEMS,
        stream_cases,
        stream_drive,
        stream_judge,
        (*HIDES, *READY_MADE),
    ),
)
