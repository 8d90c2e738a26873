"""Checks the rotation of pairs: RoPE in a head or in its first part, the angles from the positions that are given.

theta = 1 gives every pair the same angle, which hides how frequencies fall; rows from position 0 on hide who counts
them; a head that is turned whole hides what is measured by the part. The oracle turns complex numbers in float64.
Task 2 of exercise 03.
"""

from __future__ import annotations

import torch

from minillm.course.checks.attention_inputs import inside_nan
from minillm.course.grader.task import Case, Record, Verdicts, diagnose, untouched

ROTATE_ITEMS = (
    "by hand",
    "frequencies",
    "half precision",
    "input untouched",
    "part of a head",
    "a part's frequencies",
    "mixed requests",
    "strided heads",
)


def rotate_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    part = 2 * int(torch.randint(2, 5, (1,), generator=g))
    size = part + 2 * int(torch.randint(1, 4, (1,), generator=g))
    start, theta = (int(torch.randint(low, high, (1,), generator=g)) for low, high in ((3, 400), (50, 5000)))

    def case(item: str, positions: list[int], heads: int = 1, theta: float = 1.0, part=None, dtype=torch.float32):
        x = torch.randn(len(positions), heads, size, generator=g).to(dtype)
        return {"items": [item], "x": x, "positions": torch.tensor(positions), "theta": float(theta), "size": part}

    by_hand = case("by hand", [0, 1])
    by_hand["x"] = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).repeat(2, 1, 1)
    return [
        by_hand,
        case("frequencies", [0, 1, 2, 3], theta=theta),
        case("half precision", [1001, 1002, 1003], dtype=torch.bfloat16),
        case("input untouched", [0, 1, 2]),
        case("part of a head", [0, 1, 2, 3], part=part),
        case("a part's frequencies", [0, 1, 2, 3], theta=theta, part=part),
        case("mixed requests", [start, 0, start + 1, 7, start], part=part),
        case("strided heads", [0, 1, 2, 3], heads=3, part=part),
    ]


def rotate_drive(rotate, case: Case) -> Record:
    x, positions = case["x"].clone(), case["positions"].clone()
    if case["items"] == ["strided heads"]:
        x = inside_nan(x)
    how = {} if case["size"] is None else {"size": case["size"]}
    return {"out": rotate(x, positions, case["theta"], **how), "x": x.clone(), "positions": positions}


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Pairs (d, d + D/2) of x [T, heads, D], float64, turned by angles that broadcast against [T, heads, D/2]."""
    a, b = x.chunk(2, dim=-1)
    pair = torch.complex(a, b) * torch.polar(torch.ones((), dtype=torch.float64), angles.double())
    return torch.cat([pair.real, pair.imag], dim=-1)


def rotate_judge(case: Case, record: Record) -> Verdicts:
    (item,), got = case["items"], record.get("out")
    slips = _slips(case)
    wanted = slips.pop("")
    if isinstance(got, torch.Tensor) and got.dtype != case["x"].dtype and got.is_floating_point():
        return {item: f"the result is {got.dtype}, and the heads came in {case['x'].dtype}: convert it back"}
    tolerance = 2e-2 if case["x"].dtype == torch.bfloat16 else 1e-3  # an angle of 400 holds 2e-5 of rounding
    wrong = diagnose(got, wanted, slips, "the result", tolerance)
    if not wrong and item == "input untouched":
        wrong = untouched(case, record, "x", "positions")
    return {item: wrong}


def _slips(case: Case) -> dict[str, torch.Tensor]:
    """Sentence -> the heads that this slip gives; under "" the right ones."""
    size = case["size"] or case["x"].shape[-1]
    whole, theta, half = case["x"].double(), case["theta"], size // 2
    x, rest = whole[..., :size], whole[..., size:]
    positions, exponents = case["positions"].double()[:, None, None], torch.arange(half).double() / half
    rows = torch.arange(len(x)).double()[:, None, None]
    angles = positions * theta**-exponents
    pairs = x.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)  # neighbours brought half a head apart
    neighbours, back = (turned(y, angles).unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2) for y in (pairs, x))
    halved = case["positions"].to(case["x"].dtype).double()[:, None, None] * theta**-exponents
    by_head = torch.arange(half).double() / (whole.shape[-1] // 2)
    results = {
        "": turned(x, angles),
        "neighbours (0, 1), (2, 3) are turned; this model's pairs lie half a head apart, (0, D/2)": neighbours,
        "a and b are taken out as halves, which is right, and put back as neighbours: put them back as halves": back,
        "a and b are put back as halves, which is right, and taken out as neighbours: take them out as halves": turned(
            pairs, angles
        ),
        "the rows are counted from 0; use the positions that are given": turned(x, rows * theta**-exponents),
        "only the first position is used; rows of several requests have positions of their own": turned(
            x, (rows + positions[0]) * theta**-exponents
        ),
        "the frequencies fall as those of a whole head; the part has size / 2 pairs, and theta^(-2d/size)": turned(
            x, positions * theta**-by_head
        ),
        "the frequencies fall half as fast as they should: theta^(-2d/D), d from 0 to D/2 - 1": turned(
            x, positions * theta ** -(exponents / 2)
        ),
        "it turns the other way round": turned(x, -angles),
        "only the first head is turned": torch.cat([turned(x[:, :1], angles), x[:, 1:]], dim=1),
        "the angle was rounded to half precision, where 1001 is 1000: compute angles in float32": turned(x, halved),
        "nothing is turned": x,
    }
    slips = {sentence: torch.cat([part, rest], dim=-1) for sentence, part in results.items()}
    everything = torch.arange(whole.shape[-1] // 2).double() / (whole.shape[-1] // 2)
    slips["the whole head is turned; what lies behind the first `size` numbers stays as it is"] = turned(
        whole, positions * theta**-everything
    )
    return slips
