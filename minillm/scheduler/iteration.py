"""Scheduling per step: a request joins and leaves between any two steps, its prompt computed in one piece.

Nobody waits for the longest answer of a batch any more. A long prompt still makes everyone in its step
wait until all of it is computed, which is what chunks are for. Built in lesson 12, after Orca (Yu et al.
2022). With `pad_batches` the prompts of a step are a rectangle, as the baseline of `similar_length`.
"""

from __future__ import annotations

from itertools import islice

from minillm.scheduler.base import Scheduler
from minillm.scheduler.rectangle import admit_side_by_side
from minillm.scheduler.step import Step


class IterationScheduler(Scheduler):
    """Decodes and whole prompts side by side, in order of arrival."""

    whole_prompts = True

    def __init__(self, config, block_pool, max_model_len):
        super().__init__(config, block_pool, max_model_len)
        self.pad_batches = config.pad_batches

    def plan(self, step: Step) -> None:
        budget = self.decode(step, self.max_num_batched_tokens)
        if not step.preempted:
            next_ones = list(islice(self.waiting, self.max_num_seqs))
            admit_side_by_side(self, next_ones, step, budget, self.pad_batches)
