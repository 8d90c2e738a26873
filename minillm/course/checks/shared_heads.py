"""Checks grouped-query attention over a cache as it lies in memory: shared heads, stale slots, rows without keys.

A query that asks loudly for one key shows which K/V head it was given and hides other slips. Memory that nobody has
written holds NaN. And each tensor that is made on the way is noted by its size, which shows whether K and V were
copied for every query head. The oracle is float64 and goes head by head. Task 3 of exercise 02.
"""

from __future__ import annotations

import math

import torch

from minillm.course.checks.attention_inputs import DEEP, inside_nan, lookup, ring
from minillm.course.grader.task import Case, Record, Verdicts, diagnose
from minillm.course.tensor_sizes import TensorSizes

TOLERANCE = 1e-5
COPIES = ("no copies, one query", "no copies, a prompt")
GROUPED_ITEMS = (
    "masked keys",
    "deep negative",
    "groups",
    "head size",
    "strided views",
    "nothing to see",
    "stale memory",
    *COPIES,
)


def grouped_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    n, shared, group = (int(torch.randint(a, b, (1,), generator=g)) for a, b in ((4, 8), (2, 4), (2, 4)))
    everything, lower = torch.ones(n, n, dtype=torch.bool), torch.ones(n, n, dtype=torch.bool).tril()
    noise = torch.randn(n, 1, 1, generator=g)
    padded = everything.clone()
    padded[torch.randperm(n, generator=g)[:2]] = False

    def case(item: str, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> Case:
        return {"items": [item], "q": q, "k": k, "v": torch.randn(k.shape, generator=g), "mask": mask}

    def alike(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A look-up in two K/V heads that hold the same, so that it does not matter which one is read."""
        q, k = lookup(rows, 16, 1, 1, g)
        return q.repeat(1, 8, 1), k.repeat(1, 2, 1)

    cases = [
        case("masked keys", noise, torch.randn(n, 1, 1, generator=g), lower),
        case("deep negative", torch.ones(n, 1, 1), DEEP + noise, lower),
        case("groups", *lookup(n, n, shared * group, shared, g), everything),
        case("head size", ring(n, 16, g)[:, None], ring(n, 16, g)[:, None], everything),
        case("strided views", *lookup(n, n, 3, 3, g), everything),
        case("nothing to see", *lookup(n, n, 2, 2, g), padded),
        case("stale memory", *lookup(n, n + 3, 1, 1, g), torch.ones(n, n + 3, dtype=torch.bool)),
        case("no copies, one query", *alike(1), torch.ones(1, 16, dtype=torch.bool)),
        case("no copies, a prompt", *alike(12), torch.ones(12, 16, dtype=torch.bool)),
    ]
    for same in cases[-2:]:
        same["v"] = same["v"][:, :1].repeat(1, 2, 1)
    stale = cases[GROUPED_ITEMS.index("stale memory")]
    stale["mask"][:, :3] = False  # the loud keys are the last n
    stale["k"][:3] = stale["v"][:3] = math.nan
    return cases


def grouped_drive(grouped_attention, case: Case) -> Record:
    tensors = [case[name].clone() for name in ("q", "k", "v")]
    if case["items"] == ["strided views"]:
        tensors = [inside_nan(x) for x in tensors]
    mask = case["mask"].clone()
    with TensorSizes() as sizes:
        out = grouped_attention(*tensors, mask)
    return {"out": out, "largest": sizes.largest}


def grouped_judge(case: Case, record: Record) -> Verdicts:
    (item,), got, largest = case["items"], record.get("out"), record.get("largest")
    (num_keys, _, d), heads = case["k"].shape, case["q"].shape[1]
    slips = _slips(case)
    wanted = slips.pop("")
    wrong = diagnose(got, wanted, slips, "the output", TOLERANCE)
    if wrong and wrong not in slips and item == "strided views" and getattr(got, "shape", None) == wanted.shape:
        wrong = f"{wrong}; these inputs are views with strides of their own, so nothing may assume their layout"
    if not wrong and item in COPIES and not (isinstance(largest, int) and largest < num_keys * heads * d):
        wrong = (
            f"a tensor of {largest} numbers was made, where K has {case['k'].numel()}: do not copy K and V for each "
            "query head, let the query heads of a group read the same ones"
        )
    return {item: wrong}


def _slips(case: Case) -> dict[str, torch.Tensor]:
    """Sentence -> the output that this slip gives; under "" the right one."""
    q, mask = case["q"].double(), case["mask"]
    k, v = (case[name].double().nan_to_num(0) for name in "kv")
    (n, heads, d), kv_heads = q.shape, k.shape[1]
    group = heads // kv_heads

    def scores(owner: list[int]) -> torch.Tensor:
        return torch.stack([q[:, h] @ k[:, kv].T for h, kv in enumerate(owner)])  # [H, n, S]

    def mix(weights: torch.Tensor, owner: list[int]) -> torch.Tensor:
        return torch.stack([weights[h] @ v[:, kv] for h, kv in enumerate(owner)], dim=1)

    def attend(owner: list[int], divisor: float = math.sqrt(d), dim: int = -1, hidden: float = -math.inf):
        s = (scores(owner) / divisor).masked_fill(~mask, hidden)
        return mix(s.softmax(dim).nan_to_num(0), owner)

    right, in_turn = ([h // group for h in range(heads)], [h % kv_heads for h in range(heads)])
    wanted = attend(right)
    stale, blind = case["k"].isnan().any(), ~mask.any(1)[:, None, None]
    slips = {
        "": wanted,
        f"query head h has to read K/V head h // {group}, not h % {kv_heads}": attend(in_turn),
        "the scores are not divided by sqrt(D)": attend(right, 1),
        "the softmax runs over the queries instead of the keys": attend(right, dim=-2),
        "masked keys still take a share: hide them before the softmax, with -inf": mix(
            (scores(right) / math.sqrt(d)).softmax(-1) * mask, right
        ),
        "a masked key keeps a finite score of 0: only -inf takes no share": attend(right, hidden=0),
        "a masked key keeps a finite score, far above the real ones: only -inf takes no share": attend(
            right, hidden=-100.0
        ),
        "masked keys took a share before it was set to 0: only a score of -inf takes none": mix(
            (scores(right) / math.sqrt(d)).masked_fill(~mask, -100.0).softmax(-1) * mask, right
        ),
        "heads and tokens are mixed up: reshape does not swap axes, transpose does": wanted.transpose(0, 1).reshape(
            n, heads, d
        ),
    }
    if not mask.all():
        s = (scores(right) / math.sqrt(d)).masked_fill(mask, -math.inf)
        reversed_mask = mix(s.softmax(-1).nan_to_num(0), right)
        slips["the mask is used the wrong way round: True means that the query sees the key"] = reversed_mask
    if blind.any():
        nothing = "a row that sees no key is 0 / 0 in the softmax, and has to come out as zeros"
        slips[nothing] = wanted.masked_fill(blind, math.nan)
        slips["a row that sees no key takes the mean of all values, and has to come out as zeros"] = torch.where(
            blind, v.mean(0)[right], wanted
        )
    if stale:
        memory = "memory that no query sees may hold NaN, and 0 times NaN is NaN: keep it out of the products"
        slips[memory] = torch.full_like(wanted, math.nan)
    return slips
