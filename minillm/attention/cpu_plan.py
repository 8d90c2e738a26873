"""What a step has to read on a processor: which rows decode, which are prefill chunks, who reads which keys.

Made once per batch and used by every layer. A request with few rows in the step is computed row by row by
the decode path, each row against the keys that it sees; longer chunks go to matrix products. Decode rows
of different contexts are never padded to one length: their keys are laid end to end and cut into one equal
share per worker. Plain Python and NumPy; nothing here reads K or V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minillm.attention.mask import first_visible_key
from minillm.batch import Batch
from minillm.errors import ShapeError

FEW_ROWS = 4
"""A chunk of at most this many rows is cheaper row by row than as a matrix product, with the numba kernel."""
SHARE_MULTIPLE = 16
"""Shares are cut at multiples of this many keys, so that a cut costs no ragged tile."""
READ, REQUEST, START, STOP, SLOT = range(5)
"""Columns of `Pieces.pieces`."""


class Read(NamedTuple):
    """One query row reads the keys start .. stop - 1 of a request."""

    row: int  # in the batch
    request: int
    start: int
    stop: int


class Chunk(NamedTuple):
    """A request whose rows first .. last - 1 are computed together."""

    request: int
    first: int
    last: int
    context: int


@dataclass(frozen=True)
class Pieces:
    """The reads of a step, shared out to W workers.

    pieces       [N, 5] int32: number of the read, request, first key, end of keys, slot; a read that was not
                 cut has slot -1, the parts of one that was have slots of their own for their partial results
    first_piece  [W + 1] int32: worker w has the pieces first_piece[w] .. first_piece[w + 1] - 1
    splits       [M, 3] int32: number of a read that was cut, its first slot, its last slot + 1
    num_slots    slots in all
    """

    pieces: np.ndarray
    first_piece: np.ndarray
    splits: np.ndarray
    num_slots: int

    @property
    def num_workers(self) -> int:
        return len(self.first_piece) - 1

    @property
    def keys_read(self) -> np.ndarray:
        """[W] keys that each worker reads."""
        lengths = self.pieces[:, STOP] - self.pieces[:, START]
        ends = np.concatenate([[0], lengths.cumsum()])[self.first_piece]
        return ends[1:] - ends[:-1]


def split_batch(batch: Batch, window: int | None, few_rows: int) -> tuple[list[Read], list[Chunk]]:
    """The rows that decode one by one, and the chunks. Requests may come in any order."""
    reads, chunks = [], []
    first = 0
    for request, (n, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        if n > context:
            raise ShapeError(f"request {request} of the batch has {n} rows but a context of {context} tokens")
        if n > few_rows:
            chunks.append(Chunk(request, first, first + n, context))
        else:
            for i in range(n):
                position = context - n + i
                reads.append(Read(first + i, request, first_visible_key(position, window), position + 1))
        first += n
    return reads, chunks


def cut(reads: list[Read], num_workers: int) -> Pieces:
    """Lay the keys of all reads end to end and cut them into `num_workers` equal shares."""
    num_keys = sum(read.stop - read.start for read in reads)
    share = -(-num_keys // num_workers)
    share = max(1, -(-share // SHARE_MULTIPLE) * SHARE_MULTIPLE)
    pieces, first_piece, splits = [], [0], []
    room, slots = share, 0
    for number, read in enumerate(reads):
        is_cut = read.stop - read.start > room
        begin, start = slots, read.start
        while start < read.stop:
            stop = min(read.stop, start + room)
            pieces.append((number, read.request, start, stop, slots if is_cut else -1))
            slots += is_cut
            room -= stop - start
            start = stop
            if room == 0:
                first_piece.append(len(pieces))
                room = share
        if is_cut:
            splits.append((number, begin, slots))
    if first_piece[-1] < len(pieces):
        first_piece.append(len(pieces))
    return Pieces(
        np.array(pieces, np.int32).reshape(-1, 5),
        np.array(first_piece, np.int32),
        np.array(splits, np.int32).reshape(-1, 3),
        slots,
    )
