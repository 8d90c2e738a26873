"""What an exercise's check is made of: a task is three functions and the names of its items.

    cases(seed)          the parent process makes inputs, after the learner's cells have run
    drive(obj, case)     the child process calls the learner's object and records what came out
    judge(case, record)  the parent process compares with an oracle of its own and decides, item by item

So learner code and the decision about it never share a process. This file knows neither processes nor notebooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Case = dict  # plain data: tensors, numbers, strings, None, lists, dicts with string keys; "items" names what it decides
Record = dict  # plain data likewise
Verdicts = dict[str, str]  # item -> "" when right, else one sentence of diagnosis


@dataclass(frozen=True)
class Task:
    """One graded task.

    id      "ex02.2": exercise and number
    name    what the learner defines: a function or a class of this name
    title   a few words for reports
    points  marks for all items together; a part of the items earns the same part of the points
    items   names of everything that is judged, in the order of the report
    cases   seed -> list of cases; case["items"] names the items that the case decides
    drive   (object, case) -> record; the only code that calls the learner's object
    judge   (case, record) -> {item: diagnosis or ""}; an item of several cases must be right in each of them
    hides   dotted names of the reference's modules and functions, which raise when learner code reaches for them
    """

    id: str
    name: str
    title: str
    points: int
    items: tuple[str, ...]
    cases: Callable[[int], list[Case]]
    drive: Callable[[object, Case], Record]
    judge: Callable[[Case, Record], Verdicts]
    hides: tuple[str, ...] = ()


MISSING = "is None: is a `return` missing?"


def difference(got: object, wanted: torch.Tensor, tolerance: float = 1e-4, name: str = "the result") -> str:
    """Why `got` is not `wanted`, as a sentence, or "" when it is: type, shape, NaN, then the largest difference.

    tolerance  of |got - wanted|, relative to 1 + |wanted|; integers and booleans must be equal
    """
    if got is None:
        return f"{name} {MISSING}"
    if not isinstance(got, torch.Tensor):
        return f"{name} is {type(got).__name__}, not a tensor"
    if got.shape != wanted.shape:
        return f"{name} has shape {list(got.shape)}, expected {list(wanted.shape)}"
    if not wanted.dtype.is_floating_point:
        wrong = int((got.to(torch.float64) != wanted.to(torch.float64)).sum())
        return f"{name} differs at {wrong} of {wanted.numel()} places" if wrong else ""
    got, wanted = got.double(), wanted.double()
    if not torch.isfinite(got).eq(torch.isfinite(wanted)).all():
        more = (torch.isfinite(wanted) & ~torch.isfinite(got)).any()
        return f"{name} holds NaN or infinity" if more else f"{name} is finite where infinity belongs"
    finite = torch.isfinite(wanted)
    error = ((got - wanted).abs() / (1 + wanted.abs()))[finite]
    if error.numel() and error.max() > tolerance:
        return f"{name} is off by up to {(got - wanted).abs()[finite].max():.3g}"
    return "" if torch.equal(got[~finite], wanted[~finite]) else f"{name} has infinities of the wrong sign"


def diagnose(
    got: object, wanted: torch.Tensor, slips: dict[str, torch.Tensor], name: str = "the result", tolerance: float = 1e-4
) -> str:
    """ "" when `got` is right, else the sentence of the slip that gives just these numbers, else the difference.

    slips  sentence -> what the result would be, of the shape of `wanted`, NaN where the slip yields NaN
    """
    wrong = difference(got, wanted, tolerance, name)
    if wrong and isinstance(got, torch.Tensor) and got.shape == wanted.shape:
        for sentence, values in slips.items():
            if torch.allclose(got.double(), values.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
                return sentence
    return wrong


def untouched(case: Case, record: Record, *names: str) -> str:
    """ "" when the record holds these inputs as the case has them, else that a learner's function changed one."""
    for name in names:
        if difference(record.get(name), case[name], 1e-6, name):
            return f"{name} itself was changed, and others still need it: work on a new tensor"
    return ""
