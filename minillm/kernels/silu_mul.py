"""SwiGLU's activation, silu(gate) * up, one Triton kernel over the stacked result of the gate and up projections.

In PyTorch (`ops.PlainOps.silu_mul`, the twin) silu writes a tensor that the product reads back.
Per value in bfloat16: silu 4 bytes, product 6; fused 6. Two fifths of the bytes and one of two launches are saved.
Built in lesson 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minillm.kernels.launch import POINTERS, LaunchRow
from minillm.kernels.pointwise import pointwise_row

BLOCK = 1024  # columns of one program
NUM_WARPS = 4  # 8 values per thread: one 16-byte load of half-precision numbers


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    gate_ptr = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(gate_ptr, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + N, inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * N + columns, out.to(out_ptr.dtype.element_ty), inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, F], of gate and up side by side in one tensor [T, 2 F]."""
    num_rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, n), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(n, BLOCK))
        silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), N=n, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def rows(compute_capability: tuple[int, int], dtype: str) -> list[LaunchRow]:
    """The launches that the compile report covers on one GPU."""
    return [pointwise_row("silu_mul", compute_capability, dtype, (1, BLOCK), NUM_WARPS)]


def compile_spec(row: LaunchRow):
    """(kernel, signature, constexprs) of one row, for compiling without a GPU: a feed-forward block of 8,192."""
    constexprs = {"N": 8192, "BLOCK": row.block_n}
    kinds = {"gate_up_stride": "i64"} | dict.fromkeys(constexprs, "constexpr")
    signature = {name: kinds.get(name, POINTERS[row.dtype]) for name in silu_mul_kernel.arg_names}
    return silu_mul_kernel, signature, constexprs
