"""What a row of attention comes out as when a walk over tiles goes wrong: sums that do not follow the maximum.

Used to name a slip in exercise 08. A walk is replayed in float64 with one step left out.
"""

from __future__ import annotations

import math

import torch

from minillm.course.grader.task import Case

RESCALING = {
    "sum and output of the tiles before belong to an older maximum: scale both down when it rises": (False, False),
    "the output of the tiles before was not scaled down with the sum when the maximum rose": (True, False),
    "the sum of the tiles before was not scaled down with the output when the maximum rose": (False, True),
}
OVERFLOW = {
    "falling scores": "e to a large number is infinite: the maximum never falls, a tile's own counts if it is higher",
    "deep scores": (
        "0 / 0 or inf - inf: a row that has seen no key yet has the maximum -inf; use 0 for it inside of exp, and do "
        "not keep that 0, or deep scores vanish beside it"
    ),
}


def tile_slips(case: Case) -> dict[str, torch.Tensor]:
    """Sentence -> the judged rows [m, H, D], of those slips that the case's inputs can show."""
    (item,), (first, last) = case["items"], case["rows"]
    slips = {}
    if item == "rising scores":
        scores = (case["q"][first, 0].double() @ case["k"][:, 0].double().T).flatten()
        for sentence, scaled in RESCALING.items():
            slips[sentence] = _walk(scores, case["v"][:, 0, 0].double(), case["key_tile"], *scaled)
    if item == "deep scores":
        shape = (last - first, *case["q"].shape[1:])
        slips["scores far below 0 vanish: start the maximum at -inf, and hide keys with -inf"] = torch.zeros(shape)
        if case["q"].min() < 0:
            sentence = "one maximum was taken for all rows, and those far below it become 0: each row has its own"
            slips[sentence] = torch.full(shape, math.nan)
        if first + 1 < len(case["k"]):
            hidden = case["v"][first + 1 :].double().mean(0, keepdim=True).expand(shape)
            slips["a hidden key keeps a finite score, above the real ones: only -inf takes no share"] = hidden
    if item == "half precision":
        low = "the sums stand still in bfloat16, where 256 + 1 is 256: keep them in float32 for inputs of half size"
        slips[low] = _walk_low(case)
    return slips


def _walk(scores: torch.Tensor, values: torch.Tensor, tile: int, scale_sum: bool, scale_out: bool) -> torch.Tensor:
    """[1, 1, 1]: one row over tiles of keys; what is not scaled stays as it was."""
    highest, total, mixed = -math.inf, 0.0, 0.0
    for start in range(0, len(scores), tile):
        s, v = scores[start : start + tile], values[start : start + tile]
        higher = max(highest, float(s.max()))
        shrink, p = math.exp(highest - higher), (s - higher).exp()
        total = total * (shrink if scale_sum else 1) + float(p.sum())
        mixed = mixed * (shrink if scale_out else 1) + float(p @ v)
        highest = higher
    return torch.full((1, 1, 1), mixed / total, dtype=torch.float64)


def _walk_low(case: Case) -> torch.Tensor:
    """The mean of values that are 0 or 1, summed up tile by tile in the dtype of the inputs."""
    total, mixed = (torch.zeros((), dtype=case["q"].dtype) for _ in range(2))
    for values in case["v"].flatten().split(case["key_tile"]):
        total, mixed = total + len(values), mixed + values.sum()
    return (mixed / total).double().expand(1, 1, 1)
