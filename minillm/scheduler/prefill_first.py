"""Prompts before decodes: no step mixes the two, and while a prompt can be computed nobody decodes.

The first token comes as early as it can, and whoever is already reading waits through every prompt that
arrives: the longest gap between two tokens has no bound. Built in lesson 12 as the counterpart of
`chunked`; vLLM's first scheduler worked in this way (Kwon et al. 2023).
"""

from __future__ import annotations

from minillm.scheduler.base import Scheduler
from minillm.scheduler.step import Step


class PrefillFirstScheduler(Scheduler):
    """A step of prompts if there is one to compute, else a step of decodes."""

    def plan(self, step: Step) -> None:
        budget = self.continue_prompts(step, self.max_num_batched_tokens)
        self.admit_in_order(step, budget)
        self.align(step)
        if not step.scheduled:
            self.decode(step, self.max_num_batched_tokens)
