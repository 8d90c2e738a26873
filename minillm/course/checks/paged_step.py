"""Checks one step of several texts over their pages: the new rows, and attention over blocks that lie anywhere.

A query asks loudly for one row of its text, so the answer is that row's value whatever the others do, and each item
makes only its own slip audible: a louder row behind the end, another order of blocks, NaN where nobody has written.
The oracle is float64 and goes text by text, row by row. Task 2 of exercise 06.
"""

from __future__ import annotations

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.course.checks.attention_inputs import LOUD
from minillm.course.grader.task import MISSING, Case, Record, Verdicts, diagnose, difference

STEP_ITEMS = (
    "itself",
    "in the last block",
    "the next block",
    "keys and values",
    "other rows",
    "any order",
    "ends inside a block",
    "blocks of other texts",
    "unwritten rows",
    "scale",
    "grouped heads",
    "in one go",
    "only the texts' blocks",
)
WRITES = ("in the last block", "the next block", "keys and values")
D = 16
SPARE = 512  # blocks that belong to nobody, where the size of what is read is judged


def step_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    size = int(torch.randint(4, 7, (1,), generator=g))
    inside = [size + 1, size + 2]  # texts that end in their second block, and do not fill it

    def case(
        item: str, lengths: list[int], heads: int = 1, kv_heads: int = 1, spare: int = 3, alike: bool = False
    ) -> Case:
        B, needed = len(lengths), [length // size + 1 for length in lengths]
        blocks, width = list(range(spare, spare + sum(needed))), max(needed)
        if item == "any order":
            blocks.reverse()
        tables = torch.zeros(B, width, dtype=torch.int64)
        for i, count in enumerate(needed):  # behind a text's own blocks stand those of the first text
            own, blocks = blocks[:count], blocks[count:]
            tables[i] = torch.tensor((own + tables[0].tolist())[:width])
        memory = torch.zeros(2, spare + sum(needed), size, kv_heads, D)
        if item in ("unwritten rows", "other rows"):
            memory.fill_(math.nan)
        q, k, v = torch.zeros(B, heads, D), torch.zeros(B, kv_heads, D), torch.zeros(B, kv_heads, D)
        codes = torch.stack([torch.eye(D)[torch.randperm(D, generator=g)] for _ in range(kv_heads)], dim=1)
        for i, length in enumerate(lengths):
            places = [(tables[i, p // size], p % size) for p in range(needed[i] * size)]
            target = {"itself": length, "any order": size}.get(item, length // 3)
            q[i] = LOUD * math.sqrt(D) * codes[target].repeat_interleave(heads // kv_heads, dim=0)
            for p, (block, row) in enumerate(places[:length]):
                memory[0, block, row] = codes[p]
                memory[1, block, row] = torch.randn(kv_heads, D, generator=g)
            if item == "scale":
                q[i] = 1.0
                loud = LOUD + torch.tensor([0.0, 0.3 + 0.7 * float(torch.rand(1, generator=g))])
                for p, (block, row) in enumerate(places[:length]):
                    memory[0, block, row] = float(loud[p]) / math.sqrt(D) if p < 2 else 0.0
            if item == "ends inside a block":
                for block, row in places[length + 1 :]:
                    memory[0, block, row] = 1.25 * codes[target]
                    memory[1, block, row] = torch.randn(kv_heads, D, generator=g)
            if alike:  # nothing is loud, and a text's rows hold one value: what is seen behind them takes a share
                q[i], k[i] = 0.0, torch.randn(kv_heads, D, generator=g)
                for block, row in places[: length + 1]:
                    memory[1, block, row] = v[i] = k[i]
            if item == "itself":
                k[i], v[i] = codes[target], 0.5 + torch.rand(kv_heads, D, generator=g)  # as a key it would be loud
            elif item in WRITES:
                k[i] = 0.01 * torch.randn(kv_heads, D, generator=g)
                v[i] = 0.01 * torch.randn(kv_heads, D, generator=g) if item == "keys and values" else k[i]
        lengths = torch.tensor(lengths)
        return {"items": [item], "q": q, "k": k, "v": v, "memory": memory, "tables": tables, "lengths": lengths}

    return [
        case("itself", inside),
        case("in the last block", inside),
        case("the next block", [size, size]),
        case("the next block", [2 * size, size, 2 * size]),
        case("keys and values", inside),
        case("other rows", inside),
        case("any order", [size + 2, size + 3, size + 2]),
        case("ends inside a block", inside),
        case("ends inside a block", inside, alike=True),
        case("blocks of other texts", [2 * size - 1, size - 1, 2 * size - 1]),
        case("unwritten rows", inside),
        case("scale", inside),
        case("grouped heads", inside, heads=4, kv_heads=2),
        case("in one go", (inside * 3)[:6]),
        case("only the texts' blocks", inside, spare=SPARE),
    ]


def _watch(memory: torch.Tensor) -> TorchDispatchMode:
    """Counts operations, and the numbers in the largest tensor that was made and is not a view of `memory`.

    The class is made here because the learner's code calls it, and what this module defines is hidden from that.
    """
    home = memory.untyped_storage().data_ptr()

    class Watch(TorchDispatchMode):
        operations = largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.operations += 1
            for made in out if isinstance(out, tuple | list) else [out]:
                if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != home:
                    self.largest = max(self.largest, made.numel())
            return out

    return Watch()


def step_drive(decode_pages, case: Case) -> Record:
    rows = slice(0, 2)
    watched = []
    for part in (rows, slice(None)) if case["items"] == ["in one go"] else (slice(None),):
        memory = case["memory"].clone()
        inputs = [case[name][part].clone() for name in ("q", "k", "v")]
        tables, lengths = case["tables"][part].clone(), case["lengths"][part].clone()
        with _watch(memory) as watch:
            out = decode_pages(*inputs, memory, tables, lengths)
        watched.append(watch)
    operations = [watch.operations for watch in watched]
    return {"out": out, "memory": memory, "operations": operations, "largest": watched[-1].largest}


def step_judge(case: Case, record: Record) -> Verdicts:
    (item,) = case["items"]
    if record.get("out") is None:
        return {item: f"the output {MISSING}"}
    got, wanted = record["out"], _attend(case)
    if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
        return {item: difference(got, wanted, name="the output")}
    memory = record.get("memory")
    if not isinstance(memory, torch.Tensor) or memory.shape != case["memory"].shape:
        return {item: "memory is not what it was: write into it, do not resize it"}
    if item in WRITES:
        return {item: _written_fault(case, memory)}
    if item == "other rows":
        return {item: _others_fault(case, memory)}
    if item == "unwritten rows" and not torch.isfinite(got).all():
        return {item: "rows that nobody has written hold NaN, and it came through: a weight of 0 times NaN is NaN"}
    slips = {sentence: _attend(case, **slip) for sentence, slip in _slips(item).items()}
    return {item: diagnose(got, wanted, slips, "the output") or _cost_fault(item, case, record)}


def _slots(case: Case, i: int) -> list[tuple[int, int]]:
    """(block, row) of every row that the table of text i reaches."""
    size, table = case["memory"].shape[2], case["tables"][i].tolist()
    return [(table[p // size], p % size) for p in range(len(table) * size)]


def _written(case: Case, swapped: bool = False) -> torch.Tensor:
    """The memory with the new rows in it."""
    memory = case["memory"].clone()
    for i, length in enumerate(case["lengths"].tolist()):
        block, row = _slots(case, i)[length]
        memory[int(swapped), block, row], memory[1 - swapped, block, row] = case["k"][i], case["v"][i]
    return memory


def _attend(
    case: Case, itself=True, behind=0, hushed=False, in_order=False, scale=True, modulo=False, turned=False, swap=False
) -> torch.Tensor:
    """Attention [B, H, D] of each text's new token, or what comes out with a slip.

    behind  1: the rest of the last block is seen as well, 2: all that the table reaches, 3: the longest text's length
    hushed  values behind a text's end are zeros
    turned  the heads come out group by group in place of one K/V head after the other
    """
    memory, size = _written(case, swap).double(), case["memory"].shape[2]
    B, heads, _ = case["q"].shape
    out = torch.zeros(B, heads, D, dtype=torch.float64)
    for i, length in enumerate(case["lengths"].tolist()):
        slots = _slots(case, i)
        if in_order:
            slots = [(min(slots[0][0] + p // size, memory.shape[1] - 1), p % size) for p in range(len(slots))]
        end = (length + itself, (length // size + 1) * size, len(slots), int(case["lengths"].max()) + 1)[behind]
        keys, values = (torch.stack([rows[slot] for slot in slots[:end]]) for rows in memory)
        values[length + 1 :] *= not hushed
        for h in range(heads):
            own = h % keys.shape[1] if modulo else h // (heads // keys.shape[1])
            scores = keys[:, own] @ case["q"][i, h].double() / (math.sqrt(D) if scale else 1.0)
            out[i, h] = scores.softmax(0) @ values[:, own]
    return out.unflatten(1, (case["k"].shape[1], -1)).transpose(1, 2).flatten(1, 2) if turned else out


def _slips(item: str) -> dict[str, dict]:
    if item == "itself":
        return {
            "the new token does not see itself: position lengths[i] is visible, too": {"itself": False},
            "key and value of the new token are swapped": {"swap": True},
        }
    if item == "any order":
        return {"block b + 1 was read behind block b: what comes next stands in the table": {"in_order": True}}
    if item in ("ends inside a block", "blocks of other texts"):
        return {
            "the rest of the last block was read: only rows up to lengths[i] belong to the text": {"behind": 1},
            "entries behind a text's last block were followed, to rows of others": {"behind": 2},
            "each text was read to the length of the longest": {"behind": 3},
            "rows behind the end add 0 and keep their share: give them a score of minus infinity": {
                "behind": 2,
                "hushed": True,
            },
        }
    if item == "scale":
        return {"the scores are not divided by sqrt(D)": {"scale": False}}
    if item == "grouped heads":
        return {
            "query heads that share a K/V head stand next to each other": {"modulo": True},
            "the heads come out in another order than that of q": {"turned": True},
        }
    return {}


def _written_fault(case: Case, memory: torch.Tensor) -> str:
    """What is wrong with the rows that the new tokens were to be written to."""
    size = case["memory"].shape[2]
    for i, length in enumerate(case["lengths"].tolist()):
        slots = _slots(case, i)
        got, new = memory[:, slots[length][0], slots[length][1]], torch.stack([case["k"][i], case["v"][i]])
        if not difference(got, new, 1e-6):
            continue
        where = f"position {length} of text {i} (row {length % size} of block {slots[length][0]})"
        if not difference(got, new.flip(0), 1e-6):
            return f"{where}: keys and values are swapped"
        for p, (block, row) in enumerate(slots):
            if p != length and not difference(memory[:, block, row], new, 1e-6):
                return f"{where}: its row was written to position {p} of the text; the cache holds {length} rows"
        return f"{where} was not written"
    return ""


def _others_fault(case: Case, memory: torch.Tensor) -> str:
    before, new = case["memory"], _written(case)
    fresh = ~torch.isclose(before, new, equal_nan=True).flatten(3).all(-1)
    same = torch.isclose(memory, before, equal_nan=True).flatten(3).all(-1)
    if not torch.isclose(memory, new, equal_nan=True).flatten(3).all(-1)[fresh].all():
        return "the new rows are not in the memory"
    if not same[~fresh].all():
        _, block, row = (~same & ~fresh).nonzero()[0].tolist()
        return f"row {row} of block {block} was changed, and it is no new token's: other texts' rows are not yours"
    return ""


def _cost_fault(item: str, case: Case, record: Record) -> str:
    if item == "in one go":
        few, many = record["operations"]
        if few != many:
            return f"{few} operations for 2 texts and {many} for {len(case['q'])}: index with whole tensors, no loop"
    if item == "only the texts' blocks":
        reached = case["tables"].numel() * case["memory"][0, 0].numel()
        if record["largest"] > 4 * reached:
            return f"a tensor of {record['largest']} numbers was made, K of all blocks in the tables are {reached}"
    return ""
