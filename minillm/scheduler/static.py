"""Request-level batches: a batch is formed, computed to its last token, and only then comes the next.

What serving looked like before requests could join a running batch: whoever has finished leaves an empty
row, and whoever arrives waits for the longest answer in front of it. With `pad_batches` the rows are
really computed, as in an engine whose batch is a rectangle. Built in lesson 12 as the foot of the ladder.
"""

from __future__ import annotations

from itertools import islice

from minillm.scheduler.base import Scheduler
from minillm.scheduler.rectangle import admit_side_by_side
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
        next_ones = list(islice(self.waiting, self.max_num_seqs))
        admit_side_by_side(self, next_ones, step, self.max_num_batched_tokens, self.pad_batches)
        self.batch_size = self.num_running_seqs
