"""The default on processors: decodes walk the block table, prefill chunks are matrix products.

A batch may mix both, in any order. Decode rows go to the numba kernel of `cpu_decode.py` (float32 and
bfloat16), or to plain PyTorch in `cpu_split.py`; prefill chunks go to `cpu_prefill.py`. A fresh prompt is
computed on the new K and V and gathers nothing. Used from lesson 06 on, explained in lesson 11.
"""

from __future__ import annotations

import logging

import torch

from minillm.attention import cpu_plan, cpu_split
from minillm.attention.cpu_prefill import choose_prefill
from minillm.attention.mask import accumulation_dtype, check_batch
from minillm.attention.per_request import request_keys
from minillm.batch import Batch
from minillm.errors import ShapeError
from minillm.kv_cache import KVLayer

log = logging.getLogger(__name__)
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
WORK_PER_THREAD = 2**16
"""Multiply-adds (keys x H x D) that pay for one more thread, about 20 microseconds' worth."""


class CPUAttention:
    """A body of the contract, for CPU tensors of any floating-point dtype.

    dtype      what the kernels are made ready for, so that no request waits for the compiler
    kv_dtype   what the pages hold, where that is another type
    use_numba  False: decode in plain PyTorch even where numba is installed

    `reason` says which decode and which prefill run, and why. A `Batch` must not change between the layers of a
    step: what it asks for is worked out once.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, use_numba: bool = True, kv_dtype: torch.dtype | None = None):
        self._kernels = None
        self._steps: tuple[Batch | None, dict] = (None, {})  # of the last batch, by window
        if not use_numba:
            self.reason = "decode in plain PyTorch, as asked"
        elif dtype not in KERNEL_DTYPES:
            self.reason = f"decode in plain PyTorch: the numba kernel reads float32 and bfloat16, not {dtype}"
        else:
            self._kernels, self.reason = _load_kernels(dtype, kv_dtype or dtype)
        self._prefill, reason = choose_prefill(dtype)
        self.reason += f"; {reason}"

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> torch.Tensor:
        return self._attend(q, k, v, kv_layer, batch, with_lse=False)[0]

    def attend_with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, H, D], lse [T, H] float32, float64 for float64 inputs)."""
        return self._attend(q, k, v, kv_layer, batch, with_lse=True)

    def _attend(self, q, k, v, kv_layer: KVLayer, batch: Batch, with_lse: bool):
        check_batch(q, k, v, kv_layer, batch)
        step = self._step(batch, kv_layer)
        step.check_blocks(kv_layer.k.shape[0])
        if step.reads and not step.chunks:  # every row decodes: none to pick out or to put back
            return self._decode(q, kv_layer, step)

        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype)) if with_lse else None
        if step.reads:
            out[step.rows], of_reads = self._decode(q[step.rows], kv_layer, step)
            if with_lse:
                lse[step.rows] = of_reads
        for chunk in step.chunks:
            rows = slice(chunk.first, chunk.last)
            blocks = batch.block_tables[chunk.request]
            keys, values = request_keys(k[rows], v[rows], kv_layer, blocks, chunk.context)
            out[rows], of_chunk = self._prefill(q[rows], keys, values, kv_layer.window, with_lse)
            if with_lse:
                lse[rows] = of_chunk
        return out, lse

    def _step(self, batch: Batch, kv_layer: KVLayer) -> _Step:
        last_batch, steps = self._steps
        if last_batch is not batch:
            steps = {}
            self._steps = (batch, steps)
        if kv_layer.window not in steps:
            few_rows = cpu_plan.FEW_ROWS if self._kernels is not None else 1
            steps[kv_layer.window] = _Step(batch, kv_layer.window, few_rows)
            if self._kernels is not None:
                self._kernels.use_threads(torch.get_num_threads())
        return steps[kv_layer.window]

    def _decode(self, q: torch.Tensor, kv_layer: KVLayer, step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
        """q [R, H, D] has one row per read of the step."""
        pages_in_order = kv_layer.k.is_contiguous() and kv_layer.v.is_contiguous()
        if self._kernels is None or q.dtype not in KERNEL_DTYPES or not pages_in_order:
            return cpu_split.decode(q, kv_layer, step.splits(kv_layer.block_size))
        pieces = step.pieces(q.shape[1] * q.shape[2])
        return self._kernels.decode(q.contiguous(), kv_layer, step.table_array, pieces)


class _Step:
    """What one batch asks for under one window; every layer of the step uses it."""

    def __init__(self, batch: Batch, window: int | None, few_rows: int):
        self.reads, self.chunks = cpu_plan.split_batch(batch, window, few_rows)
        self.rows = torch.tensor([read.row for read in self.reads])
        self.tables = batch.block_tables.contiguous()  # [B, max_blocks]
        self.table_array = self.tables.numpy()
        self._block_range = (int(self.tables.min()), int(self.tables.max())) if self.tables.numel() else (0, 0)
        self._pieces = self._splits = None

    def check_blocks(self, num_blocks: int) -> None:
        """The kernel follows block ids without looking: a wrong one would read foreign memory."""
        lowest, highest = self._block_range
        if lowest < 0 or highest >= num_blocks:
            raise ShapeError(
                f"a block table names blocks {lowest} .. {highest}, but the pages are 0 .. {num_blocks - 1}"
            )

    def pieces(self, values_per_key: int) -> cpu_plan.Pieces:
        """The reads, shared out to as many threads as pay for themselves."""
        if self._pieces is None:
            work = sum(read.stop - read.start for read in self.reads) * values_per_key
            workers = min(torch.get_num_threads(), max(1, work // WORK_PER_THREAD))
            self._pieces = cpu_plan.cut(self.reads, workers)
        return self._pieces

    def splits(self, block_size: int) -> cpu_split.Splits:
        if self._splits is None:
            self._splits = cpu_split.Splits(self.reads, self.tables, block_size)
        return self._splits


def _load_kernels(dtype: torch.dtype, kv_dtype: torch.dtype):
    """(cpu_decode ready for these dtypes, or None where it does not work here, and the reason)."""
    try:
        from minillm.attention import cpu_decode

        cpu_decode.warm_up(dtype, kv_dtype)
    except ImportError as error:
        return None, f"decode in plain PyTorch, several times slower: numba is missing ({error}); pip install numba"
    except Exception as error:  # the compiler refused: a machine or version we do not know must still answer
        log.warning("numba is installed but cannot compile the decode kernel", exc_info=True)
        return None, f"decode in plain PyTorch, several times slower: numba failed with {type(error).__name__}"
    return cpu_decode, f"decode compiled by numba {cpu_decode.numba.__version__}, on the block table"
