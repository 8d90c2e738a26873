"""Request-level batches: a batch is formed, computed to its last token, and only then comes the next.

What serving looked like before requests could join a running batch: whoever has finished leaves an empty
row, and whoever arrives waits for the longest answer in front of it. With `pad_batches` the rows are
really computed, as in an engine whose batch is a rectangle. Built in lesson 12 as the foot of the ladder.
"""

from __future__ import annotations

from minillm.scheduler.base import Scheduler
from minillm.scheduler.rectangle import fits, padding
from minillm.scheduler.step import Step


class StaticScheduler(Scheduler):
    """One batch after another, each as large as seats, blocks and budget allow."""

    whole_prompts = True

    def __init__(self, config, block_pool, max_model_len):
        super().__init__(config, block_pool, max_model_len)
        self.pad_batches = config.pad_batches
        self.batch_size = 0  # sequences of the running batch, those included that have ended

    def plan(self, step: Step) -> None:
        if self.running:
            self.decode(step, self.max_num_batched_tokens)
            if self.pad_batches and step.scheduled:
                step.padding = [1] * (self.batch_size - len(step.scheduled))
            return
        budget = self.max_num_batched_tokens
        while self.waiting and (not self.pad_batches or fits(step, self.waiting[0], self.max_num_batched_tokens)):
            n = self.admit(self.waiting[0], budget, step)
            if n == 0:
                break
            budget -= n
        self.batch_size = self.num_running_seqs
        if self.pad_batches:
            step.padding = padding(n for _, n in step.scheduled)
