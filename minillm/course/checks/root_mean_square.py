"""Checks RMSNorm: each row, or each head of a row, divided by its own root mean square, times a weight.

Rows with mean 0 hide a LayerNorm, one row hides a mean over all of them, heads of one size a mean over the row, a root
mean square far above eps hides where eps stands. The oracle is float64. Task 1 of exercise 03.
"""

from __future__ import annotations

import torch

from minillm.course.grader.task import Case, Record, Verdicts, diagnose, untouched

NORM_ITEMS = ("by hand", "eps", "weight", "rows", "heads", "leading axes", "half precision", "input untouched")


def norm_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    size = 2 * int(torch.randint(3, 9, (1,), generator=g))

    def case(item: str, x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0) -> Case:
        weight = torch.ones(x.shape[-1], dtype=x.dtype) if weight is None else weight
        return {"items": [item], "x": x, "weight": weight, "eps": eps}

    scales = torch.rand(4, 1, generator=g) * torch.tensor([[1.0], [10.0], [0.1], [3.0]]) + 0.05
    heads = torch.cat([part * 3.0**i for i, part in enumerate(balanced(3, size, g))])
    pair = balanced(2, size, g).flatten()
    return [
        case("by hand", torch.tensor([[3.0, 4.0]])),
        case("eps", 1e-3 * balanced(1, size, g), eps=1e-5),
        case("eps", torch.zeros(1, size), eps=1e-5),
        case("weight", pair[None], torch.randn(size, generator=g)),
        case("rows", scales * balanced(4, size, g)),
        case("heads", heads[None], torch.ones(size)),
        case("leading axes", balanced(12, size, g).view(2, 3, 2 * size), torch.ones(size)),
        case("half precision", (400 * balanced(2, size, g)).half()),
        case("input untouched", balanced(1, size, g)),
    ]


def norm_drive(rms_norm, case: Case) -> Record:
    x, weight = case["x"].clone(), case["weight"].clone()
    return {"out": rms_norm(x, weight, case["eps"]), "x": x, "weight": weight}


def norm_judge(case: Case, record: Record) -> Verdicts:
    (item,), got = case["items"], record.get("out")
    weight, eps = case["weight"].double(), case["eps"]
    x = case["x"].double().unflatten(-1, (-1, len(weight)))  # [..., heads, D]
    mean_square = x.pow(2).mean(-1, keepdim=True)
    centred = x - x.mean(-1, keepdim=True)
    slips = {
        "": x / (mean_square + eps).sqrt() * weight,
        "the mean is subtracted: that is LayerNorm, RMSNorm divides only": centred
        / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        * weight,
        "torch.std takes the mean away first; the root mean square does not": x / x.std(-1, keepdim=True) * weight,
        "eps stands outside the square root": x / (mean_square.sqrt() + eps) * weight,
        "eps is left out, so small rows grow too large and a row of zeros is 0 / 0": x / mean_square.sqrt() * weight,
        "the weight is not applied": x / (mean_square + eps).sqrt(),
        "a row is divided by one number; each head in it, D numbers, has its own root mean square": x
        / (x.pow(2).mean((-2, -1), keepdim=True) + eps).sqrt()
        * weight,
        "all rows are divided by one number; each row has its own root mean square": x
        / (x.pow(2).mean() + eps).sqrt()
        * weight,
        "the mean runs over the wrong axis: it is always the last one": x
        / (x.pow(2).mean(min(2, x.dim() - 1), keepdim=True) + eps).sqrt()
        * weight,
        "half precision overflows: 400 squared is more than float16 holds; compute in float32": torch.zeros_like(x),
    }
    slips = {sentence: result.flatten(-2) for sentence, result in slips.items()}
    wanted = slips.pop("")
    if isinstance(got, torch.Tensor) and got.dtype != case["x"].dtype and got.is_floating_point():
        return {item: f"the result is {got.dtype}, and the rows came in {case['x'].dtype}: convert it back"}
    tolerance = 5e-3 if case["x"].dtype == torch.float16 else 1e-4
    wrong = diagnose(got, wanted, slips, "the result", tolerance)
    if not wrong and item == "input untouched":
        wrong = untouched(case, record, "x", "weight")
    return {item: wrong}


def balanced(n: int, size: int, g: torch.Generator) -> torch.Tensor:
    """Rows [n, size] of one set of numbers in other orders: every row has mean 0 and the same root mean square."""
    half = torch.rand(size // 2, generator=g) + 0.5
    row = torch.cat([half, -half])
    return torch.stack([row[torch.randperm(size, generator=g)] for _ in range(n)])
