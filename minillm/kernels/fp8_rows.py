"""Rows rounded to fp8 e4m3 in one pass: the largest value of a row found, and the row scaled by it, in registers.

In PyTorch (`eight_bit.quantize_rows`, the twin) these are five operations, each of which reads or writes the rows in
memory; here 3 bytes move per value of 16 bits. A row that holds NaN or an infinity gets codes that are NaN, so its
products are NaN and those of no other row. Built in lesson 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minillm.eight_bit import LARGEST, SMALLEST_SCALE
from minillm.kernels.launch import POINTERS, LaunchRow
from minillm.kernels.pointwise import pointwise_row

FP8 = torch.float8_e4m3fn
LIMIT = tl.constexpr(LARGEST[FP8])
TINY = tl.constexpr(SMALLEST_SCALE)
ROW_SIZES = (16384,)  # inputs of a layer, rounded up, that the compile report covers: a model of 8B


@triton.jit
def fp8_rows_kernel(x_ptr, codes_ptr, scale_ptr, x_stride, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(x_ptr + row * x_stride + columns, inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LIMIT, TINY)
    codes = x / scale
    codes = tl.where(codes > LIMIT, LIMIT, tl.where(codes < -LIMIT, -LIMIT, codes))  # unlike a minimum it keeps NaN
    tl.store(codes_ptr + row * N + columns, codes.to(tl.float8e4nv), inside)
    tl.store(scale_ptr + row, scale)


def round_rows_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, K] as (codes [T, K] float8_e4m3fn, scales [T] float32): x is about codes * scale."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, n = x.shape
    codes = torch.empty((num_rows, n), dtype=FP8, device=x.device)
    scale = torch.empty((num_rows,), dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(n)
        fp8_rows_kernel[(num_rows,)](x, codes, scale, x.stride(0), N=n, BLOCK=block, num_warps=_warps(block))
    return codes, scale


def _warps(block: int) -> int:
    """16 values per thread, up to the 1,024 threads of a program."""
    return min(32, max(1, block // 512))


def rows(compute_capability: tuple[int, int], dtype: str) -> list[LaunchRow]:
    """The launches that the compile report covers on one GPU; below 8.9 there is nothing that multiplies the codes."""
    if compute_capability < (8, 9):
        return []
    return [pointwise_row("fp8_rows", compute_capability, dtype, (1, size), _warps(size)) for size in ROW_SIZES]


def compile_spec(row: LaunchRow):
    """(kernel, signature, constexprs) of one row, for compiling without a GPU."""
    constexprs = {"N": row.block_n, "BLOCK": row.block_n}
    kinds = {"codes_ptr": POINTERS["float8_e4m3fn"], "scale_ptr": "*fp32", "x_stride": "i64"}
    kinds |= dict.fromkeys(constexprs, "constexpr")
    signature = {name: kinds.get(name, POINTERS[row.dtype]) for name in fp8_rows_kernel.arg_names}
    return fp8_rows_kernel, signature, constexprs
