"""What the exercise on attention is checked against: weights, the causal mask, grouped-query attention.

Inputs are chosen so that one slip shows in one place. A score matrix whose rows and columns all have the same sum
hides a softmax over the wrong axis; a head size of 1 hides a missing scale; a query that asks for one key very loudly
hides both. Tasks 2 and 3 have files of their own. The oracle is float64 and plain PyTorch. Built in lesson 02.
"""

from __future__ import annotations

import math

import torch

from minillm.course.checks.attention_inputs import DEEP, ring
from minillm.course.checks.packed_mask import MASK_ITEMS, mask_cases, mask_drive, mask_judge
from minillm.course.checks.shared_heads import GROUPED_ITEMS, grouped_cases, grouped_drive, grouped_judge
from minillm.course.grader.task import Case, Record, Task, Verdicts, diagnose

READY_MADE = ("torch.softmax", "torch.nn.functional.softmax", "torch.Tensor.softmax")
HIDES = ("minillm.attention", "minillm.course.probe", "torch.nn.functional.scaled_dot_product_attention")
TOLERANCE = 1e-5  # of weights, which are at most 1

# ---- weights -------------------------------------------------------------------------------------

WEIGHTS_ITEMS = ("two tokens", "head size", "rows", "fewer queries", "deep negative", "large scores", "uneven rows")


def weights_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    n, few = (int(torch.randint(*range_, (1,), generator=g)) for range_ in ((5, 10), (2, 4)))
    half_log_3 = torch.tensor([[1.0], [-1.0]]) * math.sqrt(math.log(3) / 2)
    steep = torch.tensor([[10.0], [-10.0]])
    level = torch.rand(2, 1, generator=g)
    pairs = {
        "two tokens": (half_log_3, half_log_3),
        "head size": (ring(n, 16, g), ring(n, 16, g)),
        "rows": (torch.randn(n, 1, generator=g), torch.randn(n, 1, generator=g)),
        "fewer queries": (torch.randn(few, 1, generator=g), torch.randn(n, 1, generator=g)),
        "deep negative": (torch.ones(n, 1), torch.full((n, 1), DEEP)),
        "large scores": (steep, steep),
        "uneven rows": (torch.tensor([[6.0], [-6.0]]), 9.5 + level),
    }
    return [{"items": [item], "q": q, "k": k} for item, (q, k) in pairs.items()]


def weights_drive(attention_weights, case: Case) -> Record:
    return {"weights": attention_weights(case["q"].clone(), case["k"].clone())}


def weights_judge(case: Case, record: Record) -> Verdicts:
    s = case["q"].double() @ case["k"].double().T
    root = math.sqrt(case["q"].shape[1])
    single = (s / root).float()
    slips = {
        "the scores are not divided by sqrt(D)": s.softmax(-1),
        "the scores are divided by D instead of sqrt(D)": (s / root**2).softmax(-1),
        "the scores are divided by the root of the number of keys; D is how many numbers a key has": (
            s / math.sqrt(len(case["k"]))
        ).softmax(-1),
        "the softmax runs down the columns: each row, over its keys, has to sum to 1": (s / root).softmax(0),
        "one maximum is taken from the whole matrix: rows far below it become 0/0": _ratio(single - single.max()),
        "e to a large score is infinite, to a deep one 0: subtract each row's maximum first": _ratio(single),
    }
    if len(s) == s.shape[1]:
        slips["q and k have changed places: row i holds the scores of query i"] = (s / root).T.softmax(-1)
        e = (single - single.amax(1)).exp()
        slips["what was found for row i was used for column i: keep the axis with keepdim=True"] = e / e.sum(1)
    (item,) = case["items"]
    return {item: diagnose(record.get("weights"), (s / root).softmax(-1), slips, "the matrix of weights", TOLERANCE)}


def _ratio(s: torch.Tensor) -> torch.Tensor:
    return s.exp() / s.exp().sum(-1, keepdim=True)


TASKS = (
    Task(
        "ex02.1",
        "attention_weights",
        "scores and softmax",
        len(WEIGHTS_ITEMS),
        WEIGHTS_ITEMS,
        weights_cases,
        weights_drive,
        weights_judge,
        (*HIDES, *READY_MADE),
    ),
    Task(
        "ex02.2", "causal_mask", "causal mask", len(MASK_ITEMS), MASK_ITEMS, mask_cases, mask_drive, mask_judge, HIDES
    ),
    Task(
        "ex02.3",
        "grouped_attention",
        "grouped-query attention",
        len(GROUPED_ITEMS),
        GROUPED_ITEMS,
        grouped_cases,
        grouped_drive,
        grouped_judge,
        HIDES,
    ),
)
