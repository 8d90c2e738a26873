"""An engine without tensors: the oracle of the scheduler's tests.

K and V of a token are here the tuple of all tokens up to it, kept per physical row. Every step reads
every row that attention would read and demands the request's own prefix, so paging, prefix cache,
copy-on-write and preemption are proven exactly. The next token is a fixed function of the prefix that
was read, and `solo` computes a sequence with that function alone.
"""

import zlib

from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.request import Request, Status
from minillm.sampling_params import SamplingParams
from minillm.scheduler import make_scheduler

IN_ORDER = ("static", "iteration", "prefill_first", "chunked", "speculative_prefill")  # nobody is overtaken
BUSY = ("iteration", "chunked", "speculative_prefill")  # no budget is left while there is something it could compute


def next_token(prefix: tuple[int, ...], index: int) -> int:
    """In 0..3. Siblings 0 and 1 always agree, sibling 2 goes its own way."""
    return zlib.crc32(repr((prefix, index // 2)).encode()) % 4


def is_stop(prefix: tuple[int, ...], params: SamplingParams) -> bool:
    return not params.ignore_eos and zlib.crc32(repr(prefix).encode()) % 29 == 0


def solo(prompt, params, index=0, *, max_model_len, num_rows):
    """(tokens, finish_reason, stop_reason) of one sequence that has a machine of `num_rows` rows for itself."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tuple(tokens), index))
        if is_stop(tuple(tokens), params):
            return tokens, "stop", None
        if len(tokens) - len(prompt) >= params.max_tokens:
            return tokens, "length", "max_tokens"
        if len(tokens) >= max_model_len:
            return tokens, "length", "max_model_len"
        if len(tokens) > num_rows:
            return tokens, "length", "kv_cache_full"


class FakeEngine:
    def __init__(self, *, block_size=4, num_blocks=64, max_model_len=64, **options):
        self.config = EngineConfig(
            **{"max_num_batched_tokens": 16, "max_num_seqs": 8, **options}, block_size=block_size
        )
        self.pool = BlockPool(num_blocks, block_size, self.config.enable_prefix_caching)
        self.scheduler = make_scheduler(self.config, self.pool, max_model_len)
        self.max_model_len = max_model_len
        self.rows = {}  # physical row -> prefix whose K and V lie there
        self.families = []  # one list per added request: the request and its siblings
        self.steps = []
        self.failed_steps = 0

    def add(self, prompt, max_tokens=8, n=1, **params):
        name = f"r{len(self.families)}"
        request = Request(name, list(prompt), SamplingParams(n=n, max_tokens=max_tokens, **params))
        self.scheduler.add(request)
        self.families.append([request])
        return request

    def abort(self, request, reason="abort"):
        """End a request and its siblings, as a caller who has lost interest does."""
        (family,) = (family for family in self.families if request in family)
        for member in family:
            self.scheduler.finish(member, reason)
        self.check_pool()

    def idle(self, max_steps=500):
        """Steps for which nobody waits, until there is nothing left to guess."""
        while self.scheduler.has_idle_work:
            assert max_steps > 0, "guessing without end"
            max_steps -= 1
            self.step()
        assert self.pool.num_free == self.pool.num_blocks
        return self

    def run(self, max_steps=5000):
        while self.scheduler.has_work:
            assert max_steps > 0, "no end in sight"
            max_steps -= 1
            self.step()
        assert self.pool.num_free == self.pool.num_blocks
        return self

    def step(self, fail=None):
        """One step. fail: "forward" (after half of the rows were written) or "sample" (after commit)."""
        scheduler = self.scheduler
        assert len(self.steps) < 5000, "no end in sight"
        before = Snapshot(scheduler)
        step = scheduler.schedule(float(len(self.steps)))
        self.steps.append([(request.request_id, n) for request, n in step.scheduled])
        self.check_pool()
        if before.had_work:
            before.check(self, step)
        else:
            assert len(step.scheduled) <= 1 and not step.padding, "one guess, or nothing to do"

        writes = self._forward(step)
        if fail == "forward":
            for row in writes[: len(writes) // 2 + 1]:
                self.rows[row] = "garbage"
            return self._fail(step)
        for request, n in step.scheduled:
            self._attend(request, request.num_computed_tokens + n)
        scheduler.commit(step)
        self.check_pool()
        if fail == "sample":
            for row in writes:
                self.rows[row] = "garbage"
            return self._fail(step)

        done = [request for request, _ in step.scheduled if request.num_uncomputed_tokens == 0]
        for request in done:
            family = [request]
            if request.num_pending_forks:
                family += scheduler.fork(request)
                self.families[self.arrival(request)[0]] = family
            for member in family:
                self._append(member)
        self.check_pool()
        return step

    def arrival(self, request):
        return next((i, request.index) for i, family in enumerate(self.families) if request in family)

    def check_pool(self):
        self.pool.check(self.scheduler.block_tables)

    def row(self, request, position):
        size = self.pool.block_size
        return request.block_table[position // size] * size + position % size

    def _forward(self, step):
        """Copies first, all at once as one tensor statement does it; then every new row."""
        size = self.pool.block_size
        targets = [dst for _, dst in step.block_copies]
        assert len(set(targets)) == len(targets), "two copies into one block: their order would matter"
        copied = {d * size + i: self.rows.get(s * size + i) for s, d in step.block_copies for i in range(size)}
        self.rows.update(copied)
        writes = []
        for request, n in step.scheduled:
            start = request.num_computed_tokens
            for position in range(start, start + n):
                row = self.row(request, position)
                self.rows[row] = tuple(request.token_ids[: position + 1])
                writes.append(row)
        assert len(set(writes)) == len(writes), "two requests write one row"
        return writes

    def _attend(self, request, context_len):
        tokens = tuple(request.token_ids[:context_len])
        for position in range(context_len):
            found = self.rows.get(self.row(request, position))
            assert found == tokens[: position + 1], f"{request.request_id} reads {found} at position {position}"

    def _append(self, request):
        request.token_ids.append(next_token(tuple(request.token_ids), request.index))
        tokens = tuple(request.token_ids)
        if is_stop(tokens, request.params):
            self.scheduler.finish(request, "stop")
        elif len(tokens) - request.num_prompt_tokens >= request.params.max_tokens:
            self.scheduler.finish(request, "length", "max_tokens")
        elif len(tokens) >= self.max_model_len:
            self.scheduler.finish(request, "length", "max_model_len")

    def _fail(self, step):
        self.failed_steps += 1
        for request, _ in step.scheduled:
            if any(request in family for family in self.families):
                self.abort(request, "error")
            else:
                self.scheduler.finish(request, "error")  # a guess
        self.check_pool()
        return step


class Snapshot:
    """The scheduler's state before a step, and everything that a step must then satisfy."""

    knows_hits = True  # the policy plans with what a request finds in the cache when it is admitted
    knows_family_blocks = True  # and knows that siblings free the blocks that they share when all of them go

    def __init__(self, scheduler):
        self.had_work = scheduler.has_work
        self.running = list(scheduler.running)
        self.waiting = list(scheduler.waiting)
        self.ready = [r for r in self.running if r.num_uncomputed_tokens == 1]

    def check(self, engine, step):
        scheduler, pool, config = engine.scheduler, engine.pool, engine.config
        policy = config.scheduling_policy
        tokens = dict(step.scheduled)
        left = config.max_num_batched_tokens - step.num_rows

        # the plan is possible
        assert left >= 0 and len(tokens) == len(step.scheduled)
        assert step.num_tokens == sum(tokens.values())
        for request, n in tokens.items():
            assert request in scheduler.running and request.status is Status.RUNNING
            assert 1 <= n <= request.num_uncomputed_tokens
            assert n == 1 or n <= (scheduler.chunk_limit or n)
            assert scheduler.enable_chunked_prefill or n == request.num_uncomputed_tokens
            assert pool.blocks_for(request.num_computed_tokens + n) <= len(request.block_table)
            assert len(request.block_table) <= pool.blocks_for(engine.max_model_len)
        assert sum(1 + r.num_pending_forks for r in scheduler.running) <= config.max_num_seqs
        assert not step.padding or config.pad_batches

        # someone is computed or ended, and every ready decode is served, unless prompts go first
        assert step.scheduled or step.ended or (step.preempted and not self.knows_family_blocks)
        lost = [*step.preempted, *step.ended]
        waits_for_prompts = policy == "prefill_first" and any(r not in self.ready for r in tokens)
        assert waits_for_prompts or all(r in tokens or r in lost for r in self.ready)
        for request in step.ended:
            assert request.finished and request.num_tokens > pool.num_blocks * pool.block_size
            assert (request.finish_reason, request.stop_reason) == ("length", "kv_cache_full")
        for request in step.preempted:
            assert request.status is Status.WAITING and not request.block_table and not request.num_computed_tokens

        # small priority numbers first, then first come, first served: the newest gives way, nobody enters after a
        # preemption
        for queue in (scheduler.running, scheduler.waiting):
            assert [r.priority for r in queue] == sorted(r.priority for r in queue)
        admitted = [r for r in scheduler.running if r not in self.running]
        assert not (admitted and step.preempted)
        if policy in IN_ORDER:
            assert set(admitted) == set(self.waiting[: len(admitted)])
            if not any(r.priority for r in [*scheduler.running, *scheduler.waiting]):
                order = [engine.arrival(r) for r in [*scheduler.running, *scheduler.waiting]]
                assert order == sorted(order)

        # the tokens fill whole tiles, unless there is not enough that could be computed later instead
        multiple, spare = config.align_prefill_tokens, 0
        if multiple:
            excess = step.num_tokens % multiple
            assert not excess or excess > sum(n - 1 for r, n in step.scheduled if n < r.num_uncomputed_tokens)

        # no budget is left while there is something it could compute, but for the part of a tile that was given back
        if left and policy in BUSY and not config.pad_batches:
            if scheduler.enable_chunked_prefill:
                fresh = admitted if self.knows_hits else []
                for request in [*(r for r in self.running if r not in lost), *fresh]:
                    wanted = request.num_uncomputed_tokens
                    spare += min(wanted, scheduler.chunk_limit or wanted) - tokens[request]
                spare = min(spare, left)  # a chunk may be short because the budget was
                assert not spare or (multiple and not excess and spare < multiple)
            if left > spare and scheduler.waiting and not step.preempted:
                assert self._has_no_room(scheduler, pool, left - spare), "a request waits for nothing"

    def _has_no_room(self, scheduler, pool, left):
        head = scheduler.waiting[0]
        seats = scheduler.max_num_seqs - sum(1 + r.num_pending_forks for r in scheduler.running)
        hits, _ = pool.lookup(head.token_ids)
        shared = sum(pool.ref_count(block) > 0 for block in hits)
        uncomputed = head.num_tokens - len(hits) * pool.block_size
        return (
            seats < 1 + head.num_pending_forks
            or pool.blocks_for(head.num_tokens) - shared > pool.num_free
            or (not scheduler.enable_chunked_prefill and uncomputed > left)
        )
