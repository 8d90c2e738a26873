"""Third strategy of the article: prompts that are likely to come are computed while nobody waits.

A predictor proposes beginnings of prompts, and steps without other work put their K and V into the prefix
cache. A guess that comes true hides its prefill; one that does not was computed for nothing. Not the paper of
the same name (SpecPrefill, arXiv 2502.02789), which drops unimportant tokens of a prompt that has come.
Built in lesson 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.request import Request, Status
from minillm.sampling_params import SamplingParams
from minillm.scheduler.chunked import ChunkedScheduler
from minillm.scheduler.predictors import Predictor, make_predictor
from minillm.scheduler.step import Step

CHUNK_SIZE = 64
MEMORY_SHARE = 0.25
MAX_GUESSES = 32  # guesses that are looked at, the likeliest first
WARMED_HISTORY = 1024  # guesses that are remembered as warmed


@dataclass
class Speculation:
    """Tokens computed on a guess, and how many of them a request has found in the cache since."""

    num_warmed_tokens: int = 0
    num_used_tokens: int = 0

    @property
    def num_wasted_tokens(self) -> int:
        """Computed for nobody so far."""
        return self.num_warmed_tokens - self.num_used_tokens


class SpeculativePrefillScheduler(ChunkedScheduler):
    """`chunked`, and in a step without any work one chunk of a guess.

    predictor  default: the one that the config names

    A real request therefore waits for one chunk of at most `speculative_chunk_size` tokens. Between steps a
    guess owns nothing: what was computed lies in the prefix cache like the prompt of a request that has ended, and
    the next idle step goes on from there. Unused guesses keep at most `speculative_memory_share` of the
    blocks; beyond that the oldest are given up.
    """

    def __init__(
        self, config: EngineConfig, block_pool: BlockPool, max_model_len: int, predictor: Predictor | None = None
    ):
        super().__init__(config, block_pool, max_model_len)
        size = config.speculative_chunk_size or max(CHUNK_SIZE, block_pool.block_size)
        self.blocks_per_chunk = min(size, self.max_num_batched_tokens) // block_pool.block_size
        self.max_unused_blocks = int(block_pool.num_blocks * (config.speculative_memory_share or MEMORY_SHARE))
        self.predictor = predictor or make_predictor(config)
        self.speculation = Speculation()
        self._unused: dict[int, int] = {}  # block of a guess -> its serial, the oldest first
        self._warmed: dict[int, tuple[Sequence[int], int]] = {}  # id of a guess's tokens -> them, blocks once warmed
        self._in_flight: Request | None = None  # the guess of the step that is being computed

    # ---- what the engine calls ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        super().add(request)
        self.predictor.arrived(request)

    def finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        if request.status is Status.RUNNING and finish_reason in ("stop", "length") and request is not self._in_flight:
            self.predictor.ended(request)
        super().finish(request, finish_reason, stop_reason)

    @property
    def has_idle_work(self) -> bool:
        return not self.has_work and self._next_guess() is not None

    @property
    def block_tables(self) -> list[list[int]]:
        guess = [] if self._in_flight is None else [self._in_flight.block_table]
        return super().block_tables + guess

    def plan(self, step: Step) -> None:
        if self._in_flight is not None:  # its step has failed
            self.finish(self._in_flight, "error")
            self._in_flight = None
        if self.has_work:
            super().plan(step)
        else:
            self._warm(step)

    def commit(self, step: Step) -> None:
        super().commit(step)
        guess, pool = self._in_flight, self.block_pool
        if guess is not None and guess.status is Status.RUNNING:
            (_, n), *_ = step.scheduled
            self.speculation.num_warmed_tokens += n
            for block in guess.block_table[-(n // pool.block_size) :]:
                self._unused[block] = pool.serial(block)
            self.finish(guess, "length", "guess")
        self._in_flight = None

    def admit(self, request: Request, budget: int, step: Step) -> int:
        n = super().admit(request, budget, step)
        if n and self._unused:
            pool = self.block_pool
            for block in request.block_table[: request.num_computed_tokens // pool.block_size]:
                if self._unused.pop(block, None) == pool.serial(block):
                    self.speculation.num_used_tokens += pool.block_size
        return n

    # ---- guesses -----------------------------------------------------------------------------

    def _next_guess(self):
        """(token ids, blocks wanted, blocks cached, their prefix key) of the first guess that is not yet cached.

        What the cache holds for other reasons costs nothing; what is missing, and what was warmed and is unused, counts
        against the share, the likeliest guess first. A guess that was warmed and lost is not warmed again until the
        predictor has seen it again: otherwise guesses that do not fit beside each other would be computed for ever.
        The last token of a sequence stays uncomputed, so that a guess is never sampled.
        """
        pool, left = self.block_pool, self.max_unused_blocks
        for token_ids, length in islice(self.predictor.predict(), MAX_GUESSES):
            wanted = min(length, len(token_ids) - 1) // pool.block_size
            cached, prefix_key = pool.lookup(token_ids)
            left -= sum(self._unused.get(block) == pool.serial(block) for block in cached[:wanted])
            if left <= 0:
                break
            missing = wanted - len(cached)
            _, warmed = self._warmed.get(id(token_ids), (token_ids, 0))
            if missing > 0 and len(cached) >= warmed:
                return token_ids, len(cached) + min(missing, left), cached, prefix_key
        return None

    def _warm(self, step: Step) -> None:
        """Schedule the next chunk of a guess as a request of nobody, which ends when the step is committed."""
        pool, found = self.block_pool, self._next_guess()
        if found is None:
            return
        token_ids, wanted, cached, prefix_key = found
        num_new = min(wanted - len(cached), self.blocks_per_chunk)
        self._give_up_oldest(len(self._unused) + num_new - self.max_unused_blocks, keep=cached)
        pool.take(cached)
        guess = Request(
            request_id="guess",
            prompt_token_ids=token_ids,
            params=SamplingParams(),
            token_ids=token_ids,
            num_computed_tokens=len(cached) * pool.block_size,
            block_table=cached + pool.allocate(num_new),
            num_published_blocks=len(cached),
            prefix_key=prefix_key,
            status=Status.RUNNING,
        )
        self._in_flight = guess
        self._warmed[id(token_ids)] = (token_ids, len(guess.block_table))
        if len(self._warmed) > WARMED_HISTORY:
            self._warmed.pop(next(iter(self._warmed)))
        step.scheduled.append((guess, num_new * pool.block_size))

    def _give_up_oldest(self, excess: int, keep: list[int]) -> None:
        """Make room among the unused guesses. Those that the cache has lost already go first and cost nothing."""
        pool = self.block_pool
        lost = [block for block, serial in self._unused.items() if pool.serial(block) != serial]
        for block in lost:
            del self._unused[block]
        oldest = [block for block in self._unused if block not in keep][: max(0, excess - len(lost))]
        pool.withdraw(oldest)
        for block in oldest:
            del self._unused[block]
