"""Rank 0 tells, the others follow: how one step of the engine becomes the same step on every rank.

`Driver` stands where the engine expects its model. It announces each call and then makes it itself; `follow` is the
other side. Between an announcement and the end of its step all ranks must go through the same collectives, so Ctrl-C
waits for the end of the step, and after any other error in it the ranks are ended: they would never meet again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from minillm.batch import Batch
from minillm.errors import RankError
from minillm.kv_cache import KVCache
from minillm.model import Transformer
from minillm.model_config import ModelConfig
from minillm.parallel.plan import HEADER, Work, header, lengths_of, num_integers, pack, unpack
from minillm.parallel.ranks import Ranks, Traffic
from minillm.profiler import NO_PARTS

LOOK_S = 0.1  # between two looks at the other ranks while a GPU works


class Driver:
    """The engine's model on rank 0: `Transformer`'s calls, made on all ranks at once.

    config  of the whole model
    model   rank 0's part of it
    others  what is known of the other ranks: check() raises RankError when one is gone, why(error) tells why a step
            failed, stop() and kill() end them

    Every call raises RankError once a rank has failed.
    """

    def __init__(self, config: ModelConfig, model: Transformer, ranks: Ranks, others):
        self.config = config
        self.model = model
        self.ranks = ranks
        self.others = others
        self.device, self.dtype, self.ops, self.forms = model.device, model.dtype, model.ops, model.forms
        self.failure: str | None = None
        self.closed = False

    def forward(self, batch: Batch, kv: KVCache, attend, parts=NO_PARTS) -> torch.Tensor:
        """Logits [B', V] in float32, as `Transformer.forward`."""
        with self._step(Work.FORWARD, *lengths_of(batch)):
            self.ranks.announce(pack(batch))
            return self.model.forward(batch, kv, attend, parts)

    def hidden(self, batch: Batch, kv: KVCache, attend, parts=NO_PARTS) -> torch.Tensor:
        """The rows [T, E] that `lm_head` takes, the same on every rank."""
        with self._step(Work.HIDDEN, *lengths_of(batch)):
            self.ranks.announce(pack(batch))
            return self.model.hidden(batch, kv, attend, parts)

    def lm_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] in float32 of normed rows [n, E]."""
        with self._step(Work.LM_HEAD, rows.shape[0]):
            return self.model.lm_head(self.ranks.spread(rows.contiguous()))

    def copy_blocks(self, block_copies: list[tuple[int, int]]) -> None:
        """Let the other ranks copy whole KV blocks (src, dst)."""
        with self._step(Work.COPY_BLOCKS, len(block_copies)):
            self.ranks.announce(torch.tensor(block_copies))

    @property
    def num_weight_bytes(self) -> dict[str, int]:
        """Of rank 0."""
        return self.model.num_weight_bytes

    @property
    def num_table_bytes(self) -> int:
        """Of the embedding table, which every rank holds."""
        return self.model.num_table_bytes

    def close(self) -> None:
        """End the other ranks. Closing twice is fine."""
        if self.closed:
            return
        self.closed = True
        if self.failure is None:
            with suppress(RuntimeError):  # one of them may have just ended
                self.ranks.announce(header(Work.STOP))
            self.others.stop()

    @contextmanager
    def _step(self, work: Work, *lengths: int) -> Iterator[None]:
        if self.failure is None:
            self.failure = self.others.missing()
            if self.failure is not None:
                self.others.kill()
                self.ranks.abort()
        if self.failure is not None:
            raise RankError(self.failure)
        self.ranks.traffic = Traffic()
        with interrupts_wait():
            try:
                self.ranks.announce(header(work, *lengths))
                yield
                self._wait_for_gpu()
            except BaseException as error:
                self.failure = self.others.why(error)
                self.others.kill()
                self.ranks.abort()
                raise RankError(self.failure) from error

    def _wait_for_gpu(self) -> None:
        """A kernel of NCCL waits in the GPU, and waits on when another rank has died: look at both until it is done."""
        if self.device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record()
        next_look = time.monotonic() + LOOK_S
        while not done.query():
            if time.monotonic() > next_look:
                if problem := self.others.missing():
                    raise RankError(problem)
                next_look = time.monotonic() + LOOK_S


class DrivenCache(KVCache):
    """Rank 0's part of the cache: a block that is copied here is copied on every rank."""

    def __init__(self, driver: Driver, *sizes):
        super().__init__(*sizes)
        self.driver = driver

    def copy_blocks(self, block_copies: list[tuple[int, int]]) -> None:
        if block_copies:
            self.driver.copy_blocks(block_copies)
        super().copy_blocks(block_copies)


@torch.inference_mode()
def follow(model: Transformer, kv: KVCache, attend, ranks: Ranks) -> None:
    """Compute what rank 0 announces until it says stop. Raises RuntimeError when another rank is gone."""
    while True:
        ranks.traffic = Traffic()
        work, *lengths = ranks.announce(torch.empty(HEADER, dtype=torch.int64), idle=True).tolist()
        if work == Work.STOP:
            return
        if work == Work.COPY_BLOCKS:
            pairs = ranks.announce(torch.empty(lengths[0], 2, dtype=torch.int64))
            kv.copy_blocks(pairs.tolist())
        elif work == Work.LM_HEAD:
            rows = torch.empty(lengths[0], model.config.hidden_size, dtype=model.dtype, device=model.device)
            model.lm_head(ranks.spread(rows))
        else:
            numbers = ranks.announce(torch.empty(num_integers(lengths), dtype=torch.int64))
            batch = unpack(numbers, lengths, model.device)
            (model.forward if work == Work.FORWARD else model.hidden)(batch, kv, attend)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Inside, Ctrl-C is remembered; it acts at the end. Only the main thread ever gets it."""
    acts = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or acts is None:
        yield
        return
    remembered = []
    signal.signal(signal.SIGINT, lambda *what: remembered.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, acts)
        if remembered and callable(acts):
            acts(*remembered[-1])
