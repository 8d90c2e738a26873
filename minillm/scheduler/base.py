"""What every scheduling policy is made of: chunks, admission, room for the next token, and the moves of a step.

A request has no phase: it has tokens, and some of them are computed. A policy decides in `plan` who closes how much
of that gap in this step, mostly by calling the moves below; `books.py` keeps queue, block tables and counts true while
it does. Never touches tensors or clocks. Built in lesson 12, after Orca (Yu et al. 2022) for scheduling per step.
"""

from __future__ import annotations

from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.request import Request
from minillm.scheduler.align import trim_to_multiple
from minillm.scheduler.books import Books
from minillm.scheduler.step import Step


class Scheduler(Books):
    """Base class of all policies. A policy implements `plan(step)`, calling the methods below it.

    whole_prompts  True for policies that compute a prompt in one step or not yet, whatever the options say

    One step is `schedule`, then the forward pass, then `commit`, then `fork` and new tokens (appended to
    `request.token_ids` by the engine), then `finish` for whoever is done. If the pass fails, `finish(request,
    "error")` for every request in it takes the place of all that follows.
    """

    whole_prompts = False

    def __init__(self, config: EngineConfig, block_pool: BlockPool, max_model_len: int):
        super().__init__(config, block_pool, max_model_len)
        self.check_budget(config, max_model_len)
        self.enable_chunked_prefill = self.cuts_prompts(config)
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.chunk_limit = config.chunk_limit
        self.align_prefill_tokens = config.align_prefill_tokens

    @classmethod
    def cuts_prompts(cls, config: EngineConfig) -> bool:
        """Is a prompt computed in chunks, or else in one step?"""
        return config.enable_chunked_prefill and not cls.whole_prompts

    @classmethod
    def check_budget(cls, config: EngineConfig, max_model_len: int) -> None:
        """Raises ConfigError when a prompt must fit into one step and might not; the constructor asks it, too."""
        if cls.cuts_prompts(config) or config.max_num_batched_tokens >= max_model_len:
            return
        why = f"scheduling_policy={config.scheduling_policy!r}" if cls.whole_prompts else "enable_chunked_prefill=False"
        raise ConfigError(
            f"{why} needs max_num_batched_tokens={config.max_num_batched_tokens} to be at least "
            f"max_model_len={max_model_len}, because a prompt must fit into one step; raise the first, lower the "
            f"second, or allow chunks"
        )

    def schedule(self, now: float) -> Step:
        """Decide the next step. Every request in it owns blocks for all tokens that it computes."""
        step = Step(time=now)
        self.plan(step)
        return step

    def plan(self, step: Step) -> None:
        """Fill `step.scheduled` with (request, n): the next n uncomputed tokens of a request."""
        raise NotImplementedError

    # ---- what a policy calls -----------------------------------------------------------------

    def chunk_size(self, num_uncomputed: int, budget: int) -> int:
        """How many of a request's uncomputed tokens may run in a step with this much budget left."""
        if not self.enable_chunked_prefill:
            return num_uncomputed if num_uncomputed <= budget else 0
        return min(num_uncomputed, budget, self.chunk_limit or num_uncomputed)

    def admit(self, request: Request, budget: int, step: Step) -> int:
        """Move a waiting request to running and schedule its first tokens. Returns their number, 0: not now.

        It gets the blocks of its whole sequence at once (prompt, and what it had generated before a
        preemption), so no half-computed prompt can be stopped by another one for want of blocks.
        """
        pool = self.block_pool
        if self.num_running_seqs + 1 + request.num_pending_forks > self.max_num_seqs:
            return 0
        cached, prefix_key = pool.lookup(request.token_ids)
        num_cached_tokens = len(cached) * pool.block_size
        n = self.chunk_size(request.num_tokens - num_cached_tokens, budget)
        num_new = pool.blocks_for(request.num_tokens) - len(cached)
        num_revived = sum(pool.ref_count(block) == 0 for block in cached)  # hits that count as free until taken
        if n == 0 or num_new + num_revived > pool.num_free:
            return 0

        self.enter(request, cached, prefix_key, num_new, step.time)
        step.scheduled.append((request, n))
        return n

    def make_room(self, request: Request, step: Step) -> bool:
        """Give a running request a block of its own to write its next token to, at the newest one's expense.

        False: the request was itself the newest and had to go. The oldest request never goes while another
        one holds blocks, so in every step somebody advances.
        """
        while not self._grow(request, step):
            newest = self.running[-1]
            self.preempt(newest, step)
            if newest is request:
                return False
        return True

    # ---- the moves of which most policies are made; each returns the budget that is left --------

    def decode(self, step: Step, budget: int) -> int:
        """One token for every running request whose prompt is computed: the only ones that need new blocks.

        Room for them is made at the end of `running`, so the loop never loses its place.
        """
        for request in self.running:
            if len(request.token_ids) - request.num_computed_tokens == 1 and self.make_room(request, step):
                step.scheduled.append((request, 1))
                budget -= 1
        return budget

    def continue_prompts(self, step: Step, budget: int) -> int:
        """The next chunk of every prompt that is partly computed, oldest first. Call it before `admit`."""
        for request in self.running:
            num_uncomputed = len(request.token_ids) - request.num_computed_tokens
            n = self.chunk_size(num_uncomputed, budget) if num_uncomputed > 1 else 0
            if n:
                step.scheduled.append((request, n))
                budget -= n
        return budget

    def admit_in_order(self, step: Step, budget: int) -> int:
        """New requests, first come first served; none in a step that had to preempt."""
        while budget and self.waiting and not step.preempted:
            n = self.admit(self.waiting[0], budget, step)
            if n == 0:
                break
            budget -= n
        return budget

    def align(self, step: Step) -> None:
        """Shorten chunks of the step so that its tokens fill whole tiles, if the options ask for it. The last move."""
        if self.align_prefill_tokens:
            trim_to_multiple(step, self.align_prefill_tokens)
