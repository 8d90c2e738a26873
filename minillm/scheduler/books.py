"""The books of a scheduler: who waits, who runs, which blocks are whose, how many tokens are computed.

Whatever a policy decides, queue, block tables and counts stay true here: a request enters, owns blocks, gives them
back when it is preempted or has ended, and has siblings once its prompt is computed. Nothing here decides who is next;
that is `base.py` and the policies. Never touches tensors or clocks. Built in lesson 12, after vLLM (Kwon et al.
2023) for preemption by recomputation.
"""

from __future__ import annotations

from collections import deque

from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.errors import PromptError, QueueFullError
from minillm.request import Request, Status
from minillm.scheduler.step import Step


class Books:
    """What is known of every request that has not ended.

    waiting  deque, the next to be admitted first: smaller `priority` before larger, then order of arrival;
             a preempted request returns to the front of its priority
    running  list in order of priority, then of admission; these requests own blocks, the last one gives way
    """

    def __init__(self, config: EngineConfig, block_pool: BlockPool, max_model_len: int):
        self.block_pool = block_pool
        self.max_model_len = max_model_len
        self.max_num_seqs = config.num_seats
        self.max_queued_requests = config.max_queued_requests
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
        check_completions(request.params.n, self.max_num_seqs)

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

    # ---- what a policy makes happen ----------------------------------------------------------

    def enter(self, request: Request, cached: list[int], prefix_key: tuple[int, int], num_new: int, now: float) -> None:
        """Move a waiting request to running: it owns these cached blocks and `num_new` fresh ones from now on."""
        pool = self.block_pool
        pool.take(cached)
        request.block_table = cached + pool.allocate(num_new)
        request.num_computed_tokens = len(cached) * pool.block_size
        request.num_published_blocks, request.prefix_key = len(cached), prefix_key
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.num_computed_tokens
        request.status = Status.RUNNING
        self.waiting.remove(request)
        self.running.append(request)
        if len(self.running) > 1 and self.running[-2].priority > request.priority:
            self.running.sort(key=_priority)

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


def check_completions(n: int, num_seats: int) -> None:
    """Raises PromptError when the completions of one prompt, which run together, are more than may run at once."""
    if n > num_seats:
        raise PromptError(
            f"n={n} completions are more than can run at once, {num_seats} (the smaller of max_num_seqs and "
            f"max_num_batched_tokens); ask for fewer or raise those"
        )


def _priority(request: Request) -> int:
    return request.priority
