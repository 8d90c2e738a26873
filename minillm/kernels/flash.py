"""FlashAttention-2 as one Triton kernel, to be read beside Algorithm 1 of the paper.

Dense causal attention, nothing else: no pages, no window, no ragged batch; those are `paged_attention.py`, the
engine's kernel. One program owns one tile of queries of one head and walks the tiles of keys that it sees.
Built in lesson 08, after FlashAttention-2 (Dao 2023, arXiv 2307.08691); "line n" is a line of its Algorithm 1.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from minillm.errors import ShapeError
from minillm.kernels.launch import POINTERS, LaunchRow

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def flash_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    q_batch_stride, q_row_stride, q_head_stride,
    k_batch_stride, k_row_stride, k_head_stride,
    v_batch_stride, v_row_stride, v_head_stride,
    num_queries, num_keys, scale,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # line 3: one program per tile of queries, all at once. The last tile sees most keys, so it starts first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    kv_head = head // (H // HKV)
    q_ptr += batch * q_batch_stride + head * q_head_stride
    k_ptr += batch * k_batch_stride + kv_head * k_head_stride
    v_ptr += batch * v_batch_stride + kv_head * v_head_stride
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    positions = rows + num_keys - num_queries  # bottom-right: the last query sees every key
    columns, d = tl.arange(0, BLOCK_N), tl.arange(0, D)

    # line 4
    q = tl.load(tile_ptrs(q_ptr, rows, q_row_stride, d), mask=rows[:, None] < num_queries, other=0.0)

    # line 5
    o_i = tl.zeros([BLOCK_M, D], tl.float32)  # sum of exp(s - m) v
    l_i = tl.zeros([BLOCK_M], tl.float32)  # sum of exp(s - m)
    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)  # the largest s so far

    # line 6 in two passes. First the tiles of which every row sees every key, without a mask; then the diagonal.
    # Tiles above the diagonal are not read at all.
    first_position = tile * BLOCK_M + num_keys - num_queries
    full = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(first_position + BLOCK_M, num_keys)
    for start in range(0, full, BLOCK_N):
        keys = start + columns
        k = tl.load(tile_ptrs(k_ptr, keys, k_row_stride, d))  # line 7: [BLOCK_N, D]
        s = tl.dot(q, k.T, input_precision="ieee")  # line 8: [BLOCK_M, BLOCK_N]
        v = tl.load(tile_ptrs(v_ptr, keys, v_row_stride, d))
        o_i, l_i, m_i = online_softmax(o_i, l_i, m_i, s, v, scale)
    for start in range(full, end, BLOCK_N):
        keys = start + columns
        k = tl.load(tile_ptrs(k_ptr, keys, k_row_stride, d), mask=keys[:, None] < num_keys, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee")
        s = tl.where(keys[None, :] <= positions[:, None], s, -float("inf"))
        v = tl.load(tile_ptrs(v_ptr, keys, v_row_stride, d), mask=keys[:, None] < num_keys, other=0.0)
        o_i, l_i, m_i = online_softmax(o_i, l_i, m_i, s, v, scale)

    # lines 12 to 15. A row that has seen no key gives 0, and -inf for its logarithm.
    o_i = o_i / tl.where(l_i == 0, 1.0, l_i)[:, None]
    lse = (m_i + tl.log2(l_i)) / LOG2_E
    row = (batch * num_queries + rows) * H + head
    tl.store(tile_ptrs(out_ptr, row, D, d), o_i, mask=rows[:, None] < num_queries)
    tl.store(lse_ptr + row, lse, mask=rows < num_queries)


@triton.jit
def tile_ptrs(ptr, rows, row_stride, d):
    """Where the rows [N] of a matrix of D columns lie: [N, D]. 64-bit: a long context has more than 2^31 values."""
    return ptr + rows[:, None].to(tl.int64) * row_stride + d[None, :]


@triton.jit
def online_softmax(o_i, l_i, m_i, s, v, scale):
    """One more tile of scores s [BLOCK_M, BLOCK_N] and values v [BLOCK_N, D] for the running o_i, l_i and m_i.

    m_i and the exponents count in powers of two: `scale` holds log2(e), and exp2 is what the GPU computes in one go.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1) * scale)  # line 9
    base = tl.where(m_new == -float("inf"), 0.0, m_new)  # a row that has seen no key yet: avoid inf - inf
    p = tl.exp2(s * scale - base[:, None])
    shrink = tl.exp2(m_i - base)  # what was summed so far was relative to the old maximum
    l_i = l_i * shrink + tl.sum(p, 1)
    o_i = tl.dot(p.to(v.dtype), v, o_i * shrink[:, None], input_precision="ieee")  # line 10
    return o_i, l_i, m_new


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: LaunchRow
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of B sequences of equal lengths: (out [B, n, H, D], lse [B, n, H] float32).

    q [B, n, H, D], k and v [B, S, Hkv, D] of one dtype and any strides; D a power of two from 16 on. Queries end the
    keys. Raises ShapeError for other head sizes and for heads that cannot share K/V heads evenly.
    """
    batch, n, heads, head_size = q.shape
    num_keys, kv_heads = k.shape[1:3]
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads are not a multiple of {kv_heads} K/V heads")
    if head_size < 16 or head_size & (head_size - 1):
        raise ShapeError(f"head size {head_size} is not a power of two from 16 on; paged_attention pads others")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel():
        flash_attention_kernel[(triton.cdiv(n, row.block_m), batch * heads)](
            q, k, v, out, lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            n, num_keys, LOG2_E.value / math.sqrt(head_size),
            H=heads, HKV=kv_heads, D=head_size, BLOCK_M=row.block_m, BLOCK_N=row.block_n,
            num_warps=row.num_warps, num_stages=row.num_stages,
        )  # fmt: skip
    return out, lse


def compile_spec(row: LaunchRow):
    """(kernel, signature, constexprs) with which a row is compiled ahead of time: 32 query heads on 8 K/V heads."""
    kind = POINTERS[row.dtype]
    constexprs = {"H": 32, "HKV": 8, "D": row.head_size, "BLOCK_M": row.block_m, "BLOCK_N": row.block_n}
    kinds = {"lse_ptr": "*fp32", "scale": "fp32"} | dict.fromkeys(constexprs, "constexpr")
    signature = {
        name: kinds.get(name, kind if name.endswith("_ptr") else "i32") for name in flash_attention_kernel.arg_names
    }
    return flash_attention_kernel, signature, constexprs
