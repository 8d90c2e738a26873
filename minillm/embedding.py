"""Rows of the embedding table for the tokens of a step: beside the layers, or gathered in CPU memory and sent over.

Of a table of V rows a step reads one per token, so it need not lie in a GPU's memory: V x E x bytes per value are
saved there, 0.26 GB for a 32,000-word model of width 4,096, 1 GB for one of 128,256 words. It saves no time. The first
layer waits for T x E values to cross PCIe, 16.8 MB for 2,048 tokens: under a millisecond of a prefill that takes a
hundred. Lesson 17 (A18).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minillm.batch import Batch

NUM_BUFFERS = 2  # one is filled while the other is on its way


class Embedding:
    """The table [V, E] where the layers are."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    def __call__(self, batch: Batch) -> torch.Tensor:
        """[T, E] of the batch's tokens."""
        return F.embedding(batch.token_ids, self.table)


class HostEmbedding:
    """The table [V, E] in CPU memory, the rows of a step on the device that `link` leads to.

    Rows are gathered into one of two buffers and sent without waiting. Chunks of a prompt that sample nothing follow
    each other without a pause, so the rows of one step may still be on their way when the next is gathered: a buffer is
    filled again when what it held has arrived.
    """

    def __init__(self, table: torch.Tensor, link):
        self.table = table
        self.link = link
        self.buffers = [Buffer() for _ in range(NUM_BUFFERS)]

    def __call__(self, batch: Batch) -> torch.Tensor:
        """[T, E] of the batch's tokens, on the device."""
        ids = batch.token_ids.cpu() if batch.host_token_ids is None else batch.host_token_ids
        buffer = self.buffers.pop(0)
        self.buffers.append(buffer)
        buffer.wait_until_arrived()
        if buffer.rows is None or len(buffer.rows) < len(ids):
            buffer.rows = self.link.make_buffer(len(ids), self.table)
        rows = torch.index_select(self.table, 0, ids, out=buffer.rows[: len(ids)])
        x, buffer.wait_until_arrived = self.link.send(rows)
        return x


@dataclass
class Buffer:
    """rows: [n, E] in memory that the device reads by itself; None before its first use."""

    rows: torch.Tensor | None = None
    wait_until_arrived: Callable[[], object] = lambda: None


class PCIe:
    """The way from CPU memory to a CUDA device: pinned buffers, and a stream of its own beside the computation."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def make_buffer(self, num_rows: int, table: torch.Tensor) -> torch.Tensor:
        return torch.empty(num_rows, table.shape[1], dtype=table.dtype, pin_memory=True)

    def send(self, rows: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """(a copy on the device for the current stream, a function that waits until `rows` may be overwritten)."""
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            x = rows.to(self.device, non_blocking=True)
        x.record_stream(computing)  # its memory belongs to the other stream, which must not reuse it too early
        arrived = self.stream.record_event()
        computing.wait_event(arrived)
        return x, arrived.synchronize
