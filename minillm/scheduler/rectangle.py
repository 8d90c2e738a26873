"""Whole prompts admitted side by side, and the rows that a rectangle of them wastes.

In a rectangular batch every prompt is filled up to the longest one beside it. A ragged engine has no use for that;
it is here so that the waste can be computed, counted and timed, by the policies that know `pad_batches`.
Built in lesson 13.
"""

from __future__ import annotations

from collections.abc import Iterable

from minillm.request import Request
from minillm.scheduler.base import Scheduler
from minillm.scheduler.step import Step


def admit_side_by_side(scheduler: Scheduler, requests: Iterable[Request], step: Step, budget: int, pad: bool) -> None:
    """Admit these in their order until one does not fit; with `pad`, as a rectangle within the budget."""
    first = len(step.scheduled)
    longest = 0
    for count, request in enumerate(requests, start=1):
        longest = max(longest, request.num_tokens)
        if pad and count * longest > budget:
            break
        n = scheduler.admit(request, budget if pad else budget - _tokens(step, first), step)
        if n == 0:
            break
    if pad:
        step.padding = padding(n for _, n in step.scheduled[first:])


def padding(lengths: Iterable[int]) -> list[int]:
    """Rows that each of these sequences lacks to the longest: [3, 8, 8] -> [5]."""
    lengths = list(lengths)
    longest = max(lengths, default=0)
    return [longest - n for n in lengths if n < longest]


def _tokens(step: Step, first: int) -> int:
    return sum(n for _, n in step.scheduled[first:])
