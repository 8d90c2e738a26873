"""Second strategy of the article: short prompts overtake the long ones, which advance in chunks.

A prompt of 20 tokens need not wait for one of 20,000. A long prompt (more than
`long_prefill_token_threshold` uncomputed tokens) gets a chunk in every step, at most
`max_long_partial_prefills` of them at once, and the rest of the budget belongs to the short ones. How long a
long prompt may be kept out is bounded. Built in lesson 13; the option names are vLLM's.
"""

from __future__ import annotations

from minillm.request import Request
from minillm.scheduler.base import Scheduler
from minillm.scheduler.step import Step

MAX_OVERTAKEN_STEPS = 64
DEFAULT_SHARE = 4  # a prompt is long when it would take more than a quarter of the budget


class InterleavedScheduler(Scheduler):
    """Decodes, then a chunk of each long prompt in progress, then short prompts in order of arrival.

    Long prompts get at most half of what the decodes leave, so a short one always finds budget. The first
    long prompt in the queue may be overtaken in `max_overtaken_steps` steps in which it had no room but a
    short one did; from then on nobody passes it until it has started.
    """

    def __init__(self, config, block_pool, max_model_len):
        super().__init__(config, block_pool, max_model_len)
        self.threshold = self.chunk_limit = config.chunk_limit or max(1, self.max_num_batched_tokens // DEFAULT_SHARE)
        self.max_long = config.max_long_partial_prefills or 1
        self.max_overtaken = config.max_overtaken_steps or MAX_OVERTAKEN_STEPS
        self._overtaken: tuple[Request | None, int] = (None, 0)  # the first long request in the queue, and its steps

    def plan(self, step: Step) -> None:
        budget = self.decode(step, self.max_num_batched_tokens)
        long_share = (budget + 1) // 2

        # prompts in progress: the long ones within their share, then the short ones
        partial = [r for r in self.running if r.num_uncomputed_tokens > 1]
        long = [r for r in partial if self._is_long(r)]
        for request in long:
            n = self.chunk_size(request.num_uncomputed_tokens, long_share)
            if n:
                step.scheduled.append((request, n))
                long_share, budget = long_share - n, budget - n
        for request in partial:
            n = 0 if self._is_long(request) else self.chunk_size(request.num_uncomputed_tokens, budget)
            if n:
                step.scheduled.append((request, n))
                budget -= n

        if not step.preempted:
            self._admit(step, budget, long_share, self.max_long - len(long))
        self.align(step)

    def _admit(self, step: Step, budget: int, long_share: int, long_seats: int) -> None:
        """Requests in order of arrival; long ones that have to wait are passed."""
        kept_out = None  # the first long request that had a seat among the long ones and no room
        passed = False
        for request in list(self.waiting):
            if budget == 0:
                break
            is_long = self._is_long(request)
            if is_long and (long_seats == 0 or long_share == 0 or kept_out):
                continue
            n = self.admit(request, min(budget, long_share) if is_long else budget, step)
            if n:
                budget -= n
                passed = passed or kept_out is not None
                if is_long:
                    long_share, long_seats = long_share - n, long_seats - 1
            elif is_long and self._may_be_passed(request):
                kept_out = request
            else:
                break
        self._count(kept_out if passed else None)

    def _is_long(self, request: Request) -> bool:
        return request.num_uncomputed_tokens > self.threshold

    def _may_be_passed(self, request: Request) -> bool:
        first, steps = self._overtaken
        return request is not first or steps < self.max_overtaken

    def _count(self, overtaken: Request | None) -> None:
        if overtaken is not None:
            first, steps = self._overtaken
            self._overtaken = (overtaken, steps + 1 if overtaken is first else 1)
