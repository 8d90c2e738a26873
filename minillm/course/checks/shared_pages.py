"""Checks a pool of pages that texts share until one of them writes: what is taken, copied, given back and refused.

A case is a script of calls; what stands in the tables after each of them is noted. Which block comes next is the
learner's choice, so the rules compare numbers and sets of blocks, and each item has a script that shows its slip and
looks at its own business alone (shared_pages_rules.py). Task 1 of exercise 06.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from minillm.course.checks.answers import plain
from minillm.course.checks.shared_pages_rules import RULES, said
from minillm.course.grader.task import Case, Record, Verdicts

PAGES_ITEMS = tuple(RULES)


def pages_cases(seed: int) -> list[Case]:
    rng = random.Random(seed)
    size = rng.randint(3, 6)

    def case(item: str, script: str, num_blocks: int | None = None) -> Case:
        calls = [_call(word) for word in script.split()]
        return {"items": [item], "num_blocks": num_blocks or rng.randint(12, 60), "block_size": size, "calls": calls}

    few = rng.randint(3, 5)
    start = rng.randint(1, size - 2)
    return [
        case("blocks of its own", f"a+{size + 1} b+{size + 2} a+{size}"),
        case("blocks of its own", f"a+{size - 1} b+{size - 1} -a c+{2 * size - 1}"),
        case("exact multiples", f"a+{size}"),
        case("exact multiples", f"a+{2 * size} a+{size}"),
        case("the next block", f"a+{size} a+1"),
        case("room in the last block", f"a+{start} a+1"),
        case("room in the last block", f"a+{size + start} a+{size}"),
        case("a fork costs nothing", f"a+{2 * size + start} a>b"),
        case("copy on write", f"a+{size + start} a>b b+1"),
        case("copy on write", f"a+{start} a>b a+{size}"),
        case("full blocks stay shared", f"a+{2 * size} a>b b+2"),
        case("full blocks stay shared", f"a+{2 * size + start} a>b b+1"),
        case("the last one writes in place", f"a+{size + start} a>b b+1 a+1"),
        case("three texts", f"a+{start} a>b b>c b+1 c+1"),
        case("giving one back", f"a+{2 * size - 1} a>b -b c+{size * (few - 2) - 1}", few),
        case("all come back", f"a+{start} a>b b+1 -a -b"),
        case("all come back", f"a+{start} a>b b+1 -a -b c+{few * size - 1}", few),
        case("freed twice", f"a+{size} b+{size} -a -a"),
        case("an error frees nothing", f"a+{size} b+{size} -b -a,b"),
        case("a refusal loses nothing", f"a+{start} b+{few * size - 1}", few),
        case("a refusal loses nothing", f"a+{start} b+{few * size - 1} b+{(few - 1) * size - 1}", few),
        case("the copy counts", f"a+{size - 1} a>b c+{(few - 2) * size - 1} b+2", few),
    ]


def _call(word: str) -> dict:
    """ "a+5": a grows by 5 tokens; "a>b": b is forked off a; "-a": a is freed; "-a,b": both, as one table."""
    if "+" in word:
        who, n = word.split("+")
        return {"do": "grow", "who": who, "n": int(n)}
    if ">" in word:
        who, to = word.split(">")
        return {"do": "fork", "who": who, "to": to}
    return {"do": "free", "who": word[1:]}


def pages_drive(SharedPages, case: Case) -> Record:
    pages = SharedPages(case["num_blocks"], case["block_size"])
    tables, lengths, notes = {}, {}, []
    for call in case["calls"]:
        who, note = call["who"], {"refused": "", "copies": [], "apart": True}
        try:
            if call["do"] == "grow":
                table = tables.setdefault(who, [])
                note["copies"] = plain(pages.grow(table, lengths.get(who, 0), call["n"]))
                lengths[who] = lengths.get(who, 0) + call["n"]
            elif call["do"] == "fork":
                tables[call["to"]] = pages.fork(tables[who])
                note["apart"] = tables[call["to"]] is not tables[who]
                lengths[call["to"]] = lengths[who]
            else:
                table = tables.get(who) or [block for name in who.split(",") for block in tables[name]]
                tables |= {who: list(table)} if who in tables else {}  # whatever is done to the freed list itself
                pages.free(table)
        except NotImplementedError:
            raise
        except Exception as error:  # a refusal, or a slip of the learner's: the judge tells which
            note["refused"] = f"{type(error).__name__}: {error}"
        note["tables"] = {name: plain(table) for name, table in tables.items()}
        note["free"] = plain(pages.num_free)
        notes.append(note)
    return {"notes": notes}


def pages_judge(case: Case, record: Record) -> Verdicts:
    (item,), notes = case["items"], record.get("notes")
    if not isinstance(notes, list) or len(notes) != len(case["calls"]):
        return {item: "not every call was made"}
    return {item: next(filter(None, _faults(item, case, notes)), "")}


def _faults(item: str, case: Case, notes: list[dict]) -> Iterator[str]:
    """What is wrong, the first thing first."""
    lengths: dict[str, int] = {}
    for call, note in zip(case["calls"], notes, strict=True):
        for name, table in note["tables"].items():
            if not isinstance(table, list) or not all(isinstance(block, int) for block in table):
                yield f"the table of {name} is {table}, wanted is a list of block numbers"
            if any(not 0 <= block < case["num_blocks"] for block in table):
                yield f"the table of {name} is {table}: there are blocks 0 to {case['num_blocks'] - 1}"
        if not isinstance(note["free"], int):
            yield f"num_free is {note['free']}, wanted is a number of blocks"
        if not _to_be_refused(case, call) and note["refused"]:
            yield f"{said(call)} was refused, and nothing spoke against it: {note['refused']}"
        if call["do"] == "grow" and not note["refused"]:
            lengths[call["who"]] = lengths.get(call["who"], 0) + call["n"]
            table, needed = note["tables"][call["who"]], -(-lengths[call["who"]] // case["block_size"])
            if len(table) < needed:
                yield f"{lengths[call['who']]} tokens need {needed} blocks of {case['block_size']}, table: {table}"
        elif call["do"] == "fork":
            lengths[call["to"]] = lengths[call["who"]]
    yield from RULES[item](case, notes)


def _to_be_refused(case: Case, call: dict) -> bool:
    """True for the one call of a case that has to raise ValueError."""
    refused = {"freed twice": -1, "an error frees nothing": -1, "a refusal loses nothing": 1, "the copy counts": -1}
    (item,) = case["items"]
    return item in refused and call is case["calls"][refused[item]]
