"""What the exercise on the block is checked against: RMSNorm, the rotation of pairs, one layer's forward pass.

Inputs are chosen so that one slip shows in one place. Rows with mean 0 hide a LayerNorm, one row hides a mean over all
of them, theta = 1 gives every pair the same angle, and a block whose attention answers the same whatever it is asked
separates what goes in from what comes out. The oracle is float64 and plain PyTorch. Built in lesson 03.
"""

from __future__ import annotations

import math

import torch

from minillm.course.grader.task import Case, Record, Task, Verdicts, difference

HIDES = (
    "minillm.norm",
    "minillm.rope",
    "minillm.model",
    "minillm.ops",
    "minillm.course.engine_so_far.textbook",
    "torch.nn.functional.rms_norm",
    "torch.rms_norm",
)


def explain(got: object, wanted: torch.Tensor, slips: dict[str, torch.Tensor], name: str, tolerance=1e-4) -> str:
    """ "" when `got` is right, else the slip that gives just these numbers, else how far off it is."""
    wrong = difference(got, wanted, tolerance, name)
    if wrong and isinstance(got, torch.Tensor) and got.shape == wanted.shape:
        for sentence, values in slips.items():
            if not difference(got, values.double(), tolerance):
                return sentence
    return wrong


def balanced(n: int, size: int, g: torch.Generator) -> torch.Tensor:
    """Rows [n, size] of one set of numbers in other orders: every row has mean 0 and the same root mean square."""
    half = torch.rand(size // 2, generator=g) + 0.5
    row = torch.cat([half, -half])
    return torch.stack([row[torch.randperm(size, generator=g)] for _ in range(n)])


# ---- RMSNorm -------------------------------------------------------------------------------------

NORM_ITEMS = ("by hand", "no mean", "eps", "weight", "rows", "leading axes", "half precision", "input untouched")


def norm_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    size = 2 * int(torch.randint(3, 9, (1,), generator=g))

    def case(item: str, x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0) -> Case:
        weight = torch.ones(x.shape[-1], dtype=x.dtype) if weight is None else weight
        return {"items": [item], "x": x, "weight": weight, "eps": eps}

    scales = torch.rand(4, 1, generator=g) * torch.tensor([[1.0], [10.0], [0.1], [3.0]]) + 0.05
    return [
        case("by hand", torch.tensor([[3.0, -3.0, 1.0, -1.0]])),
        case("no mean", balanced(1, size, g) + 2),
        case("eps", 1e-3 * balanced(1, size, g), eps=1e-5),
        case("eps", torch.zeros(1, size), eps=1e-5),
        case("weight", balanced(1, size, g), torch.randn(size, generator=g)),
        case("rows", scales * balanced(4, size, g)),
        case("leading axes", balanced(6, size, g).view(2, 3, size)),
        case("half precision", (400 * balanced(2, size, g)).half()),
        case("input untouched", balanced(1, size, g)),
    ]


def norm_drive(rms_norm, case: Case) -> Record:
    x, weight = case["x"].clone(), case["weight"].clone()
    return {"out": rms_norm(x, weight, case["eps"]), "x": x, "weight": weight}


def norm_judge(case: Case, record: Record) -> Verdicts:
    (item,), got = case["items"], record.get("out")
    x, weight, eps = case["x"].double(), case["weight"].double(), case["eps"]
    mean_square = x.pow(2).mean(-1, keepdim=True)
    centred = x - x.mean(-1, keepdim=True)
    slips = {
        "the mean is subtracted: that is LayerNorm, RMSNorm divides only": centred
        / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        * weight,
        "eps stands outside the square root": x / (mean_square.sqrt() + eps) * weight,
        "eps is left out, so small rows grow too large and a row of zeros is 0 / 0": x / mean_square.sqrt() * weight,
        "the weight is not applied": x / (mean_square + eps).sqrt(),
        "all rows are divided by one number; each row has its own root mean square": x
        / (x.pow(2).mean() + eps).sqrt()
        * weight,
        "the mean runs over the wrong axis: it is always the last one": x
        / (x.pow(2).mean(min(1, x.dim() - 1), keepdim=True) + eps).sqrt()
        * weight,
        "half precision overflows: 400 squared is more than float16 holds; compute in float32": torch.zeros_like(x),
    }
    if isinstance(got, torch.Tensor) and got.dtype != case["x"].dtype and got.is_floating_point():
        return {item: f"the result is {got.dtype}, and the rows came in {case['x'].dtype}: convert it back"}
    tolerance = 5e-3 if case["x"].dtype == torch.float16 else 1e-4
    wrong = explain(got, x / (mean_square + eps).sqrt() * weight, slips, "the result", tolerance)
    if not wrong and item == "input untouched":
        wrong = _untouched(record, case, "x") or _untouched(record, case, "weight")
    return {item: wrong}


def _untouched(record: Record, case: Case, name: str) -> str:
    changed = difference(record.get(name), case[name].double(), 1e-6, name)
    return f"{name} itself was changed, and the residual stream still needs it: work on a new tensor" if changed else ""


# ---- rotation ------------------------------------------------------------------------------------

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
        x = _inside_nan(x)
    return {"out": rotate(x, positions, case["theta"]), "x": x.clone(), "positions": positions}


def _inside_nan(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as an interior slice of a larger buffer of NaN, as q is a slice of q, k and v together."""
    n, heads, size = x.shape
    buffer = torch.full((n, heads + 3, size), math.nan)
    buffer[:, 1 : heads + 1] = x
    return buffer[:, 1 : heads + 1]


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
    rows = torch.arange(len(x)).double()[:, None, None]
    halved = case["positions"].to(case["x"].dtype).double()[:, None, None] * theta**-exponents
    one_head = torch.cat([turned(x[:, :1], angles), x[:, 1:]], dim=1)
    slips = {
        "neighbours (0, 1), (2, 3) are turned; this model's pairs lie half a head apart, (0, D/2)": neighbours,
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
    wrong = explain(got, turned(x, angles), slips, "the result", tolerance)
    if not wrong and item == "input untouched":
        wrong = _untouched(record, case, "x") or _untouched(record, case, "positions")
    return {item: wrong}


# ---- one layer -----------------------------------------------------------------------------------

BLOCK_ITEMS = (
    "queries",
    "keys",
    "values",
    "grouped heads",
    "attention's answer",
    "feed-forward",
    "both halves",
    "input untouched",
)
STACKED = ("input_norm", "qkv", "o", "post_norm", "gate_up", "down")


def block_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    n, e, f, d = (int(torch.randint(*bounds, (1,), generator=g)) for bounds in ((3, 6), (5, 9), (5, 9), (2, 4)))
    d *= 2

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) / math.sqrt(shape[-1])

    def case(*items: str, heads: int = 1, kv_heads: int = 1, still: bool = False, **changes: torch.Tensor) -> Case:
        w = {
            "input_norm": torch.rand(e, generator=g) + 0.5,
            "qkv": noise((heads + 2 * kv_heads) * d, e),
            "o": noise(e, heads * d),
            "post_norm": torch.rand(e, generator=g) + 0.5,
            "gate_up": noise(2 * f, e) * 3,
            "down": noise(e, f) * 3,
        }
        answer = torch.randn(n, heads, d, generator=g)
        x = torch.randn(n, e, generator=g)
        return {"items": list(items), "x": x, **w, **changes, "answer": answer, "head_dim": d, "still": still}

    twice = noise(f, e).repeat(2, 1) * 3  # gate and up the same: it does not matter which is which
    return [
        case("queries", "keys", "values"),
        case("grouped heads", heads=4, kv_heads=2, still=True),
        case("attention's answer", down=torch.zeros(e, f)),
        case("feed-forward", o=torch.zeros(e, d)),
        case("both halves", gate_up=twice),
        case("input untouched", down=torch.zeros(e, f)),
    ]


def block_drive(block, case: Case) -> Record:
    x, record = case["x"].clone(), {"asked": 0}

    def norm(rows, weight):
        return rows * weight  # what a norm really does is task 1; here only where it stands

    def turn(heads):
        return heads if case["still"] else 2 * heads + 1

    def attend(q, k, v):
        record.update(q=q.clone(), k=k.clone(), v=v.clone(), asked=record["asked"] + 1)
        return case["answer"].clone()

    record["out"] = block(x, {name: case[name].clone() for name in STACKED}, case["head_dim"], norm, turn, attend)
    return {**record, "x": x}


def block_judge(case: Case, record: Record) -> Verdicts:
    if record.get("asked") != 1:
        return dict.fromkeys(case["items"], f"attend was called {record.get('asked')} times in one layer, not once")
    x = case["x"].double()
    w = {name: case[name].double() for name in STACKED}
    if case["items"][0] in ("queries", "grouped heads"):
        return _inputs_of_attention(case, record, x, w)
    (item,) = case["items"]
    attended = case["answer"].double().flatten(1) @ w["o"].T

    def feed(rows: torch.Tensor, weight: str = "post_norm", swap: bool = False, late: bool = False) -> torch.Tensor:
        gate, up = ((rows * w[weight]) @ w["gate_up"].T).chunk(2, dim=-1)
        gate, up = (up, gate) if swap else (gate, up)
        mixed = gate * up
        return (mixed * mixed.sigmoid() if late else mixed * gate.sigmoid()) @ w["down"].T

    h, normed = x + attended, x * w["input_norm"]
    slips = {
        "silu belongs to the first half of gate_up, the gate": h + feed(h, swap=True),
        "silu is taken of the product; it belongs to the gate alone": h + feed(h, late=True),
        "the feed-forward half reads x from before attention; it reads the sum": h + feed(x),
        "the feed-forward half is normed by input_norm; it has a weight of its own, post_norm": h
        + feed(h, "input_norm"),
        "attention's answer is added to the normed rows; it is added to x": normed + attended + feed(normed + attended),
        "attention's answer takes the place of x; it is added to it": attended + feed(attended),
        "the feed-forward answer takes the place of x; it is added to it": feed(h),
        "the feed-forward half is missing": h,
    }
    wrong = explain(record.get("out"), h + feed(h), slips, "the result")
    if not wrong and item == "input untouched":
        wrong = _untouched(record, case, "x")
    return {item: wrong}


def _inputs_of_attention(case: Case, record: Record, x: torch.Tensor, w: dict[str, torch.Tensor]) -> Verdicts:
    """What `attend` was handed: all three at once where heads are grouped, else one item each."""
    d, heads = case["head_dim"], case["answer"].shape[1]
    stacked = ((x * w["input_norm"]) @ w["qkv"].T).unflatten(-1, (-1, d))  # [n, H + 2 Hkv, D]
    plain = (x @ w["qkv"].T).unflatten(-1, (-1, d))
    kv_heads = (stacked.shape[1] - heads) // 2
    sizes = [heads, kv_heads, kv_heads]
    q, k, v = stacked.split(sizes, dim=1)
    turn = (lambda rows: rows) if case["still"] else (lambda rows: 2 * rows + 1)
    by_group = stacked.unflatten(1, (kv_heads, -1))  # each group's queries, its key, its value
    group = [by_group[:, :, :-2].flatten(1, 2), by_group[:, :, -2], by_group[:, :, -1]]
    slips = {
        "q": {"the queries are not turned": q, "x is not normed before the product": turn(plain[:, :heads])},
        "k": {
            "the keys are not turned": k,
            "k and v are swapped: qkv holds all of q, then k, then v": turn(v),
            "x is not normed before the product": turn(plain[:, heads : heads + kv_heads]),
        },
        "v": {
            "the values are turned; only q and k carry a position": turn(v),
            "k and v are swapped: qkv holds all of q, then k, then v": k,
            "x is not normed before the product": plain[:, -kv_heads:],
        },
    }
    verdicts = []
    names = {"q": "queries", "k": "keys", "v": "values"}
    for (key, name), wanted, grouped in zip(names.items(), (turn(q), turn(k), v), group, strict=True):
        slips[key]["q, k and v are taken group by group; qkv holds all of q, then all of k, then all of v"] = grouped
        verdicts.append(explain(record.get(key), wanted, slips[key], f"what attend got as {name}"))
    if case["items"] == ["grouped heads"]:
        return {"grouped heads": next(filter(None, verdicts), "")}
    return dict(zip(names.values(), verdicts, strict=True))


TASKS = (
    Task("ex03.1", "rms_norm", "RMSNorm", len(NORM_ITEMS), NORM_ITEMS, norm_cases, norm_drive, norm_judge, HIDES),
    Task(
        "ex03.2",
        "rotate",
        "RoPE, find the bug",
        len(ROTATE_ITEMS),
        ROTATE_ITEMS,
        rotate_cases,
        rotate_drive,
        rotate_judge,
        HIDES,
    ),
    Task("ex03.3", "block", "one layer", len(BLOCK_ITEMS), BLOCK_ITEMS, block_cases, block_drive, block_judge, HIDES),
)
