"""The exercise that kernel tasks are tried on: a softmax over rows with a masked tail, and a product of two tiles."""

from __future__ import annotations

import random

import torch

from minillm.course.grader.kernel_task import KernelTask
from minillm.course.grader.task import Case, Record, Verdicts, difference


def softmax_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    ragged = random.Random(seed).choice([5, 13, 31])
    return [
        {"items": ["full rows"], "x": torch.randn(3, 32, generator=g), "step": 1},
        {"items": ["tail"], "x": torch.randn(4, ragged, generator=g) - 3, "step": 1},
        {"items": ["strided rows"], "x": torch.randn(2, 32, generator=g), "step": 2},
    ]


def softmax_drive(softmax, case: Case) -> Record:
    rows, columns = case["x"].shape
    x = torch.full((rows * case["step"], columns), float("nan"), dtype=case["x"].dtype)[:: case["step"]]
    x.copy_(case["x"])
    return {"y": softmax(x)}


def softmax_judge(case: Case, record: Record) -> Verdicts:
    return dict.fromkeys(case["items"], difference(record.get("y"), case["x"].double().softmax(-1).float()))


def softmax_compiled() -> list[Case]:
    return [{"items": ["compiles"], "matrix": False, "x": torch.zeros(2, 1000, dtype=torch.float16), "step": 1}]


def product_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    return [{"items": ["product"], "a": torch.randn(32, 16, generator=g), "b": torch.randn(16, 32, generator=g)}]


def product_drive(multiply, case: Case) -> Record:
    return {"c": multiply(case["a"], case["b"])}


def product_judge(case: Case, record: Record) -> Verdicts:
    wanted = (case["a"].double() @ case["b"].double()).float()
    return dict.fromkeys(case["items"], difference(record.get("c"), wanted))


def product_compiled() -> list[Case]:
    a, b = torch.zeros(2, 32, 32, dtype=torch.float16)
    return [{"items": ["compiles"], "matrix": True, "a": a, "b": b}]


TASKS = (
    KernelTask(
        "ex91.1",
        "softmax",
        "row softmax",
        8,
        ("full rows", "tail", "strided rows", "compiles"),
        softmax_cases,
        softmax_drive,
        softmax_judge,
        hides=("torch.softmax",),
        compile_cases=softmax_compiled,
    ),
    KernelTask(
        "ex91.2",
        "multiply",
        "tile product",
        4,
        ("product", "compiles"),
        product_cases,
        product_drive,
        product_judge,
        compile_cases=product_compiled,
    ),
)
