"""Scheduling per step: a request joins and leaves between any two steps, its prompt computed in one piece.

Nobody waits for the longest answer of a batch any more. A long prompt still makes everyone in its step
wait until all of it is computed, which is what chunks are for. Built in lesson 12, after Orca (Yu et al.
2022).
"""

from __future__ import annotations

from minillm.scheduler.base import Scheduler
from minillm.scheduler.step import Step


class IterationScheduler(Scheduler):
    """Decodes and whole prompts side by side, in order of arrival."""

    whole_prompts = True

    def plan(self, step: Step) -> None:
        budget = self.decode(step, self.max_num_batched_tokens)
        self.admit_in_order(step, budget)
