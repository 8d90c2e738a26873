"""One rule for each item of the pool of shared pages: what the tables, copies and free blocks of its script must be.

A rule takes the case and what was noted after each of its calls, and yields a sentence for each thing that is wrong,
the most telling first. Task 1 of exercise 06; the scripts are in shared_pages.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from minillm.course.grader.task import Case


def said(call: dict) -> str:
    """A call in words."""
    if call["do"] == "grow":
        return f"growing {call['who']} by {call['n']} tokens"
    return f"forking {call['who']}" if call["do"] == "fork" else f"freeing {call['who'].replace(',', ' and ')}"


def _own(case: Case, notes: list[dict]) -> Iterator[str]:
    freed = [call["who"] for call in case["calls"] if call["do"] == "free"]
    tables = [table for name, table in notes[-1]["tables"].items() if name not in freed]
    taken = sorted(block for table in tables for block in table)
    for block in taken:
        if taken.count(block) > 1:
            yield f"block {block} stands twice in the tables {tables}, and nothing was forked"


def _needed(case: Case, notes: list[dict]) -> Iterator[str]:
    size, table = case["block_size"], notes[-1]["tables"]["a"]
    grown = [call["n"] for call in case["calls"]]
    if len(table) > (needed := -(-sum(grown) // size)):
        steps = ", then ".join(map(str, grown))
        yield f"{steps} tokens got {len(table)} blocks of {size}, {needed} is enough"


def _fork(case: Case, notes: list[dict]) -> Iterator[str]:
    before, after = notes[-2], notes[-1]
    if not after["apart"]:
        yield "fork returned the very list that it was given: what one text appends, the other gets too"
    if after["tables"]["b"] != before["tables"]["a"] or after["tables"]["a"] != before["tables"]["a"]:
        yield f"the fork of {before['tables']['a']} is {after['tables']['b']}: it holds the same blocks, nothing moves"
    if after["free"] != before["free"]:
        yield f"{before['free']} blocks were free before the fork and {after['free']} after it: it takes none"


def _write(case: Case, notes: list[dict]) -> Iterator[str]:
    writer = case["calls"][-1]["who"]
    other = "a" if writer == "b" else "b"
    before, after = notes[-2]["tables"], notes[-1]["tables"]
    at = len(before[writer]) - 1
    old, new = before[writer][at], after[writer][at]
    if after[other] != before[other]:
        yield f"{writer} writes, and the table of {other} went from {before[other]} to {after[other]}"
    if new == old:
        yield f"{writer} writes into block {old}, which {other} reads as well: it has to get a block of its own"
    if new in after[other]:
        yield f"{writer} writes into block {new}, which stands in the table of {other}, too"
    if [old, new] not in _copies(notes[-1]):
        yield f"block {new} takes the place of block {old}, and the copy {(old, new)} is missing: {notes[-1]['copies']}"


def _shared(case: Case, notes: list[dict]) -> Iterator[str]:
    table, copies = notes[-1]["tables"]["b"], _copies(notes[-1])
    full = case["calls"][0]["n"] // case["block_size"]
    kept = notes[-1]["tables"]["a"][:full]
    if table[:full] != kept:
        yield f"the first {full} blocks are full and nobody writes them: they stay {kept}, found {table[:full]}"
    if any(source in kept for source, _ in copies):
        yield f"copies {copies}: a block that is full is never written again, so it need not be copied"
    if len(copies) > bool(case["calls"][0]["n"] % case["block_size"]):
        yield f"{len(copies)} copies where the new tokens begin in one block at most: {copies}"


def _in_place(case: Case, notes: list[dict]) -> Iterator[str]:
    before, after = notes[-2]["tables"]["a"], notes[-1]["tables"]["a"]
    if _copies(notes[-1]) or after[: len(before)] != before:
        yield f"b has a copy by now, a is the only one left in block {before[-1]}: it writes there and copies nothing"


def _three(case: Case, notes: list[dict]) -> Iterator[str]:
    tables = notes[-1]["tables"]
    tails = [table[0] for table in tables.values()]
    if len(set(tails)) < 3:
        yield f"three texts shared a block, two have written, and they stand in blocks {tails}: one is still shared"


def _given_back(case: Case, notes: list[dict]) -> Iterator[str]:
    shared, freed = notes[1], notes[2]
    if freed["free"] != shared["free"]:
        yield (
            f"b was freed, a still reads the same blocks: {shared['free']} blocks were free and "
            f"{freed['free']} are free now"
        )
    both = set(notes[-1]["tables"]["a"]) & set(notes[-1]["tables"]["c"])
    if both:
        yield f"c was given blocks {sorted(both)}, which a still reads"


def _all_back(case: Case, notes: list[dict]) -> Iterator[str]:
    if (free := notes[4]["free"]) != case["num_blocks"]:
        yield f"nobody holds a block any more, and {free} of {case['num_blocks']} are free"
    given = notes[-1]["tables"].get("c")
    if given is not None and len(set(given)) != case["num_blocks"]:
        yield f"the whole pool was given out as {given}, wanted is each block once"


def _twice(case: Case, notes: list[dict]) -> Iterator[str]:
    before, after = notes[-2], notes[-1]
    if not after["refused"]:
        yield "a table was freed twice, and nothing was said: the next two texts would get the same block"
    yield from _value_error(case["calls"][-1], after)
    if case["items"] == ["an error frees nothing"] and after["free"] != before["free"]:
        gone = after["tables"]["b"][0]
        yield f"block {gone} was free already, noticed when another had been freed: look at all of the table first"


def _refusal(case: Case, notes: list[dict]) -> Iterator[str]:
    before, after, call = notes[0], notes[1], case["calls"][1]
    needed = -(-call["n"] // case["block_size"])
    if not after["refused"]:
        yield f"{needed} blocks were needed and {before['free']} were free, and nothing was said"
    yield from _value_error(call, after)
    yield from _changed(before, after, "b")
    if not {needed, before["free"]} <= {int(number) for number in re.findall(r"\d+", after["refused"])}:
        yield f"the error does not name the {needed} blocks needed and the {before['free']} free: {after['refused']}"


def _copy_counts(case: Case, notes: list[dict]) -> Iterator[str]:
    before, after, call = notes[-2], notes[-1], case["calls"][-1]
    if not after["refused"]:
        yield "one block was free, and a copy and a new block were given out"
    yield from _changed(before, after, "b")
    yield from _value_error(call, after)


def _value_error(call: dict, note: dict) -> Iterator[str]:
    if not note["refused"].startswith("ValueError"):
        yield f"{said(call)} ends in {note['refused']}: raise ValueError before anything is changed"


def _changed(before: dict, after: dict, who: str) -> Iterator[str]:
    old, new = before["tables"].get(who, []), after["tables"][who]
    if new != old or after["free"] != before["free"]:
        yield (
            f"growing {who} was refused, and left its mark: table {old} is {new} now, {before['free']} blocks were "
            f"free and {after['free']} are; count all that is needed, a copy included, before you take the first"
        )


def _copies(note: dict) -> list:
    """The copies of one call, an empty list where there is something else."""
    copies = note["copies"]
    pairs = isinstance(copies, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in copies)
    return copies if pairs else []


RULES = {
    "blocks of its own": _own,
    "exact multiples": _needed,
    "the next block": _needed,
    "room in the last block": _needed,
    "a fork costs nothing": _fork,
    "copy on write": _write,
    "full blocks stay shared": _shared,
    "the last one writes in place": _in_place,
    "three texts": _three,
    "giving one back": _given_back,
    "all come back": _all_back,
    "freed twice": _twice,
    "an error frees nothing": _twice,
    "a refusal loses nothing": _refusal,
    "the copy counts": _copy_counts,
}
