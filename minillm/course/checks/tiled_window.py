"""Checks attention in tiles with a window and sinks: what is seen, what is never read, how sums follow the maximum.

Queries of zeros take the mean of what they see, which shows the mask and hides every slip of the softmax. Values that
are all the same hide the mask and show what overflows, vanishes, or touches NaN in a tile that nobody sees. The last
row of a square sees all keys under every mask. The oracle is float64, goes head by head and knows no tiles. Task 2 of
exercise 08.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch

from minillm.course.checks.attention_inputs import DEEP, LOUD, lookup
from minillm.course.checks.tile_slips import OVERFLOW, tile_slips
from minillm.course.grader.task import Case, Record, Verdicts, diagnose
from minillm.course.tensor_sizes import TensorSizes

TILED_ITEMS = (
    "ragged tiles",
    "a chunk",
    "grouped heads",
    "scale",
    "rising scores",
    "falling scores",
    "deep scores",
    "window",
    "sinks",
    "sinks end inside a tile",
    "sinks inside the window",
    "the future is not read",
    "the gap is not read",
    "half precision",
    "small tensors",
)
STEEP = 200.0  # e^200 is infinite in float32
ABYSS = -100_000.0  # below the scores that some programs take for "hidden"


def tiled_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    size, few = (int(torch.randint(*bounds, (1,), generator=g)) for bounds in ((3, 6), (2, 4)))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    def case(item: str, n: int, s: int, tiles: tuple[int, int], window: int | None = None, sinks: int = 0, **given):
        """n queries of zeros behind s - n keys; `rows` of the output are judged, tiles are (queries, keys)."""
        tensors = {"q": torch.zeros(n, 1, 1), "k": noise(s, 1, 1), "rows": [0, n], **given}
        apart = torch.randperm(tensors["k"].numel(), generator=g) + 0.3 * torch.rand(tensors["k"].numel(), generator=g)
        tensors.setdefault("v", apart.view_as(tensors["k"]))  # no two of them close to each other
        how = {"query_tile": tiles[0], "key_tile": tiles[1], "window": window, "sinks": sinks}
        return {"items": [item], **tensors, **how}

    def scores(item: str, k: torch.Tensor, tile: int, row: int = -1, v: torch.Tensor | None = None) -> Case:
        """A square in which each query scores a key by its own number, one row of it judged."""
        n = len(k)
        given = {"q": torch.ones(n, 1, 1), "k": k[:, None, None], "rows": [row % n, row % n + 1]}
        return case(item, n, n, (n, tile), **given | ({} if v is None else {"v": v}))

    def same(s: int) -> torch.Tensor:
        return noise(1, 1, 1).expand(s, 1, 1).clone()

    def deep(s: int) -> torch.Tensor:
        """Keys whose scores never rise, so that nothing has to be scaled."""
        return DEEP + noise(s).sort(descending=True).values

    asked, codes = lookup(2, 4, 4, 2, g)  # four heads ask for what two K/V heads hold in rows 2 and 3
    asked = torch.cat([torch.zeros_like(asked), asked])
    ones, more = torch.ones(3, 1, 16), 0.3 + 0.7 * float(torch.rand(1, generator=g))
    loud = torch.tensor([LOUD, LOUD + more, 0.0])[:, None, None].expand(3, 1, 16) / 4
    steps = torch.arange(4).repeat_interleave(size)  # which of four tiles a key is in
    bend = torch.zeros(4 * size)
    bend[-1] = -STEEP  # a row's own key takes no part, so that it does not matter whether it sees itself
    unseen = torch.tensor([0.0, 0.0, -50.0, 0.0])  # row 2 hides key 3, and takes nothing from its own
    masked_first = {"q": torch.ones(4, 1, 1), "k": deep(12)[:, None, None], "v": same(12)}
    future, gap = ({"k": noise(s, 1, 1), "v": same(s)} for s in (8 * size, 16 * size))
    for values in future.values():
        values[2 * size :] = math.nan
    for values in gap.values():
        values[2 * size : 12 * size] = math.nan
    gap |= {"q": torch.ones(size, 1, 1)}
    gap["k"][:2], gap["v"][:2] = LOUD, gap["v"][:2] + 1  # all that counts are the sinks
    apart = {"q": torch.tensor([1.0, -1.0])[:, None, None], "k": torch.full((2, 1, 1), STEEP), "v": same(2)}
    apart |= {"rows": [1, 2]}  # scores of -200 beside a row of 200
    low = {name: torch.zeros(300, 1, 1, dtype=torch.bfloat16) for name in "qkv"} | {"rows": [299, 300]}
    low["v"][150:] = 1
    return [
        case("ragged tiles", 2 * size + 1, 2 * size + 1, (size, size - 1)),
        case("ragged tiles", size + 3, size + 3, (2, size)),
        case("a chunk", size + 1, 3 * size + 2, (size, few)),
        case("a chunk", 1, 2 * size + 1, (size, size)),
        case("grouped heads", 4, 4, (2, 2), q=asked, k=codes.roll(2, 0), rows=[3, 4]),
        case("scale", 3, 3, (4, 4), q=ones, k=loud.clone(), rows=[2, 3]),
        scores("rising scores", 3.0 * steps + bend + torch.rand(4 * size, generator=g), size),
        scores("falling scores", -STEEP * steps + bend + noise(4 * size), size),
        scores("deep scores", deep(2 * size), size, v=same(2 * size)),
        case("deep scores", 4, 12, (4, 4), 2, **masked_first),
        scores("deep scores", ABYSS + unseen + noise(4), 4, row=2),
        case("deep scores", 2, 2, (2, 2), **apart),
        case("window", 2 * size, 2 * size, (2, 2), window=3),
        case("window", 4, 4 * size, (2, 4), window=5),
        case("sinks", size + 1, 4 * size, (few, 2), window=few, sinks=2),
        case("sinks", 4, 4 * size + 1, (2, 2), window=3, sinks=2),
        case("sinks end inside a tile", size, 4 * size, (few, 4), window=few, sinks=3),
        case("sinks end inside a tile", size, 4 * size, (few, 2), window=few, sinks=3),
        case("sinks inside the window", 3 * size, 3 * size, (few, size), window=size + 1, sinks=2),
        case("sinks inside the window", few, few + 3, (few, 2), window=few + 2, sinks=3),
        case("the future is not read", 8 * size, 8 * size, (size, size), **future, rows=[0, size]),
        case("the gap is not read", size, 16 * size, (size, size), size + 1, 2, **gap),
        case("half precision", 300, 300, (300, 1), **low),
        case("small tensors", 64, 64, (8, 4), q=torch.zeros(64, 2, 2), k=noise(64, 1, 2), v=same(64).repeat(1, 1, 2)),
    ]


def tiled_drive(flash_attention, case: Case) -> Record:
    tensors = [case[name].clone() for name in "qkv"]
    how = {name: case[name] for name in ("query_tile", "key_tile", "window", "sinks")}
    counting = case["items"] == ["small tensors"]  # it slows everything down
    with TensorSizes() if counting else nullcontext() as sizes:
        out = flash_attention(*tensors, **how)
    return {"out": out, "largest": sizes.largest if counting else 0, "dtype": str(getattr(out, "dtype", None))}


def tiled_judge(case: Case, record: Record) -> Verdicts:
    (item,), got, (first, last) = case["items"], record.get("out"), case["rows"]
    wanted = attend(case)
    if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
        return {item: diagnose(got, wanted, {}, "the output")}
    rows = slice(first, last)
    slips = {sentence: attend(case, **slip)[rows] for sentence, slip in _slips(case).items()} | tile_slips(case)
    name = "the output" if last - first == len(got) else f"row {first} of the output"
    wrong = diagnose(got[rows], wanted[rows], slips, name, 4e-3 if item == "half precision" else 1e-4)
    if wrong.endswith("NaN or infinity"):  # from a row that sees nothing by mistake, if no other reason is known
        blind = diagnose(got[rows].nan_to_num(0.0), wanted[rows], slips, name)
        wrong = OVERFLOW.get(item) or (blind if blind in slips else wrong)
    return {item: wrong or _form_fault(item, case, record)}


def _form_fault(item: str, case: Case, record: Record) -> str:
    """What is wrong with the dtype of a right output, or with the size of what was made on the way to it."""
    n, heads, _ = case["q"].shape
    if item == "half precision" and record.get("dtype") != str(case["q"].dtype):
        return f"the output is {record.get('dtype')}; give it the dtype of q, {case['q'].dtype}"
    largest, limit = record.get("largest"), case["q"].numel()
    if item == "small tensors" and not (isinstance(largest, int) and largest <= limit):
        tile = case["query_tile"] * case["key_tile"] * heads
        return (
            f"a tensor of {largest} numbers was made, where q has {limit} and a tile of scores {tile}: make nothing "
            f"that grows with n x S, here {n} x {len(case['k'])}, nor with n x key_tile"
        )
    return ""


def _slips(case: Case) -> dict[str, dict]:
    """Sentence -> what it changes about the oracle: slips of the mask, the heads, the scale."""
    window, sinks, s = case["window"], case["sinks"], len(case["k"])
    read = {
        "the future is not read": "a tile in which every key comes after every query was read: end before it",
        "the gap is not read": "tiles between the sinks and the window were read: no query sees them, jump over them",
    }.get(case["items"][0])
    slips = {} if read is None else {f"{read} (they hold NaN here, and 0 times NaN is NaN)": {"touched": True}}
    slips |= {
        "the mask is aligned at the top left: n queries end the S keys, the first stands at position S - n": {"at": 0},
        "every query sees all keys: one must not see those that come after it": {"causal": False},
        "a token does not see itself: its own key is part of what it attends to": {"own": False},
        "keys of the last tile that come after a query are not hidden from it: it must not see them": {"ahead": True},
        "the keys of the last tile, which is not full, are missing": {"stop": (s - 1) // case["key_tile"]},
        "the scores are not divided by sqrt(D)": {"divisor": 1.0},
        "query head h reads K/V head h // group, not h % Hkv": {"in_turn": True},
    }
    if window is not None:
        slips |= {
            "the window is off by one: it counts the query's own key, too": {"window": window + 1},
            "the window is off by one: it is one key short": {"window": window - 1},
            "the window is ignored": {"window": s},
            "tiles that the last of the queries does not see were jumped over, and the first one sees them": {
                "hasty": True
            },
        }
    if sinks:
        slips |= {
            "the sinks are ignored: the first keys stay visible behind the window": {"sinks": 0},
            "a whole tile of sinks is seen: only the first `sinks` keys of it stay visible": {
                "sinks": -(-sinks // case["key_tile"]) * case["key_tile"]
            },
            "the sinks are off by one: they are keys 0 to sinks - 1": {"sinks": sinks + 1},
            "one sink is missing: they are keys 0 to sinks - 1": {"sinks": sinks - 1},
            "sinks hide nothing that comes later: a query does not see a sink behind its own position": {"early": True},
            "keys that are sinks and inside the window, too, are counted twice": {"twice": True},
        }
    return slips


def attend(
    case: Case,
    at: int | None = None,
    causal: bool = True,
    ahead: bool = False,
    own: bool = True,
    divisor: float | None = None,
    in_turn: bool = False,
    window: int | None = None,
    sinks: int | None = None,
    early: bool = False,
    twice: bool = False,
    touched: bool = False,
    hasty: bool = False,
    stop: int | None = None,
) -> torch.Tensor:
    """The right output [n, H, D] in float64, or the one of a slip. Keys that nobody may read count as zeros."""
    (n, heads, d), (s, kv_heads, _) = case["q"].shape, case["k"].shape
    window = window or case["window"] or s
    sinks = case["sinks"] if sinks is None else sinks
    keys, rows = torch.arange(s), torch.arange(n)[:, None] + (s - n if at is None else at)
    last = (torch.arange(n) // case["query_tile"] * case["query_tile"] + case["query_tile"] - 1).clamp(max=n - 1)
    if ahead:  # as far as the last query of its tile
        past = keys <= s - n + last[:, None]
    else:
        past = (rows - keys >= (0 if own else 1)) | (not causal)
    near, first = rows - keys < window, keys < sinks
    times = (past & (near | first) | first & early).double()
    if twice:
        times += (past & near & first).double()
    if stop is not None:
        times[:, stop * case["key_tile"] :] = 0
    for part in times.split(case["key_tile"], dim=1) if hasty else ():
        part *= part[last].any(dim=1, keepdim=True)
    q, k, v = (case[name].double().nan_to_num(0) for name in "qkv")
    out = []
    for h in range(heads):
        owner = h % kv_heads if in_turn else h // (heads // kv_heads)
        scores = q[:, h] @ k[:, owner].T / (divisor or math.sqrt(d)) + times.log()
        out.append(scores.softmax(-1).nan_to_num(0) @ v[:, owner])
    return torch.stack(out, dim=1) * (math.nan if touched else 1)
