"""The parts of a sum that several programs shared, added up in their order: the same numbers in every run.

Atomic additions would save this launch and its few bytes, and give a sum that depends on who came first. Lesson 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minillm.kernels.launch import POINTERS, LaunchRow
from minillm.kernels.pointwise import pointwise_row

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_splits"])
def sum_splits_kernel(parts_ptr, y_ptr, size, num_splits, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(num_splits):
        total += tl.load(parts_ptr + offsets, inside, other=0.0)
        parts_ptr += size
    tl.store(y_ptr + offsets, total.to(y_ptr.dtype.element_ty), inside)


def sum_splits(parts: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y [...] = the sum of parts [splits, ...] float32, in y's dtype; returns y."""
    sum_splits_kernel[(triton.cdiv(y.numel(), BLOCK),)](
        parts, y, y.numel(), len(parts), BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return y


def rows(compute_capability: tuple[int, int], dtype: str) -> list[LaunchRow]:
    """The launches that the compile report covers on one GPU."""
    return [pointwise_row("sum_splits", compute_capability, dtype, (1, BLOCK), NUM_WARPS)]


def compile_spec(row: LaunchRow):
    """(kernel, signature, constexprs) of one row, for compiling without a GPU."""
    kinds = {"parts_ptr": "*fp32", "size": "i64", "num_splits": "i32", "BLOCK": "constexpr"}
    signature = {name: kinds.get(name, POINTERS[row.dtype]) for name in sum_splits_kernel.arg_names}
    return sum_splits_kernel, signature, {"BLOCK": BLOCK}
