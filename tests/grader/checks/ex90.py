"""The exercise that the grader is tried on: a function, a class, and a part that the engine has, too."""

from __future__ import annotations

import random

import torch

from minillm.course.grader.task import Case, Record, Task, Verdicts, difference

# ---- a function on tensors


def mask_cases(seed: int) -> list[Case]:
    draw = random.Random(seed)
    n = draw.randint(3, 9)
    return [
        {"items": ["square"], "queries": n, "keys": n},
        {"items": ["fewer queries"], "queries": 2, "keys": draw.randint(4, 9)},
        {"items": ["one query"], "queries": 1, "keys": draw.randint(3, 9)},
    ]


def mask_drive(causal_mask, case: Case) -> Record:
    return {"mask": causal_mask(case["queries"], case["keys"])}


def mask_judge(case: Case, record: Record) -> Verdicts:
    queries, keys = case["queries"], case["keys"]
    rows = [[key <= keys - queries + query for key in range(keys)] for query in range(queries)]
    return dict.fromkeys(case["items"], difference(record.get("mask"), torch.tensor(rows), name="the mask"))


# ---- a class with a state


def counter_cases(seed: int) -> list[Case]:
    draw = random.Random(seed)
    words = [draw.choice("abc") for _ in range(draw.randint(6, 12))]
    return [{"items": ["counts", "unseen word"], "words": words}]


def counter_drive(counter_class, case: Case) -> Record:
    counter = counter_class()
    for word in case["words"]:
        counter.add(word)
    return {"counts": [counter.count(word) for word in "abc"], "unseen": counter.count("z")}


def counter_judge(case: Case, record: Record) -> Verdicts:
    wanted = {"counts": [case["words"].count(word) for word in "abc"], "unseen": 0}
    wrong = {
        key: "" if record.get(key) == value else f"{key}: {record.get(key)}, not {value}"
        for key, value in wanted.items()
    }
    return {"counts": wrong["counts"], "unseen word": wrong["unseen"]}


# ---- a part that the engine has, too


def merge_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"even halves": (4, 4), "uneven parts": (1, 7), "one query": (3, 5)}
    return [
        {
            "items": [item],
            "parts": [[torch.randn(size, 1, 8, generator=g) for _ in "kv"] for size in sizes],
            "q": torch.randn(1 if item == "one query" else 3, 1, 8, generator=g),
        }
        for item, sizes in shapes.items()
    ]


def merge_drive(merge_two, case: Case) -> Record:
    """The parts come from the engine's plain attention over keys that every query sees."""
    from minillm.attention.naive import attention

    rows = [[attention(q[None], k, v) for q in case["q"]] for k, v in case["parts"]]
    (a, b) = [(torch.cat([out for out, _ in part]), torch.cat([lse for _, lse in part])) for part in rows]
    return {"out": merge_two(a[0], a[1], b[0], b[1])}


def merge_judge(case: Case, record: Record) -> Verdicts:
    k, v = (torch.cat([part[i] for part in case["parts"]]).double()[:, 0] for i in (0, 1))
    wanted = torch.softmax(case["q"].double()[:, 0] @ k.T / 8**0.5, -1) @ v
    return dict.fromkeys(case["items"], difference(record.get("out"), wanted[:, None].float()))


TASKS = (
    Task(
        "ex90.1",
        "causal_mask",
        "causal mask",
        6,
        ("square", "fewer queries", "one query"),
        mask_cases,
        mask_drive,
        mask_judge,
        hides=("minillm.attention.mask.visible_keys",),
    ),
    Task("ex90.2", "Counter", "counter", 2, ("counts", "unseen word"), counter_cases, counter_drive, counter_judge),
    Task(
        "ex90.3",
        "merge_two",
        "merge",
        6,
        ("even halves", "uneven parts", "one query"),
        merge_cases,
        merge_drive,
        merge_judge,
        hides=("minillm.attention.merge",),
    ),
)
