"""Checks the merging of attention over parts of the keys: weights, the log-sum-exp to go on with, empty parts.

Cases about weights have no empty part, and those about empty parts have one part with keys in each row at most, whose
weight is 1 under every rule. What a part without keys holds as its output is NaN in some cases, as memory that nobody
wrote may be. The oracle is float64 over all parts at once. Task 3 of exercise 08.
"""

from __future__ import annotations

import itertools
import math

import torch

from minillm.course.grader.task import MISSING, Case, Record, Verdicts, diagnose, difference

MERGE_ITEMS = (
    "two parts",
    "deep and high",
    "the new lse",
    "three parts",
    "in any order",
    "an empty part",
    "empty in some rows",
    "empty parts in front",
    "nothing but empty parts",
)
EMPTY = MERGE_ITEMS[-4:]
OVERFLOW = "exp of a log-sum-exp is infinite at 300 and 0 at -300: subtract the larger one first"
D = 3
Slips = dict[str, torch.Tensor]


def merge_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    n, heads = (int(torch.randint(2, 5, (1,), generator=g)) for _ in range(2))

    def part(level: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [n, H, D], lse [n, H]) that a part with keys may have."""
        return torch.randn((n, heads, D), generator=g), level + 2 * torch.randn((n, heads), generator=g)

    def empty(out: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((n, heads, D), out), torch.full((n, heads), -math.inf)

    def case(item: str, *parts: tuple[torch.Tensor, torch.Tensor]) -> Case:
        return {"items": [item], "parts": [list(part) for part in parts]}

    def halves() -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Two parts, of which each row has keys in one."""
        first, second = part(), part()
        rows = torch.rand(n, heads, generator=g) < 0.5
        rows[0, 0], rows[1, 1] = True, False
        for (out, lse), gone in ((first, rows), (second, ~rows)):
            out[gone], lse[gone] = math.nan, -math.inf
        return [first, second]

    return [
        case("two parts", part(), part()),
        case("deep and high", part(-300), part(-300)),
        case("deep and high", part(300), part(300)),
        case("the new lse", part(), part()),
        case("three parts", part(), part(), part()),
        case("three parts", *(part() for _ in range(5))),
        case("in any order", part(1), part(), part(-1)),
        case("an empty part", part(), empty(math.nan)),
        case("an empty part", empty(math.nan), part(-30), empty(math.nan)),
        case("empty in some rows", *halves()),
        case("empty parts in front", empty(), empty(), part()),
        case("nothing but empty parts", empty(), empty()),
        case("nothing but empty parts", empty(), empty(), empty()),
    ]


def merge_drive(merge, case: Case) -> Record:
    orders = [range(len(case["parts"]))]
    if case["items"] == ["in any order"]:
        orders = list(itertools.permutations(orders[0]))
    answers, changed = [], False
    for order in orders:
        came = [tensor for i in order for tensor in case["parts"][i]]
        given = [tensor.clone() for tensor in came]
        answer = merge(*given)
        answers.append(list(answer) if isinstance(answer, tuple) else answer)
        changed |= not all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(came, given, strict=True))
    return {"answers": answers, "changed": changed}


def merge_judge(case: Case, record: Record) -> Verdicts:
    (item,), answers = case["items"], record["answers"]
    for answer in answers:
        if answer is None:
            return {item: f"the result {MISSING}"}
        if not isinstance(answer, list) or len(answer) != 2:
            return {item: "the result is not a pair of (out, lse)"}
    if record["changed"] and item == "two parts":
        return {item: "a tensor that came in was changed, and others still need it: work on new ones"}
    if item == "in any order":
        return {item: _order_fault(case["parts"], answers)}
    (out, lse), (wanted_out, wanted_lse) = answers[0], merged(case["parts"])
    of_out, of_lse = _empty_slips(case["parts"]) if item in EMPTY else _slips(item, case["parts"])
    wrong_out = diagnose(out, wanted_out, of_out, "the output")
    if item == "deep and high" and wrong_out.endswith("NaN or infinity"):
        wrong_out = OVERFLOW
    wrong_lse = diagnose(lse, wanted_lse, of_lse, "the log-sum-exp")
    return {item: wrong_out or wrong_lse if item in EMPTY else wrong_lse if item == "the new lse" else wrong_out}


def _order_fault(parts: list, answers: list[list]) -> str:
    """Every order gives the same, which is an average of the outputs, whatever the base of the logarithm."""
    out, lse = answers[0]
    for other in answers[1:]:
        for name, got, wanted in (("output", other[0], out), ("log-sum-exp", other[1], lse)):
            if not isinstance(wanted, torch.Tensor) or difference(got, wanted):
                return f"the same parts in another order give another {name}: hand on a true log-sum-exp in each step"
    rules = [merged(parts, base) for base in (math.e, 2.0)]
    if all(difference(out, right) for right, _ in rules):
        return difference(out, rules[0][0], name="the output")
    return ""


def merged(parts: list, base: float = math.e) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64 of attention over the keys of all parts together, lse to this base."""
    outs = torch.stack([out.double().nan_to_num(0) for out, _ in parts])
    lses = torch.stack([lse.double() for _, lse in parts]) * math.log(base)
    lse = lses.logsumexp(0)
    weights = (lses - lse.masked_fill(lse == -math.inf, 0)).exp()
    return (outs * weights[..., None]).sum(0), lse / math.log(base)


def _empty_slips(parts: list) -> tuple[Slips, Slips]:
    """Sentence -> the output, and sentence -> the log-sum-exp, of slips about parts without keys."""
    out, lse = merged(parts)
    stale = torch.stack([out for out, _ in parts]).isnan().any(0)
    nothing = "nothing and nothing is nothing: -inf - -inf is NaN, so use 0 as the maximum of a row without keys"
    of_out = {nothing: torch.full_like(out, math.nan)}
    if stale.any():
        sentence = "a part without keys may have left NaN as its output, and 0 times NaN is NaN: replace it first"
        of_out = {sentence: out.masked_fill(stale, math.nan)}
    of_lse = {nothing: torch.full_like(lse, math.nan)}
    weighs = "a row without keys has a log-sum-exp of -inf, so that it weighs nothing in what follows"
    of_out[weighs], of_lse[weighs] = out * lse.sigmoid()[..., None], lse.nan_to_num(neginf=0.0)
    return of_out, of_lse


def _slips(item: str, parts: list) -> tuple[Slips, Slips]:
    """Sentence -> the output, and sentence -> the log-sum-exp, of slips about weights."""
    outs, lses = (torch.stack([part[i].double() for part in parts]) for i in (0, 1))
    largest, shares = lses.amax(0), lses.softmax(0)[..., None]
    base = "the log-sum-exps are natural logarithms, and here they are powers of 2: use exp and log"
    handed_on = "the maximum is handed on in place of the log-sum-exp: add the logarithm of the sum of weights"
    of_out = {
        base: merged(parts, 2.0)[0],
        handed_on: _without_log(outs, lses),
        f"these are powers of 2, and {handed_on}": _without_log(outs, lses * math.log(2)),
        "only the first two parts were merged": merged(parts[:2])[0],
        "the parts count alike: a part weighs exp(lse), as much as its keys together": outs.mean(0),
        "a part weighs exp(lse), not lse": (outs * (lses / lses.sum(0))[..., None]).sum(0),
        "the parts are swapped: each output goes with the weight of another": (outs.flip(0) * shares).sum(0),
        "the weights have to sum to 1: divide by their sum": (outs * (lses - largest).exp()[..., None]).sum(0),
        "each row and head has weights of its own, and here they share them": (
            outs * lses.amax((1, 2), keepdim=True).softmax(0)[..., None]
        ).sum(0),
    }
    if item == "deep and high":
        of_out[OVERFLOW] = torch.zeros_like(of_out[base])
    of_lse = {
        base: merged(parts, 2.0)[1],
        handed_on: largest,
        "the powers are those of e, and the logarithm that is handed on is to the base 2": (
            largest + (lses - largest).exp().sum(0).log2()
        ),
        "the maximum is missing in the log-sum-exp: the sum of weights is relative to it": lses.logsumexp(0) - largest,
        "the log-sum-exps are added; what adds up are the sums inside, exp(lse)": lses.sum(0),
    }
    return of_out, of_lse


def _without_log(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """The output, merged part after part, where each step hands on the larger lse alone."""
    out, lse = outs[0], lses[0]
    for other, more in zip(outs[1:], lses[1:], strict=True):
        share = (more - lse).sigmoid()[..., None]
        out, lse = out * (1 - share) + other * share, torch.maximum(lse, more)
    return out
