"""A matrix of int4 codes written out in a half dtype in one pass, for a product of many rows.

In PyTorch (`PackedInt4.dequantize`, the twin) this is seven passes over the matrix; here half a byte is read and two
bytes are written per weight. Built in lesson 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minillm.kernels.launch import POINTERS, LaunchRow
from minillm.kernels.pointwise import pointwise_row
from minillm.quantize import PackedInt4

BLOCK_N = 32  # rows of the matrix that a program widens, one group of each
NUM_WARPS = 4


@triton.jit
def widen_int4_kernel(
    codes_ptr, scale_and_minimum_ptr, w_ptr, n_stride, k_stride, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):
    """n_stride, k_stride  N and K, which are also the rows of a group of codes and the stride of the rows of w."""
    HALF: tl.constexpr = GROUP // 2
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1).to(tl.int64)
    inside = n < n_stride
    j = tl.arange(0, HALF)
    row = group * n_stride + n
    byte = tl.load(codes_ptr + row[:, None] * HALF + j[None, :], inside[:, None], other=0)
    scale = tl.load(scale_and_minimum_ptr + 2 * row, inside, other=0.0).to(tl.float32)[:, None]
    minimum = tl.load(scale_and_minimum_ptr + 2 * row + 1, inside, other=0.0).to(tl.float32)[:, None]
    low = (byte & 15).to(tl.float32) * scale + minimum
    high = (byte >> 4).to(tl.float32) * scale + minimum
    w_ptrs = w_ptr + n[:, None] * k_stride + group * GROUP + j[None, :]
    tl.store(w_ptrs, low.to(w_ptr.dtype.element_ty), inside[:, None])
    tl.store(w_ptrs + HALF, high.to(w_ptr.dtype.element_ty), inside[:, None])


def widen_int4(weight: PackedInt4, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] as ordinary numbers of a dtype."""
    n, k = weight.shape
    w = torch.empty((n, k), dtype=dtype, device=weight.codes.device)
    widen_int4_kernel[(triton.cdiv(n, BLOCK_N), len(weight.codes))](
        weight.codes, weight.scale_and_minimum, w, n, k, BLOCK_N=BLOCK_N, GROUP=weight.group, num_warps=NUM_WARPS
    )
    return w


def rows(compute_capability: tuple[int, int], dtype: str) -> list[LaunchRow]:
    """The launches that the compile report covers on one GPU."""
    return [pointwise_row("widen_int4", compute_capability, dtype, (BLOCK_N, 128), NUM_WARPS)]


def compile_spec(row: LaunchRow):
    """(kernel, signature, constexprs) of one row, for compiling without a GPU."""
    constexprs = {"BLOCK_N": row.block_m, "GROUP": row.block_n}
    kinds = {"codes_ptr": "*u8", "n_stride": "i32", "k_stride": "i32"} | dict.fromkeys(constexprs, "constexpr")
    signature = {name: kinds.get(name, POINTERS[row.dtype]) for name in widen_int4_kernel.arg_names}
    return widen_int4_kernel, signature, constexprs
