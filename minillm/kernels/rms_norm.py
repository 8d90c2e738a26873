"""RMSNorm with the residual add in front of it, one Triton kernel: a row is read once and stays in registers.

In PyTorch (`ops.PlainOps.add_norm`, the twin) the sum is written to memory and read back by the norm.
Per row of E values in bfloat16: add 6 E bytes, norm 4 E; fused 8 E. A fifth of the bytes and one of two launches
are saved. Built in lesson 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minillm.kernels.launch import POINTERS, LaunchRow
from minillm.kernels.pointwise import pointwise_row

ROW_SIZES = (1024, 4096)  # hidden sizes, rounded up, that the compile report covers: a model of 135M and one of 8B


@triton.jit
def rms_norm_kernel(
    x_ptr, update_ptr, weight_ptr, y_ptr, x_stride, update_stride, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(x_ptr + row * x_stride + columns, inside, other=0.0)
    if ADD:
        update = tl.load(update_ptr + row * update_stride + columns, inside, other=0.0)
        # The residual stream is rounded to its dtype before it is normed, as two separate steps would do.
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + columns, x, inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / N + eps)
    weight = tl.load(weight_ptr + columns, inside, other=0.0).to(tl.float32)
    y = x * scale * weight
    tl.store(y_ptr + row * N + columns, y.to(y_ptr.dtype.element_ty), inside)


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + update, its RMSNorm) of rows [T, E]; x is overwritten by the sum. Without an update: (x, its norm)."""
    num_rows, n = x.shape
    y = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    if num_rows:
        other = x if update is None else update
        block = triton.next_power_of_2(n)
        rms_norm_kernel[(num_rows,)](
            x, other, weight, y, x.stride(0), other.stride(0), eps,
            N=n, BLOCK=block, ADD=update is not None, num_warps=_warps(block),
        )  # fmt: skip
    return x, y


def _warps(block: int) -> int:
    """16 values per thread: two 16-byte loads of half-precision numbers."""
    return min(16, max(1, block // 512))


def rows(compute_capability: tuple[int, int], dtype: str) -> list[LaunchRow]:
    """The launches that the compile report covers on one GPU."""
    return [pointwise_row("rms_norm", compute_capability, dtype, (1, size), _warps(size)) for size in ROW_SIZES]


def compile_spec(row: LaunchRow):
    """(kernel, signature, constexprs) of one row, for compiling without a GPU."""
    constexprs = {"N": row.block_n, "BLOCK": row.block_n, "ADD": True}
    kinds = {"x_stride": "i64", "update_stride": "i64", "eps": "fp32"} | dict.fromkeys(constexprs, "constexpr")
    signature = {name: kinds.get(name, POINTERS[row.dtype]) for name in rms_norm_kernel.arg_names}
    return rms_norm_kernel, signature, constexprs
