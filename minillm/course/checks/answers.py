"""What judges of counted numbers share: answers as plain data, numbers in them, and rules over several calls.

A rule goes over pairs of (call, answer) and yields a sentence for each thing that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from numbers import Real

import torch

from minillm.course.grader.task import MISSING, Case, Record, Verdicts

Rule = Callable[[list[tuple[Case, dict]]], Iterator[str]]


def number(answer: object, key: str) -> float | None:
    """A finite number under this key of a learner's answer, or None."""
    value = answer.get(key) if isinstance(answer, dict) else None
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if right else None


def plain(answer: object) -> object:
    """A learner's answer as plain data: numbers of other libraries as Python's own."""
    if isinstance(answer, dict):
        return {str(key): plain(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [plain(value) for value in answer]
    if isinstance(answer, torch.Tensor) and answer.numel() == 1:
        answer = answer.item()
    if isinstance(answer, Real) and not isinstance(answer, bool | int | float):
        answer = float(answer)
    return answer


def judge_by_rule(case: Case, record: Record, keys: Iterable[str], rules: dict[str, Rule]) -> Verdicts:
    """The first sentence of the rule of the case's one item. Each answer must be a dict of numbers under `keys`."""
    (item,) = case["items"]
    answers = record.get("answers")
    if not isinstance(answers, list) or len(answers) != len(case["calls"]):
        return {item: "the function did not answer every call"}
    for answer in answers:
        if answer is None:
            return {item: f"the answer {MISSING}"}
        for key in keys:
            if number(answer, key) is None:
                return {item: f"the answer has no number under {key!r}; wanted is a dict of {', '.join(keys)}"}
    pairs = list(zip(case["calls"], answers, strict=True))
    return {item: next(rules[item](pairs), "")}


def ratio_rule(keys: str, wanted: Callable[[Case, Case], float], sentence: str) -> Rule:
    """The first answer over the second has to be `wanted(first call, second call)` under each of `keys`."""

    def rule(pairs):
        (call, answer), (other, reference) = pairs
        ratio = wanted(call, other)
        for name in keys.split():
            got = answer[name] / reference[name] if reference[name] else math.nan
            if got != ratio:
                yield f"{name} changes by a factor of {got:g} where {ratio:g} is right: {sentence}"

    return rule
