"""From the stacked q, k, v of a step to pages: q/k norm, rotation and KV write, one Triton kernel.

The heads of a token are read once; q and k are turned in place, and k and v go to the token's row of the pages.
A row with slot -1 (the padding of a CUDA graph) writes no page. In PyTorch (`ops.PlainOps.turn_and_write`, the
twin) rotation passes over q and k seven times. Bytes per token in bfloat16, without q/k norm: rotation
14 (H + Hkv) D and write 8 Hkv D; fused (4 H + 10 Hkv) D. Two thirds are saved at H = 4 Hkv. Pages in 8 bits get
their codes and scales in the same pass, from values that never left the registers. Built in lesson 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minillm.eight_bit import LARGEST, SMALLEST_SCALE
from minillm.errors import ShapeError
from minillm.kernels.launch import POINTERS, LaunchRow
from minillm.kernels.pointwise import pointwise_row
from minillm.norm import RMSNorm

HEADS = 8  # heads of one program
HEAD_SIZES = (64, 128)  # that the compile report covers
SMALLEST = tl.constexpr(SMALLEST_SCALE)
TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # float32 numbers of this size are 1 apart: adding it rounds, ties to even


@triton.jit
def rope_kv_write_kernel(
    heads_ptr,  # [T, H + 2 Hkv, D]: q, k, v
    cos_ptr,  # [T, D]
    sin_ptr,  # [T, D], its second half without the sign
    q_weight_ptr,  # [D]
    k_weight_ptr,
    k_pages_ptr,  # [P * block_size, Hkv, D]
    v_pages_ptr,
    k_scale_ptr,  # [P * block_size, Hkv] float32 where the pages are in 8 bits, else None
    v_scale_ptr,
    slots_ptr,  # [T] int64
    heads_stride, angle_stride, k_stride, v_stride, eps,
    H: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    in_half = column < HALF
    inside = (head < H + 2 * HKV) & in_half
    is_q = head < H
    is_v = head >= H + HKV

    first_ptr = heads_ptr + row * heads_stride + head * (2 * HALF) + column
    a = tl.load(first_ptr, inside, other=0.0).to(tl.float32)
    b = tl.load(first_ptr + HALF, inside, other=0.0).to(tl.float32)
    if NORM:
        mean_square = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF)
        scale = tl.rsqrt(mean_square + eps)[:, None]
        weight_ptr = tl.where(is_q, q_weight_ptr + column, k_weight_ptr + column)
        a = tl.where(is_v, a, a * scale * tl.load(weight_ptr, inside, other=0.0).to(tl.float32))
        b = tl.where(is_v, b, b * scale * tl.load(weight_ptr + HALF, inside, other=0.0).to(tl.float32))

    cos = tl.load(cos_ptr + row * angle_stride + column, in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * angle_stride + HALF + column, in_half, other=0.0).to(tl.float32)
    dtype = heads_ptr.dtype.element_ty
    turned_a = tl.where(is_v, a, a * cos - b * sin).to(dtype)
    turned_b = tl.where(is_v, b, b * cos + a * sin).to(dtype)
    tl.store(first_ptr, turned_a, inside & ~is_v)
    tl.store(first_ptr + HALF, turned_b, inside & ~is_v)

    slot = tl.load(slots_ptr + row).to(tl.int64)
    to_page = inside & (slot >= 0)
    is_k = (head >= H) & (head < H + HKV)
    if k_scale_ptr is not None:
        turned_a, turned_b, scale = in_eight_bits(turned_a, turned_b, k_pages_ptr.dtype.element_ty, LARGEST)
        has_slot = (head < H + 2 * HKV) & (slot >= 0)
        tl.store(k_scale_ptr + slot * HKV + (head - H), scale, has_slot & is_k)
        tl.store(v_scale_ptr + slot * HKV + (head - H - HKV), scale, has_slot & is_v)
    k_ptr = k_pages_ptr + slot * k_stride + (head - H) * (2 * HALF) + column
    tl.store(k_ptr, turned_a, to_page & is_k)
    tl.store(k_ptr + HALF, turned_b, to_page & is_k)
    v_ptr = v_pages_ptr + slot * v_stride + (head - H - HKV) * (2 * HALF) + column
    tl.store(v_ptr, turned_a, to_page & is_v)
    tl.store(v_ptr + HALF, turned_b, to_page & is_v)


@triton.jit
def in_eight_bits(a, b, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Rows in two halves [HEADS, BLOCK] as codes and a scale [HEADS, 1] each: `eight_bit.quantize_rows`."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    # Compared as integers, the bits of NaN are larger than those of any number, so that none is overlooked.
    bits = tl.maximum(tl.abs(a).to(tl.int32, bitcast=True), tl.abs(b).to(tl.int32, bitcast=True))
    scale = tl.max(bits, 1).to(tl.float32, bitcast=True)[:, None] / LARGEST
    scale = tl.where(scale < SMALLEST, SMALLEST, scale)  # not the maximum, which drops NaN
    a, b = a / scale, b / scale
    if dtype == tl.int8:
        a, b = (a + TO_WHOLE) - TO_WHOLE, (b + TO_WHOLE) - TO_WHOLE
    return a.to(dtype), b.to(dtype), scale


def rope_kv_write(
    heads: torch.Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Turn q and k of heads [T, H + 2 Hkv, D] in place, and put k and v into the pages [P, block_size, Hkv, D].

    norms             RMSNorm of q and of k over D before the turn, or None
    cos, sin          [T, 1, D] as `Rope.at` makes them
    k_scale, v_scale  [P, block_size, Hkv] float32, contiguous, for pages of int8 or float8_e4m3fn

    Raises ShapeError for pages whose rows do not stand one after another.
    """
    num_tokens, num_stacked, head_size = heads.shape
    num_kv_heads = k_pages.shape[2]
    k_rows, v_rows = _rows_of(k_pages), _rows_of(v_pages)
    if not num_tokens:
        return
    q_norm, k_norm = norms or (None, None)
    half = head_size // 2
    block = triton.next_power_of_2(half)
    rope_kv_write_kernel[(num_tokens, triton.cdiv(num_stacked, HEADS))](
        heads, cos, sin,
        q_norm.weight if norms else cos, k_norm.weight if norms else cos,
        k_rows, v_rows, k_scale, v_scale, slot_mapping,
        heads.stride(0), cos.stride(0), k_rows.stride(0), v_rows.stride(0), q_norm.eps if norms else 0.0,
        H=num_stacked - 2 * num_kv_heads, HKV=num_kv_heads, HALF=half,
        HEADS=HEADS, BLOCK=block, NORM=norms is not None, LARGEST=LARGEST.get(k_pages.dtype, 0.0),
        num_warps=_warps(block),
    )  # fmt: skip


def _rows_of(pages: torch.Tensor) -> torch.Tensor:
    """Pages [P, block_size, Hkv, D] as rows [P * block_size, Hkv * D] of the same memory."""
    rows = pages.flatten(0, 1).flatten(1)
    if rows.data_ptr() != pages.data_ptr():  # a copy would take the write and be thrown away
        raise ShapeError(
            f"pages {list(pages.shape)} with strides {list(pages.stride())} are not rows of Hkv * D values in one "
            "stride; allocate them as KVCache does"
        )
    return rows


def _warps(block: int) -> int:
    """Each thread holds 8 values of either half: one 16-byte load of half-precision numbers for each."""
    return max(1, HEADS * block // 256)


def rows(compute_capability: tuple[int, int], dtype: str) -> list[LaunchRow]:
    """The launches that the compile report covers on one GPU, or with an 8-bit dtype those that a test compiles."""
    return [
        pointwise_row("rope_kv_write", compute_capability, dtype, (HEADS, size), _warps(size // 2), head_size=size)
        for size in HEAD_SIZES
    ]


def compile_spec(row: LaunchRow):
    """(kernel, signature, constexprs) of one row, for compiling without a GPU: 32 query heads on 8, with norms.

    row.dtype is that of the pages; 8-bit ones are written from bfloat16.
    """
    half, largest = row.head_size // 2, LARGEST.get(getattr(torch, row.dtype), 0.0)
    constexprs = {"H": 32, "HKV": 8, "HALF": half, "HEADS": row.block_m, "BLOCK": half, "NORM": True}
    constexprs |= {"LARGEST": largest} | ({} if largest else {"k_scale_ptr": None, "v_scale_ptr": None})
    kinds = dict.fromkeys(("heads_stride", "angle_stride", "k_stride", "v_stride"), "i64")
    kinds |= dict.fromkeys(("k_pages_ptr", "v_pages_ptr"), POINTERS[row.dtype]) | {"eps": "fp32", "slots_ptr": "*i64"}
    kinds |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32") | dict.fromkeys(constexprs, "constexpr")
    others = "*bf16" if largest else POINTERS[row.dtype]
    signature = {name: kinds.get(name, others) for name in rope_kv_write_kernel.arg_names}
    return rope_kv_write_kernel, signature, constexprs
