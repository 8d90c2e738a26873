"""The default policy: decodes first, then as much prefill as the token budget still holds.

A long prompt is computed in chunks, so a step never lasts longer than its budget and no running
request waits longer than one step for its next token. Built in lesson 12, after Sarathi-Serve (Agrawal
et al. 2024, arXiv 2403.02310) and Orca (Yu et al. 2022).
"""

from __future__ import annotations

from minillm.scheduler.base import Scheduler
from minillm.scheduler.step import Step


class ChunkedScheduler(Scheduler):
    """Running before waiting, oldest first; whoever stands at the head of the queue is never overtaken."""

    def plan(self, step: Step) -> None:
        budget = self.decode(step, self.max_num_batched_tokens)
        budget = self.continue_prompts(step, budget)
        self.admit_in_order(step, budget)
        self.align(step)
