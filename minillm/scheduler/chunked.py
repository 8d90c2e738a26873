"""The default policy: decodes first, then as much prefill as the token budget still holds.

A long prompt is computed in chunks, so a step never lasts longer than its budget and no running
request waits longer than one step for its next token. Built in lesson 12, after Sarathi-Serve (Agrawal
et al. 2024, arXiv 2403.02310) and Orca (Yu et al. 2022).
"""

from __future__ import annotations

from minillm.request import Request, Status
from minillm.scheduler.base import Scheduler, Step


class ChunkedScheduler(Scheduler):
    """Running before waiting, oldest first; whoever stands at the head of the queue is never overtaken."""

    def plan(self, step: Step) -> None:
        budget = self.max_num_batched_tokens

        # decodes: one token each, in arrival order; the only requests that need new blocks. Room for
        # them is made at the end of `running`, so the loop never loses its place
        prefills: list[Request] = []
        for request in self.running:
            if len(request.token_ids) - request.num_computed_tokens != 1:
                prefills.append(request)
            elif self.make_room(request, step):
                step.scheduled.append((request, 1))
                budget -= 1

        # unfinished prompts: the next chunk
        for request in prefills:
            n = self.chunk_size(request.num_uncomputed_tokens, budget)
            if n and request.status is Status.RUNNING:  # not preempted by a decode of this step
                step.scheduled.append((request, n))
                budget -= n

        # new requests, first come first served
        while budget and self.waiting and not step.preempted:
            n = self.admit(self.waiting[0], budget, step)
            if n == 0:
                break
            budget -= n
