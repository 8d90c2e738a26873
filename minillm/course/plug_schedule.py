"""A pure function as the engine's scheduler: it sees numbers, answers with a plan, and the books are kept for it.

    schedule(waiting, running, budget, free_blocks) -> [(id, n), ...]

waiting, running  lists of Candidates in order of arrival (a preempted request waits at the front)
budget            tokens that one step may compute
free_blocks       blocks that no request holds
(id, n)           compute the next n tokens of this request; (id, 0) takes a running request's blocks away

A plan that cannot be carried out is refused as a whole, before anything of it has happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from minillm.errors import GradeError
from minillm.request import Request, Status
from minillm.scheduler.base import Scheduler, Step


class Candidate(NamedTuple):
    """What a schedule function sees of a request."""

    id: str
    num_tokens: int  # prompt and generated
    num_computed: int  # of these: K and V are in the cache
    blocks_needed: int  # free blocks that it takes when it is scheduled now
    blocks_held: int  # blocks that become free when it is preempted

    @property
    def num_uncomputed(self) -> int:
        """1: the next step is a decode; more: there is prefill to do."""
        return self.num_tokens - self.num_computed


class PluggedScheduler(Scheduler):
    """A policy whose `plan` asks `schedule`, checks the answer and carries it out."""

    def __init__(self, schedule: Callable, config, block_pool, max_model_len: int):
        super().__init__(config, block_pool, max_model_len)
        self._schedule = schedule

    def plan(self, step: Step) -> None:
        waiting, running = list(self._startable()), list(self.running)
        if not waiting and not running:
            return
        seen = [self._seen(request) for request in waiting], [self._seen(request) for request in running]
        answer = self._schedule(*seen, self.max_num_batched_tokens, self.block_pool.num_free)
        plan = self._checked(answer, dict(zip(map(_id, waiting + running), waiting + running, strict=True)), seen)

        for request, n in plan:
            if n == 0:
                self.preempt(request, step)
        for request, n in plan:
            if n and request.status is Status.RUNNING:
                # prompt blocks came with the admission, so only a decode can need one more
                if request.num_uncomputed_tokens == 1:
                    self._grow(request, step)
                step.scheduled.append((request, n))
            elif n and not self.admit(request, n, step):
                raise GradeError(
                    f"schedule starts {_id(request)!r} with {n} tokens, but this engine wants whole prompts"
                )

    def _startable(self):
        """The waiting requests for which there is a place; each of `n` completions takes one."""
        places = self.max_num_seqs - self.num_running_seqs
        for request in self.waiting:
            places -= 1 + request.num_pending_forks
            if places < 0:
                return
            yield request

    def _seen(self, request: Request) -> Candidate:
        pool = self.block_pool
        if request.status is Status.RUNNING:
            table, index = request.block_table, request.num_computed_tokens // pool.block_size
            decodes = request.num_uncomputed_tokens == 1
            needed = int(decodes and not (index < len(table) and pool.ref_count(table[index]) == 1))
            held = sum(pool.ref_count(block) == 1 for block in table)
            return Candidate(_id(request), request.num_tokens, request.num_computed_tokens, needed, held)
        cached, _ = pool.lookup(request.token_ids)
        shared = sum(pool.ref_count(block) > 0 for block in cached)  # the other hits are free and get taken too
        needed = pool.blocks_for(request.num_tokens) - shared
        return Candidate(_id(request), request.num_tokens, len(cached) * pool.block_size, needed, 0)

    def _checked(self, answer, requests: dict[str, Request], seen) -> list[tuple[Request, int]]:
        """The plan with requests in place of ids. Raises GradeError naming the first thing that cannot be."""
        candidates = {candidate.id: candidate for group in seen for candidate in group}
        running = {candidate.id for candidate in seen[1]}
        plan = [tuple(entry) for entry in answer]
        for name, n in plan:
            if name not in candidates:
                raise GradeError(f"schedule names {name!r}, which is neither waiting nor running")
            least, most = int(name not in running), candidates[name].num_uncomputed
            if not isinstance(n, int) or not least <= n <= most:
                raise GradeError(f"schedule gives {name!r} {n} tokens; it has {most} to compute")
            if not self.enable_chunked_prefill and 0 < n < most:
                raise GradeError(f"schedule gives {name!r} {n} of {most} tokens, but here a prompt runs in one step")
        if len({name for name, _ in plan}) < len(plan):
            raise GradeError(f"schedule names a request twice: {plan}")
        if not plan:
            raise GradeError(f"schedule answers with nothing while {len(candidates)} requests have work: no progress")
        tokens = sum(n for _, n in plan)
        if tokens > self.max_num_batched_tokens:
            raise GradeError(f"schedule spends {tokens} tokens of a budget of {self.max_num_batched_tokens}")
        needed = sum(candidates[name].blocks_needed for name, n in plan if n)
        free = self.block_pool.num_free + sum(candidates[name].blocks_held for name, n in plan if n == 0)
        if needed > free:
            raise GradeError(
                f"schedule needs {needed} blocks and {free} are free: preempt with (id, 0), or start fewer"
            )
        return [(requests[name], n) for name, n in plan]


def _id(request: Request) -> str:
    return request.request_id
