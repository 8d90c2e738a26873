"""The rows that a rectangular batch wastes: every prompt is filled up to the longest one beside it.

A ragged engine has no use for this. It is here so that the waste can be computed, counted and timed, by
the two policies that know `pad_batches`. Built in lesson 13.
"""

from __future__ import annotations

from collections.abc import Iterable

from minillm.request import Request
from minillm.scheduler.step import Step


def padding(lengths: Iterable[int]) -> list[int]:
    """Rows that each of these sequences lacks to the longest: [3, 8, 8] -> [5]."""
    lengths = list(lengths)
    longest = max(lengths, default=0)
    return [longest - n for n in lengths if n < longest]


def fits(step: Step, request: Request, budget: int, num_decodes: int = 0) -> bool:
    """Would the rectangle of the step's prompts and this one still be within the budget beside the decodes?

    The first `num_decodes` entries of the step are not part of the rectangle.
    """
    lengths = [r.num_tokens for r, _ in step.scheduled[num_decodes:]] + [request.num_tokens]
    return max(lengths) * len(lengths) <= budget - num_decodes
