"""Checks the rotation of pairs: RoPE, the pairs half a head apart, the angles from the positions that are given.

theta = 1 gives every pair the same angle, which hides how frequencies fall; rows from position 0 on hide who counts
them. The oracle turns complex numbers in float64. Task 2 of exercise 03.
"""

from __future__ import annotations

import torch

from minillm.course.checks.attention_inputs import inside_nan
from minillm.course.grader.task import Case, Record, Verdicts, diagnose, untouched

ROTATE_ITEMS = (
    "by hand",
    "frequencies",
    "later positions",
    "mixed requests",
    "heads",
    "half precision",
    "strided view",
    "input untouched",
)


def rotate_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    size = 2 * int(torch.randint(2, 7, (1,), generator=g))
    start = int(torch.randint(3, 400, (1,), generator=g))

    def case(item: str, positions: list[int], heads: int = 1, theta: float = 1.0, dtype=torch.float32) -> Case:
        x = torch.randn(len(positions), heads, size, generator=g).to(dtype)
        return {"items": [item], "x": x, "positions": torch.tensor(positions), "theta": theta}

    by_hand = case("by hand", [0, 1])
    by_hand["x"] = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).repeat(2, 1, 1)
    mixed = [start, 0, start + 1, 7, start]
    return [
        by_hand,
        case("frequencies", [0, 1, 2, 3], theta=float(torch.randint(50, 5000, (1,), generator=g))),
        case("later positions", list(range(start, start + 3))),
        case("mixed requests", mixed),
        case("heads", [0, 1, 2, 3], heads=3),
        case("half precision", [1001, 1002, 1003], dtype=torch.bfloat16),
        case("strided view", [0, 1, 2, 3], heads=2),
        case("input untouched", [0, 1, 2]),
    ]


def rotate_drive(rotate, case: Case) -> Record:
    x, positions = case["x"].clone(), case["positions"].clone()
    if case["items"] == ["strided view"]:
        x = inside_nan(x)
    return {"out": rotate(x, positions, case["theta"]), "x": x.clone(), "positions": positions}


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Pairs (d, d + D/2) of x [T, heads, D], float64, turned by angles that broadcast against [T, heads, D/2]."""
    a, b = x.chunk(2, dim=-1)
    pair = torch.complex(a, b) * torch.polar(torch.ones((), dtype=torch.float64), angles.double())
    return torch.cat([pair.real, pair.imag], dim=-1)


def rotate_judge(case: Case, record: Record) -> Verdicts:
    (item,), got = case["items"], record.get("out")
    x, theta, half = case["x"].double(), case["theta"], case["x"].shape[-1] // 2
    positions, exponents = case["positions"].double()[:, None, None], torch.arange(half).double() / half
    angles = positions * theta**-exponents
    pairs = x.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)  # neighbours brought half a head apart
    neighbours = turned(pairs, angles).unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
    back = turned(x, angles).unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
    rows = torch.arange(len(x)).double()[:, None, None]
    halved = case["positions"].to(case["x"].dtype).double()[:, None, None] * theta**-exponents
    one_head = torch.cat([turned(x[:, :1], angles), x[:, 1:]], dim=1)
    slips = {
        "neighbours (0, 1), (2, 3) are turned; this model's pairs lie half a head apart, (0, D/2)": neighbours,
        "a and b are taken out as halves, which is right, and put back as neighbours: put them back as halves": back,
        "a and b are put back as halves, which is right, and taken out as neighbours: take them out as halves": turned(
            pairs, angles
        ),
        "the rows are counted from 0; use the positions that are given": turned(x, rows * theta**-exponents),
        "only the first position is used; rows of several requests have positions of their own": turned(
            x, (rows + positions[0]) * theta**-exponents
        ),
        "the frequencies fall half as fast as they should: theta^(-2d/D), d from 0 to D/2 - 1": turned(
            x, positions * theta ** -(exponents / 2)
        ),
        "it turns the other way round": turned(x, -angles),
        "only the first head is turned": one_head,
        "the angle was rounded to half precision, where 1001 is 1000: compute angles in float32": turned(x, halved),
        "nothing is turned": x,
    }
    if isinstance(got, torch.Tensor) and got.dtype != case["x"].dtype and got.is_floating_point():
        return {item: f"the result is {got.dtype}, and the heads came in {case['x'].dtype}: convert it back"}
    tolerance = 2e-2 if case["x"].dtype == torch.bfloat16 else 1e-3  # an angle of 400 holds 2e-5 of rounding
    wrong = diagnose(got, turned(x, angles), slips, "the result", tolerance)
    if not wrong and item == "input untouched":
        wrong = untouched(case, record, "x", "positions")
    return {item: wrong}
