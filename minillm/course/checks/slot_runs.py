"""Checks the runs of memory that a chunk of a text fills: the right rows, in as few runs as there are.

Each of the three planted bugs has items that show it alone: chunks from the start of a text, chunks inside its first
block, chunks that end inside a block. The oracle asks position by position. Task 3 of exercise 06.
"""

from __future__ import annotations

import random

from minillm.course.checks.answers import plain
from minillm.course.grader.task import MISSING, Case, Record, Verdicts

RUN_ITEMS = (
    "a later chunk",
    "begins inside a block",
    "a full last block",
    "across blocks",
    "one token",
    "neighbours",
    "any order",
    "behind the table",
)


def run_cases(seed: int) -> list[Case]:
    rng = random.Random(seed)
    size = rng.randint(4, 7)

    def case(item: str, start: int, n: int, table: list[int] | None = None) -> Case:
        table = table or sorted(2 * block for block in rng.sample(range(100), rng.randint(4, 6)))  # no neighbours
        return {"items": [item], "table": table, "start": start, "n": n, "block_size": size}

    first, few = rng.randint(0, 90), rng.randint(1, size - 1)
    inside = rng.randint(1, size - 2)
    return [
        case("a later chunk", size, few),
        case("a later chunk", 2 * size, size + few),
        case("begins inside a block", inside, size - 1 - inside),
        case("a full last block", 0, size),
        case("a full last block", 0, 2 * size),
        case("a full last block", 0, size, [first]),
        case("across blocks", inside, size + rng.randint(1, size - 1 - inside)),
        case("across blocks", size - 1, 2),
        case("one token", 2 * size - 1, 1),
        case("one token", 2 * size, 1),
        case("neighbours", 0, 2 * size, [first, first + 1, first + 5]),
        case("neighbours", 0, 4 * size, [first, first + 3, first + 4, first + 5, first + 9]),
        case("any order", size, size + few, [first + 1, first + 3, first + 2, first]),
        case("behind the table", size, 2 * size + few, [first, first + 2]),
    ]


def run_drive(slot_runs, case: Case) -> Record:
    refused, runs = "", []
    try:
        runs = slot_runs(list(case["table"]), case["start"], case["n"], case["block_size"])
    except NotImplementedError:
        raise
    except (ValueError, IndexError) as error:
        refused = f"{type(error).__name__}: {error}"
    return {"runs": plain(runs), "refused": refused}


def run_judge(case: Case, record: Record) -> Verdicts:
    (item,), runs, refused = case["items"], record.get("runs"), record.get("refused")
    if item == "behind the table":
        return {item: _not_refused(case, refused)}
    if refused:
        return {item: f"{_chunk(case)} fits its table and was refused: {refused}"}
    if runs is None:
        return {item: f"the result {MISSING}"}
    pairs = isinstance(runs, list) and all(isinstance(run, list) and len(run) == 2 for run in runs)
    if not pairs or not all(isinstance(number, int) for run in runs for number in run):
        return {item: f"the result is {runs}, wanted is a list of (first slot, rows)"}
    return {item: _fault(case, runs)}


def _chunk(case: Case) -> str:
    end = case["start"] + case["n"] - 1
    where = f"position {end}" if case["n"] == 1 else f"positions {case['start']} to {end}"
    return f"{where} with blocks {case['table']} of {case['block_size']} rows"


def _fault(case: Case, runs: list[list[int]]) -> str:
    size, start, table = case["block_size"], case["start"], case["table"]
    wanted = [table[p // size] * size + p % size for p in range(start, start + case["n"])]
    got = [slot + row for slot, rows in runs for row in range(min(rows, 1000))]
    head = f"{_chunk(case)}: "
    right = _joined(wanted)
    if any(rows < 1 for _, rows in runs):
        why = "; the last block is full, not empty" if (start + case["n"]) % size == 0 else ""
        return f"{head}a run of no rows in {_told(runs)}, right is {_told(right)}{why}"
    if got == wanted:
        more = f"{len(runs)} runs where {len(right)} do: blocks whose numbers follow each other lie side by side"
        return f"{head}{more}" if len(runs) > len(right) else ""
    if got[:1] == [table[0] * size] and start >= size:
        return f"{head}the chunk is put into the first blocks of the text, {_told(runs)}, and overwrites them"
    if got[:1] and start % size and got[0] == wanted[0] - start % size:
        return f"{head}it begins at row {start % size} of its block, not at row 0: {_told(runs)} for {_told(right)}"
    if sorted(got) == sorted(wanted):
        return f"{head}{_told(runs)} are its rows, and not in the order of the text: {_told(right)}"
    if len(got) != len(wanted):
        return f"{head}{len(got)} rows in {_told(runs)}, the chunk has {len(wanted)}: {_told(right)}"
    return f"{head}{_told(runs)}, right is {_told(right)}"


def _joined(slots: list[int]) -> list[list[int]]:
    """The fewest runs that hold these slots in this order."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and sum(runs[-1]) == slot:
            runs[-1][1] += 1
        else:
            runs.append([slot, 1])
    return runs


def _told(runs: list[list[int]]) -> str:
    return str([tuple(run) for run in runs])


def _not_refused(case: Case, refused: str) -> str:
    held = len(case["table"]) * case["block_size"]
    if not refused:
        return f"{_chunk(case)}: the table reaches {held} rows, and nothing was said; raise ValueError"
    if not refused.startswith("ValueError"):
        return f"{_chunk(case)}: ends in {refused}; raise ValueError before anything is put together"
    return "" if str(held) in refused else f"the error does not say that the table reaches {held} rows: {refused}"
