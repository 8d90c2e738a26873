"""Checks a contiguous cache of one sequence: rows at their positions in borrowed memory, views of what is there.

K and V are the same but where they are told apart, and each item looks at rows of its own: so a row that was never
written, a copy, or a refusal that is missing costs the items that show it and no other. The oracle is a list of rows.
Task 1 of exercise 05.
"""

from __future__ import annotations

import math

import torch

from minillm.course.checks.attention_inputs import inside_nan
from minillm.course.grader.task import Case, Record, Verdicts, diagnose

CACHE_ITEMS = (
    "position 0",
    "later rows",
    "keys and values",
    "grouped heads",
    "strided views",
    "in the memory",
    "no copies",
    "nothing behind the end",
    "to the last row",
    "beyond capacity",
    "no gaps",
    "rewinding",
)
REFUSED = ("beyond capacity", "no gaps")


def cache_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    n, spare, heads, d = (int(torch.randint(*bounds, (1,), generator=g)) for bounds in ((3, 6), (2, 5), (2, 5), (2, 5)))

    def case(item: str, *chunks: tuple[int, int], kv_heads: int = 1, room: int = spare) -> Case:
        """chunks: (start, rows); the last one is judged."""
        writes = [{"start": start, "k": torch.randn(rows, kv_heads, d, generator=g)} for start, rows in chunks]
        for write in writes:
            if item == "strided views":  # two heads that hold the same, so that it does not matter which is which
                write["k"] = write["k"].repeat(1, 2, 1)
            write["v"] = torch.randn(write["k"].shape, generator=g) if item == "keys and values" else write["k"].clone()
        return {"items": [item], "writes": writes, "capacity": max(start + rows for start, rows in chunks) + room}

    return [
        case("position 0", (0, 1), (1, 2)),
        case("later rows", (0, n), (n, 1)),
        case("later rows", (0, n), (n, 3)),
        case("keys and values", (0, n), (n, 2)),
        case("grouped heads", (0, n), (n, 2), kv_heads=heads),
        case("strided views", (0, n), (n, 2)),
        case("in the memory", (0, n), (n, 2)),
        case("no copies", (0, n), (n, 2)),
        case("nothing behind the end", (0, n), (n, 1)),
        case("to the last row", (0, n), (n, 2), room=0),
        case("beyond capacity", (0, n), (n, 1), room=-1),
        case("beyond capacity", (0, n), (n, 3), room=-1),
        case("no gaps", (0, n), (n + 1, 1)),
        case("rewinding", (0, n + 2), (2, n - 1)),
        case("rewinding", (0, n + 2), (1, 1), (n + 2, 1)),
    ]


def cache_drive(SequenceCache, case: Case) -> Record:
    shape = (2, case["capacity"], *case["writes"][0]["k"].shape[1:])
    memory, strided = torch.full(shape, math.nan), case["items"] == ["strided views"]
    if strided:
        memory = torch.full((shape[1] + 1, shape[3] + 2, 2, shape[2]), math.nan)[1:, 1:-1].permute(2, 0, 3, 1)
    cache, reads = SequenceCache(memory), []
    for write in case["writes"]:
        k, v = (inside_nan(write[name]) if strided else write[name].clone() for name in "kv")
        read = {"k": None, "v": None, "shared": False, "refused": "", "got": ""}
        try:
            got = cache.write(k, v, write["start"])
        except NotImplementedError:
            raise
        except (ValueError, RuntimeError, IndexError) as error:
            read["refused"] = f"{type(error).__name__}: {error}"
        else:
            read["got"] = type(got).__name__
            if isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(x, torch.Tensor) for x in got):
                home = memory.untyped_storage().data_ptr()
                read["shared"] = all(x.untyped_storage().data_ptr() == home for x in got)
                read["k"], read["v"] = (x.clone() for x in got)
        reads.append(read)
    return {"reads": reads, "memory": memory.clone()}


def cache_judge(case: Case, record: Record) -> Verdicts:
    (item,), reads = case["items"], record.get("reads")
    if not isinstance(reads, list) or len(reads) != len(case["writes"]):
        return {item: "not every chunk was written"}
    read, last, capacity = reads[-1], case["writes"][-1], case["capacity"]
    start, end = last["start"], last["start"] + len(last["k"])
    held = [write["start"] + len(write["k"]) for write in case["writes"]]
    if end > capacity or start > held[-2]:
        return {item: _not_refused(read, record, case, held[-2])}
    if read["refused"]:
        why = f"rows {start} to {end - 1} belong into a memory of {capacity} rows, and were refused: {read['refused']}"
        return {item: why + ("; row capacity - 1 is still there" if end == capacity else "")}
    if read["k"] is None:
        return {item: f"write returned {read['got']}, wanted are two tensors: all keys, then all values"}
    if item == "no copies" and not read["shared"]:
        return {item: "write returned copies: a slice of the memory costs nothing, whatever the length"}
    if item in ("nothing behind the end", "rewinding") and len(read["k"]) != end:
        behind = f"{len(read['k'])} rows come back after a chunk whose last row is {end - 1}: attention may read {end}"
        if item == "rewinding":
            behind += ", and what an earlier, longer text left behind them is no longer part of it"
        return {item: behind}
    rows = slice(0, 1) if item == "position 0" else slice(start, end)
    if item == "in the memory":
        read = dict(zip("kv", record["memory"], strict=True))
    return {item: next(filter(None, (_rows_fault(read, case, rows, name, item) for name in "kv")), "")}


def _not_refused(read: dict, record: Record, case: Case, held: int) -> str:
    """Why a chunk that does not fit was not turned away as it should be; "" when it was."""
    last, capacity = case["writes"][-1], case["capacity"]
    start, end = last["start"], last["start"] + len(last["k"])
    what = f"rows {start} to {end - 1} were written into a memory of {capacity} rows that held {held}"
    if not read["refused"]:
        if end > capacity:
            return f"{what}, and nothing was said: the last rows are lost, raise ValueError"
        return f"{what}, and nothing was said: row {held} was never written and would be read, raise ValueError"
    if not read["refused"].startswith("ValueError"):
        return f"{what}, which ends in {read['refused']}; raise ValueError before anything is written"
    if end > capacity and str(capacity) not in read["refused"]:
        return f"the error does not name the capacity, {capacity}: {read['refused']}"
    if not record["memory"][0, start:end].isnan().all():
        return f"{what}: some of them were written before the chunk was refused; look before you write"
    return ""


def _rows_fault(read: dict, case: Case, rows: slice, name: str, item: str) -> str:
    """What is wrong with these rows of the keys or values that came back."""
    got, what = read[name], {"k": "keys", "v": "values"}[name]
    wanted = torch.full((rows.stop, *case["writes"][0]["k"].shape[1:]), math.nan)
    other = wanted.clone()
    for write in case["writes"]:
        place = slice(write["start"], min(rows.stop, write["start"] + len(write["k"])))
        for tensor, key in ((wanted, name), (other, {"k": "v", "v": "k"}[name])):
            tensor[place] = write[key][: max(0, place.stop - place.start)]
    if got.dim() != 3 or len(got) < rows.stop or got.shape[1:] != wanted.shape[1:]:
        return f"the {what} that came back have shape {list(got.shape)}, expected {[rows.stop, *wanted.shape[1:]]}"
    wanted, other, got = wanted[rows], other[rows], got[rows]
    which = f"row {rows.start}" if rows.stop == rows.start + 1 else f"rows {rows.start} to {rows.stop - 1}"
    heads = torch.cat([wanted[:, :1]] * wanted.shape[1], dim=1)
    slips = {
        "keys and values are swapped": other,
        f"{which} of the {what}: never written, the memory still holds what it held before": torch.full_like(
            wanted, math.nan
        ),
        "all heads hold what the first one should": heads,
        "heads and rows are mixed up: both k and the memory are [rows, heads, D]": wanted.transpose(0, 1).reshape(
            wanted.shape
        ),
    }
    if item == "in the memory":
        where = "the memory that was handed over does not hold the rows: other parts of the engine count on it"
        return where if diagnose(got, wanted, {}, "", 1e-6) else ""
    wrong = diagnose(got, wanted, slips, f"{which} of the {what}", 1e-6)
    if wrong and item == "strided views":
        wrong += "; memory, k and v are views here, and reshape or flatten of a view may be a copy"
    return wrong
