"""Checks one layer: what it hands to attention, and what it makes of the answer.

Attention here answers the same whatever it is asked, which separates what goes in from what comes out; a half whose
weights are zero hides its slips from the items of the other. The oracle is float64. Task 3 of exercise 03.
"""

from __future__ import annotations

import math

import torch

from minillm.course.grader.task import Case, Record, Verdicts, diagnose, untouched

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
        "the feed-forward answer is added to the normed rows; it is added to the sum": h * w["post_norm"] + feed(h),
        "the feed-forward half is missing, or reads something else than the sum of x and attention's answer": h,
        "attention's answer is never added to x": x + feed(attended),
    }
    wrong = diagnose(record.get("out"), h + feed(h), slips, "the result")
    if not wrong and item == "input untouched":
        wrong = untouched(case, record, "x")
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
        verdicts.append(diagnose(record.get(key), wanted, slips[key], f"what attend got as {name}"))
    if case["items"] == ["grouped heads"]:
        return {"grouped heads": next(filter(None, verdicts), "")}
    return dict(zip(names.values(), verdicts, strict=True))
