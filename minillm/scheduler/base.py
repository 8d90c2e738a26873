"""The books that every scheduling policy shares: queue, admission, growth, preemption, forks, the end.

A request has no phase: it has tokens, and some of them are computed. A policy decides in `plan` who
closes how much of that gap in this step; everything here keeps queue, block tables and counts true
while it does. Never touches tensors or clocks. Built in lesson 12, after Orca (Yu et al. 2022) for
scheduling per step and vLLM (Kwon et al. 2023) for preemption by recomputation.
"""

from __future__ import annotations

from collections import deque

from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.errors import ConfigError, PromptError, QueueFullError
from minillm.request import Request, Status
from minillm.scheduler.step import Step


class Scheduler:
    """Base class of all policies. A policy implements `plan(step)`, calling the methods below it.

    waiting        deque, the next to be admitted first: smaller `priority` before larger, then order of arrival;
                   a preempted request returns to the front of its priority
    running        list in order of priority, then of admission; these requests own blocks, the last one gives way
    whole_prompts  True for policies that compute a prompt in one step or not yet, whatever the options say

    One step is `schedule`, then the forward pass, then `commit`, then `fork` and new tokens (appended to
    `request.token_ids` by the engine), then `finish` for whoever is done. If the pass fails, `finish(request,
    "error")` for every request in it takes the place of all that follows.
    """

    whole_prompts = False

    def __init__(self, config: EngineConfig, block_pool: BlockPool, max_model_len: int):
        self.enable_chunked_prefill = config.enable_chunked_prefill and not self.whole_prompts
        if not self.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            why = (
                f"scheduling_policy={config.scheduling_policy!r}"
                if self.whole_prompts
                else "enable_chunked_prefill=False"
            )
            raise ConfigError(
                f"{why} needs max_num_batched_tokens={config.max_num_batched_tokens} to be at "
                f"least max_model_len={max_model_len}, because a prompt must fit into one step; raise the first, lower "
                f"the second, or allow chunks"
            )
        self.block_pool = block_pool
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = config.max_num_batched_tokens
        # every running sequence must get a token in every step, so there are never more of them than budget
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.max_queued_requests = config.max_queued_requests
        self.chunk_limit = config.chunk_limit
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_idle_work(self) -> bool:
        """Is there something worth a step while there is no other work? Such a step may be taken or left out."""
        return False

    @property
    def block_tables(self) -> list[list[int]]:
        """Every block table in use."""
        return [request.block_table for request in self.running]

    @property
    def num_running_seqs(self) -> int:
        """Running sequences, and the places kept for siblings that are not born yet."""
        return sum(1 + request.num_pending_forks for request in self.running)

    # ---- what the engine calls ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptError if it can never be served, QueueFullError if too many wait."""
        self.check(request)
        if request.num_tokens == self.max_model_len:
            raise PromptError(
                f"a prompt of {request.num_tokens} tokens leaves no room for a new one, because "
                f"max_model_len={self.max_model_len} counts both; shorten it"
            )
        if self.max_queued_requests is not None and len(self.waiting) >= self.max_queued_requests:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting and max_queued_requests={self.max_queued_requests}; "
                f"try again later"
            )
        request.num_pending_forks = request.params.n - 1
        self.waiting.append(request)
        if len(self.waiting) > 1 and self.waiting[-2].priority > request.priority:
            self.waiting = deque(sorted(self.waiting, key=_priority))  # stable: equal ones stay as they are

    def check(self, request: Request) -> None:
        """Raise PromptError if these tokens can never be computed, however long the request waits."""
        length, pool = request.num_tokens, self.block_pool
        if length == 0:
            raise PromptError("the prompt is empty; give at least one token")
        if length > self.max_model_len:
            raise PromptError(
                f"a prompt of {length} tokens is longer than max_model_len={self.max_model_len}; shorten it"
            )
        if pool.blocks_for(length) > pool.num_blocks:
            raise PromptError(
                f"a prompt of {length} tokens needs {pool.blocks_for(length)} KV blocks of {pool.block_size} tokens "
                f"and the cache has {pool.num_blocks}; shorten it or raise num_kv_blocks"
            )
        if request.params.n > self.max_num_seqs:
            raise PromptError(
                f"n={request.params.n} completions are more than can run at once, {self.max_num_seqs} (the smaller of "
                f"max_num_seqs and max_num_batched_tokens); ask for fewer or raise those"
            )

    def schedule(self, now: float) -> Step:
        """Decide the next step. Every request in it owns blocks for all tokens that it computes."""
        step = Step(time=now)
        self.plan(step)
        return step

    def commit(self, step: Step) -> None:
        """The step's K and V are in the cache: count them, and let other prompts find the full blocks."""
        block_size = self.block_pool.block_size
        for request, n in step.scheduled:
            if request.status is Status.RUNNING:
                request.num_computed_tokens += n
                if request.num_computed_tokens // block_size > request.num_published_blocks:
                    self.block_pool.publish(request)

    def fork(self, request: Request) -> list[Request]:
        """The n - 1 siblings of a request whose prompt was just computed, before it has a new token.

        A sibling starts with the prompt's tokens and shares all its blocks; the first write of each into
        the last, partly filled one is a copy-on-write. It runs directly behind its parent in the order of
        arrival. Its id is "{parent's id}-{index}", which names it in messages; group siblings by what
        this method returns, not by that text.
        """
        children = [self._child(request, index) for index in range(1, 1 + request.num_pending_forks)]
        request.num_pending_forks = 0
        place = self.running.index(request) + 1
        self.running[place:place] = children
        return children

    def finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """End a request, waiting or running, and return its blocks. A finished one stays as it is.

        finish_reason  "stop" | "length" | "abort" | "error". After an error its blocks are not to be
                       trusted, so they also leave the prefix cache.
        """
        if request.status is Status.FINISHED:
            return
        queue = self.running if request.status is Status.RUNNING else self.waiting
        if request in queue:
            queue.remove(request)
        if finish_reason == "error":
            self.block_pool.withdraw(request.block_table)
        self._release(request)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = finish_reason, stop_reason

    # ---- what a policy calls -----------------------------------------------------------------

    def plan(self, step: Step) -> None:
        """Fill `step.scheduled` with (request, n): the next n uncomputed tokens of a request."""
        raise NotImplementedError

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

        pool.take(cached)
        request.block_table = cached + pool.allocate(num_new)
        request.num_computed_tokens = num_cached_tokens
        request.num_published_blocks, request.prefix_key = len(cached), prefix_key
        if request.first_scheduled_time is None:
            request.first_scheduled_time = step.time
            request.num_cached_tokens = num_cached_tokens
        request.status = Status.RUNNING
        self.waiting.remove(request)
        self.running.append(request)
        if len(self.running) > 1 and self.running[-2].priority > request.priority:
            self.running.sort(key=_priority)
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

    def preempt(self, request: Request, step: Step) -> None:
        """Take a running request's blocks; it computes all its tokens again when it is its turn.

        A sequence that needs more blocks than the pool has would wait for ever: it ends here, complete but
        for the tokens that had no room.
        """
        if self.block_pool.blocks_for(request.num_tokens) > self.block_pool.num_blocks:
            self.finish(request, "length", "kv_cache_full")
            step.ended.append(request)
            return
        self.running.remove(request)
        self._release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        if len(self.waiting) > 1 and request.priority > self.waiting[1].priority:
            self.waiting = deque(sorted(self.waiting, key=_priority))
        step.preempted.append(request)

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

    # ---- helpers -----------------------------------------------------------------------------

    def _grow(self, request: Request, step: Step) -> bool:
        """See that the block of the next token exists and is not shared; False: no block is free for that."""
        pool, table = self.block_pool, request.block_table
        index = request.num_computed_tokens // pool.block_size
        if index < len(table) and pool.ref_count(table[index]) == 1:
            return True
        if pool.num_free == 0:
            return False
        if index < len(table):
            step.block_copies.append(pool.copy_on_write(table, index))
        else:
            table += pool.allocate(1)
        return True

    def _child(self, request: Request, index: int) -> Request:
        child = Request(
            request_id=f"{request.request_id}-{index}",
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            prompt=request.prompt,
            arrival_time=request.arrival_time,
            tokenize_s=request.tokenize_s,
            index=index,
            num_computed_tokens=request.num_computed_tokens,
            block_table=list(request.block_table),
            num_published_blocks=request.num_published_blocks,
            prefix_key=request.prefix_key,
            num_cached_tokens=request.num_cached_tokens,
            status=Status.RUNNING,
            first_scheduled_time=request.first_scheduled_time,
        )
        self.block_pool.take(child.block_table)
        return child

    def _release(self, request: Request) -> None:
        self.block_pool.free(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0


def _priority(request: Request) -> int:
    return request.priority
