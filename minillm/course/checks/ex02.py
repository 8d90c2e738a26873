"""What the exercise on attention is checked against: weights, the causal mask, grouped-query attention.

Inputs are chosen so that one slip shows in one place. A score matrix whose rows and columns all have the same sum
hides a softmax over the wrong axis; a head size of 1 hides a missing scale; a query that asks for one key very loudly
hides both, and shows which K/V head it was given. The oracle is float64 and plain PyTorch. Built in lesson 02.
"""

from __future__ import annotations

import math
import random

import torch

from minillm.course.checks.attention_inputs import inside_nan, lookup, ring
from minillm.course.grader.task import Case, Record, Task, Verdicts, diagnose, difference

HIDES = ("minillm.attention", "minillm.course.probe", "torch.nn.functional.scaled_dot_product_attention")
DEEP = -200.0  # e^-200 is 0 in float32
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


# ---- the mask ------------------------------------------------------------------------------------

MASK_ITEMS = ("later keys", "own key", "earlier keys", "fewer queries", "one query", "window", "window, fewer queries")


def mask_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    few, more = r.randint(2, 5), r.randint(7, 12)
    return [
        {"items": ["later keys", "own key", "earlier keys"], "n": 3, "S": 3, "window": None},
        {"items": ["later keys", "own key", "earlier keys"], "n": more, "S": more, "window": None},
        {"items": ["fewer queries"], "n": 3, "S": 8, "window": None},
        {"items": ["fewer queries"], "n": few, "S": few + r.randint(1, 9), "window": None},
        {"items": ["one query"], "n": 1, "S": more, "window": None},
        {"items": ["window"], "n": more, "S": more, "window": r.randint(2, 5)},
        {"items": ["window, fewer queries"], "n": few, "S": few + more, "window": r.randint(2, 6)},
    ]


def mask_drive(causal_mask, case: Case) -> Record:
    return {"mask": causal_mask(case["n"], case["S"], case["window"])}


def mask_judge(case: Case, record: Record) -> Verdicts:
    n, keys, window, got = case["n"], case["S"], case["window"], record.get("mask")
    distance = torch.arange(keys - n, keys)[:, None] - torch.arange(keys)  # how far the key lies behind the query
    wanted = (distance >= 0) & (distance < (window or keys))
    if isinstance(got, torch.Tensor) and got.dtype != torch.bool:
        return dict.fromkeys(case["items"], f"the mask holds {got.dtype}, not booleans: True where a query sees a key")
    wrong = difference(got, wanted, name="the mask")
    if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
        return dict.fromkeys(case["items"], wrong)
    if n > 1 and torch.equal(got, ~wanted):
        return dict.fromkeys(case["items"], "True and False are swapped: True means that the query sees the key")
    # An own key that is left out counts in its own item alone.
    region = {"later keys": distance < 0, "own key": distance == 0, "earlier keys": distance > 0}
    return {
        item: _mask_diagnosis(got, wanted, distance, window)
        if (got != wanted)[region.get(item, distance != 0)].any()
        else ""
        for item in case["items"]
    }


def _mask_diagnosis(got: torch.Tensor, wanted: torch.Tensor, distance: torch.Tensor, window: int | None) -> str:
    (n, keys), own = wanted.shape, distance == 0
    top_left = torch.arange(n)[:, None] - torch.arange(keys)
    if n < keys and torch.equal(got, (top_left >= 0) & (top_left < (window or keys))):
        return f"aligned at the top left: query 0 of {n} stands at position {keys - n}, not at 0"
    if window and torch.equal(got, (distance >= 0) & (distance <= window)):
        return f"off by one: a window of {window} is the query's own key and {window - 1} before it"
    if window and torch.equal(got | own, distance >= 0):
        return "the window is ignored: keys further back than the window are still seen"
    if torch.equal(got, wanted & ~own):
        return "a query does not see its own key, which it has to: the last query sees every key"
    row, key = (got != wanted).nonzero()[0].tolist()
    wrong = "sees key {}, and must not" if got[row, key] else "does not see key {}, and has to"
    return f"n = {n}, S = {keys}: query {row} {wrong.format(key)}"


# ---- grouped-query attention ---------------------------------------------------------------------

GROUPED_ITEMS = (
    "one head",
    "masked keys",
    "groups",
    "one K/V head",
    "fewer queries",
    "head size",
    "rising scores",
    "deep negative",
    "strided views",
)


def grouped_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    n, shared, group = (int(torch.randint(a, b, (1,), generator=g)) for a, b in ((4, 8), (2, 4), (2, 4)))
    heads = shared * group
    everything, lower = torch.ones(n, n, dtype=torch.bool), torch.ones(n, n, dtype=torch.bool).tril()
    two = torch.tensor([[[1.0]], [[-1.0]]]) * math.sqrt(math.log(3) / 2)
    ones, rise = torch.ones(n, 1, 1), torch.arange(n)[:, None, None] * 1.0
    noise = torch.randn(n, 1, 1, generator=g)

    def case(item: str, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, v: torch.Tensor | None = None) -> Case:
        v = torch.randn(k.shape, generator=g) if v is None else v
        return {"items": [item], "q": q, "k": k, "v": v, "mask": mask, "strided": item == "strided views"}

    return [
        case("one head", two, two, torch.ones(2, 2, dtype=torch.bool), torch.tensor([[[8.0]], [[0.0]]])),
        case("masked keys", noise, torch.randn(n, 1, 1, generator=g), lower),
        case("groups", *lookup(n, n, heads, shared, g), everything),
        case("one K/V head", *lookup(n, n, 3, 1, g), everything),
        case("fewer queries", *lookup(2, n, 2, 2, g), torch.ones(2, n, dtype=torch.bool).tril(n - 2)),
        case("head size", ring(n, 16, g)[:, None], ring(n, 16, g)[:, None], everything),
        case("rising scores", ones, 40 * rise + noise, everything),
        case("deep negative", ones, DEEP + noise, lower),
        case("strided views", *lookup(n, n, 3, 3, g), everything),
    ]


def grouped_drive(grouped_attention, case: Case) -> Record:
    tensors = [case[name].clone() for name in ("q", "k", "v")]
    if case["strided"]:
        tensors = [inside_nan(x) for x in tensors]
    return {"out": grouped_attention(*tensors, case["mask"].clone())}


def grouped_judge(case: Case, record: Record) -> Verdicts:
    q, k, v, mask = case["q"].double(), case["k"].double(), case["v"].double(), case["mask"]
    (n, heads, d), group = q.shape, q.shape[1] // k.shape[1]
    owner = torch.arange(heads) // group
    raw = torch.einsum("nhd,shd->hns", q, k[:, owner])
    s = raw / math.sqrt(d)

    def mix(p: torch.Tensor, owner: torch.Tensor = owner) -> torch.Tensor:
        return torch.einsum("hns,shd->nhd", p, v[:, owner])

    hidden, other = s.masked_fill(~mask, -math.inf), torch.arange(heads) % k.shape[1]
    crossed = torch.einsum("nhd,shd->hns", q, k[:, other]) / math.sqrt(d)
    swapped = mix(hidden.softmax(-1)).transpose(0, 1).reshape(n, heads, d)
    slips = {
        f"query head h has to read K/V head h // {group}, not h % {k.shape[1]}": mix(
            crossed.masked_fill(~mask, -math.inf).softmax(-1), other
        ),
        "the scores are not divided by sqrt(D)": mix(raw.masked_fill(~mask, -math.inf).softmax(-1)),
        "the softmax runs over the queries instead of the keys": mix(hidden.softmax(-2)),
        "masked keys still take a share: hide them before the softmax, with -inf": mix(s.softmax(-1) * mask),
        "a masked key keeps a finite score of 0: only -inf takes no share": mix(s.masked_fill(~mask, 0).softmax(-1)),
        "a masked key keeps a finite score, far above the real ones: only -inf takes no share": mix(
            s.masked_fill(~mask, -100.0).softmax(-1)
        ),
        "heads and tokens are mixed up: reshape does not swap axes, transpose does": swapped,
    }
    if not mask.all():
        reversed_mask = "the mask is used the wrong way round: True means that the query sees the key"
        slips[reversed_mask] = mix(s.masked_fill(mask, -math.inf).softmax(-1))
    (item,) = case["items"]
    got = record.get("out")
    wrong = diagnose(got, mix(hidden.softmax(-1)), slips, "the output", TOLERANCE)
    if wrong and wrong not in slips and item == "strided views" and getattr(got, "shape", None) == q.shape:
        wrong = f"{wrong}; these inputs are views with strides of their own, so nothing may assume their layout"
    return {item: wrong}


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
        HIDES,
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
