"""y = x @ w.T for a few rows x and a matrix w of int8, fp8 or int4 codes: the codes are widened in registers.

A decode step uses each weight once, so it takes as long as the weights take to arrive: half the bytes, half the time,
as long as widening keeps up. Two things make that so. Enough programs: 4,096 rows of a matrix are 64 tiles for the 132
processors of an H100, so each tile's sum over K is shared out to `splits` programs and their parts are added up after
(split-K; without atomics, so that a sum is the same every time). And few instructions per code: a conversion from 4
bits to float takes seven, but the code can be written into the mantissa of a number that is known, which takes less
than two. The trick is Kim et al. 2022 (arXiv 2211.10017), as in FasterTransformer. Built in lesson 16.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
import triton
import triton.language as tl

from minillm.kernels.launch import EVERY, POINTERS, LaunchRow
from minillm.kernels.sum_splits import sum_splits
from minillm.quantize import ChannelQuantized, PackedInt4

MOST_ROWS = 64
"""Rows of x up to which these kernels are used; with more the codes are widened to memory for the library's product."""
BLOCK_K = 128  # int8 codes of a row in one step: the 128 bytes of a line of the cache; int4: a group
PROGRAMS_PER_SM = 4  # to have enough loads under way
MIN_STEPS = 2  # of a split: below it the parts cost more than they bring

# kernel, block_m, block_n, num_warps, num_stages, reason
_TABLE = (
    ("int8_linear", 16, 64, 4, 4, "16 rows are one mma tile; 32 KB of codes under way per program"),
    ("int8_linear", 64, 64, 4, 3, "each code is widened once for 64 rows"),
    ("fp8_linear", 16, 64, 4, 4, "as int8"),
    ("fp8_linear", 64, 64, 4, 3, "as int8"),
    ("int4_linear", 16, 64, 4, 4, "as int8; 128 codes wide it would be 3.3 instead of 4.2 instructions per code"),
    ("int4_linear", 64, 64, 8, 3, "each code is widened once for 64 rows"),
)
ROWS = tuple(
    LaunchRow(kernel, capability, 0, dtype, "decode" if sizes[0] == 16 else "rows", *sizes)
    for (kernel, *sizes), capability, dtype in product(_TABLE, EVERY, ("float16", "bfloat16"))
)

UNPACK = """{ .reg .b32 low, high, top;
    mov.b32 top, TOP;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.b32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, top, 0x4140;
    prmt.b32 $1, low, top, 0x4342;
    prmt.b32 $2, high, top, 0x4140;
    prmt.b32 $3, high, top, 0x4342; }"""
"""Four bytes in one register become eight codes in four, each below the byte `top` that makes it a half number."""
UNPACK_FLOAT16 = tl.constexpr(UNPACK.replace("TOP", "0x64646464"))
UNPACK_BFLOAT16 = tl.constexpr(UNPACK.replace("TOP", "0x43434343"))


@triton.jit(do_not_specialize=["num_rows", "steps_per_split"])  # or each size of a step were compiled for itself
def channel_kernel(
    x_ptr, x_scale_ptr, codes_ptr, scale_ptr, y_ptr, num_rows, x_stride, n_stride, k_stride, steps_per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile of N, tile of rows, split) sums its share of K: codes as they are, scales at the end.

    x_scale_ptr         of each row of x, where x has codes as well; None where it has numbers
    n_stride, k_stride  N and K, which are also the strides of the rows of y and of the codes
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty if x_scale_ptr is None else tl.float16  # which holds every fp8 number
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    n_inside, m_inside = n < n_stride, m < num_rows
    first, last = split * steps_per_split * BLOCK_K, (split + 1) * steps_per_split * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + m[:, None] * x_stride + k[None, :]
    code_ptrs = codes_ptr + n[None, :] * k_stride + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(first, min(last, k_stride), BLOCK_K, num_stages=STAGES):
        k_inside = tl.arange(0, BLOCK_K) < k_stride - start
        x = tl.load(x_ptrs, m_inside[:, None] & k_inside[None, :], other=0.0)
        codes = tl.load(code_ptrs, n_inside[None, :] & k_inside[:, None], other=0.0)
        acc = tl.dot(x.to(dtype), codes.to(dtype), acc)
        x_ptrs += BLOCK_K
        code_ptrs += BLOCK_K
    y = acc * tl.load(scale_ptr + n, n_inside, other=0.0)[None, :]
    if x_scale_ptr is not None:
        y *= tl.load(x_scale_ptr + m, m_inside, other=0.0)[:, None]
    y_ptrs = y_ptr + (split * num_rows + m[:, None]) * n_stride + n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), m_inside[:, None] & n_inside[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_groups", "steps_per_split"])
def int4_kernel(
    x_ptr, codes_ptr, pairs_ptr, y_ptr, num_rows, x_stride, n_stride, num_groups, steps_per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As above, a group of K at a time, with y = scale * sum(code * x) + minimum * sum(x) for each group."""
    HALF: tl.constexpr = GROUP // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    OFFSET: tl.constexpr = 1024 if dtype == tl.float16 else 128  # what `unpack` adds to each code
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    n_inside, m_inside = n < n_stride, m < num_rows
    first = split.to(tl.int64) * steps_per_split
    j = tl.arange(0, HALF)
    x_ptrs = x_ptr + m[:, None] * x_stride + first * GROUP + j[None, :]
    byte_ptrs = codes_ptr + (first * n_stride + n[None, :]) * HALF + j[:, None]
    pair_ptrs = pairs_ptr + first * n_stride + n
    ones = tl.full([HALF, BLOCK_N], 1.0, dtype)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in tl.range(first, min(first + steps_per_split, num_groups), num_stages=STAGES):
        x_low = tl.load(x_ptrs, m_inside[:, None], other=0.0)
        x_high = tl.load(x_ptrs + HALF, m_inside[:, None], other=0.0)
        low, high = unpack(tl.load(byte_ptrs, n_inside[None, :], other=0), dtype, ASM)
        scale, minimum = unpair(tl.load(pair_ptrs, n_inside, other=0), dtype)
        coded = tl.dot(x_high, high, tl.dot(x_low, low))
        sums = tl.dot(x_high, ones, tl.dot(x_low, ones))  # of x, in the layout of acc, where a product leaves them
        acc += coded * scale[None, :] + sums * (minimum - OFFSET * scale)[None, :]
        x_ptrs += GROUP
        byte_ptrs += n_stride * HALF
        pair_ptrs += n_stride
    y_ptrs = y_ptr + (split * num_rows + m[:, None]) * n_stride + n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), m_inside[:, None] & n_inside[None, :])


@triton.jit
def unpack(byte, dtype: tl.constexpr, ASM: tl.constexpr):
    """Low and high half of each byte as OFFSET + code, exactly: 1024 is 0x6400 in float16 and 128 is 0x4300 in
    bfloat16, and there the last four bits of the mantissa count ones."""
    if ASM:
        text: tl.constexpr = UNPACK_FLOAT16 if dtype == tl.float16 else UNPACK_BFLOAT16
        low, high = tl.inline_asm_elementwise(text, "=r,=r,=r,=r,r", [byte], (tl.int16, tl.int16), is_pure=True, pack=4)
    else:  # the same, for the interpreter
        top: tl.constexpr = 0x6400 if dtype == tl.float16 else 0x4300
        low, high = (byte & 15).to(tl.int16) | top, (byte >> 4).to(tl.int16) | top
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@triton.jit
def unpair(pair, dtype: tl.constexpr):
    """Two half numbers that were loaded as one of 32 bits, which is the least that can be copied ahead, in float32."""
    first = (pair & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    second = (pair >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return first.to(tl.float32), second.to(tl.float32)


def int8_rows(x: torch.Tensor, weight: ChannelQuantized, splits: int | None = None, row: LaunchRow | None = None):
    """x [T, K] @ weight.T -> [T, N] in the dtype of x.

    splits  programs that share a sum over K; None: as many as keep the GPU busy
    row     launch row in place of the table's
    """
    return _channels(x, None, weight, x.dtype, splits, row or find_row("int8_linear", len(x)))


def fp8_rows(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: ChannelQuantized,
    dtype: torch.dtype,
    splits: int | None = None,
    row: LaunchRow | None = None,
):
    """As `int8_rows`, for codes x [T, K] of float8_e4m3fn with a scale for each row; y has `dtype`."""
    return _channels(x, x_scale, weight, dtype, splits, row or find_row("fp8_linear", len(x)))


def _channels(x, x_scale, weight: ChannelQuantized, dtype: torch.dtype, splits: int | None, row: LaunchRow):
    n, k = weight.shape
    x = _with_dense_rows(x)

    def launch(grid, y, steps_per_split):
        channel_kernel[grid](
            x, x_scale, weight.codes, weight.scale, y, len(x), x.stride(0), n, k, steps_per_split,
            row.block_m, row.block_n, BLOCK_K, row.num_stages, num_warps=row.num_warps, num_stages=row.num_stages,
        )  # fmt: skip

    return _split_over_k(x, n, dtype, triton.cdiv(k, BLOCK_K), splits, row, launch)


def int4_rows(x: torch.Tensor, weight: PackedInt4, splits: int | None = None, row: LaunchRow | None = None):
    """As `int8_rows`, for x of a half dtype; the scales have the same."""
    x, row = _with_dense_rows(x), row or find_row("int4_linear", len(x))
    n, groups = weight.shape[0], len(weight.codes)
    pairs = weight.scale_and_minimum.view(torch.int32)

    def launch(grid, y, steps_per_split):
        int4_kernel[grid](
            x, weight.codes, pairs, y, len(x), x.stride(0), n, groups, steps_per_split,
            row.block_m, row.block_n, weight.group, row.num_stages, isinstance(int4_kernel, triton.JITFunction),
            num_warps=row.num_warps, num_stages=row.num_stages,
        )  # fmt: skip

    return _split_over_k(x, n, x.dtype, groups, splits, row, launch)


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _split_over_k(
    x, n: int, dtype: torch.dtype, steps: int, splits: int | None, row: LaunchRow, launch
) -> torch.Tensor:
    """Launch a kernel whose loop over K has `steps` steps, in as many splits as wanted, and add up their parts."""
    y = torch.empty((len(x), n), dtype=dtype, device=x.device)
    if not len(x):
        return y
    tiles = triton.cdiv(n, row.block_n), triton.cdiv(len(x), row.block_m)
    splits = splits or num_splits(tiles[0] * tiles[1], steps, _num_sms(x.device))
    steps_per_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, steps_per_split)  # none of them is empty
    if splits == 1:
        launch((*tiles, 1), y, steps_per_split)
        return y
    parts = torch.empty((splits, *y.shape), dtype=torch.float32, device=x.device)
    launch((*tiles, splits), parts, steps_per_split)
    return sum_splits(parts, y)


def num_splits(tiles: int, steps: int, num_sms: int) -> int:
    """Programs per tile, so that together they fill every processor PROGRAMS_PER_SM times."""
    return max(1, min(triton.cdiv(PROGRAMS_PER_SM * num_sms, tiles), steps // MIN_STEPS))


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def find_row(kernel: str, num_rows: int) -> LaunchRow:
    """The row for so many rows of x: tiles of 16 where they are enough, of 64 where not."""
    phase = "decode" if num_rows <= 16 else "rows"
    return next(row for row in ROWS if (row.kernel, row.phase) == (kernel, phase))


def rows(compute_capability: tuple[int, int], dtype: str) -> list[LaunchRow]:
    """The launches that the compile report covers on one GPU."""
    found = [row for row in ROWS if (row.compute_capability, row.dtype) == (compute_capability, dtype)]
    return [row for row in found if row.kernel != "fp8_linear" or compute_capability >= (8, 9)]


def compile_spec(row: LaunchRow):
    """(kernel, signature, constexprs) of one row, for compiling without a GPU; int4 in groups of 128."""
    constexprs = {"BLOCK_M": row.block_m, "BLOCK_N": row.block_n, "STAGES": row.num_stages}
    kernel = int4_kernel if row.kernel == "int4_linear" else channel_kernel
    constexprs |= {"GROUP": 128, "ASM": True} if kernel is int4_kernel else {"BLOCK_K": BLOCK_K}
    fp8 = row.kernel == "fp8_linear"
    if kernel is channel_kernel and not fp8:
        constexprs["x_scale_ptr"] = None
    codes = {"int8_linear": "*i8", "int4_linear": "*u8", "fp8_linear": POINTERS["float8_e4m3fn"]}[row.kernel]
    kinds = {"codes_ptr": codes, "x_ptr": codes if fp8 else POINTERS[row.dtype], "y_ptr": POINTERS[row.dtype]}
    kinds |= {"x_scale_ptr": "*fp32", "scale_ptr": "*fp32", "pairs_ptr": "*i32"}
    kinds |= dict.fromkeys(constexprs, "constexpr")
    return kernel, {name: kinds.get(name, "i32") for name in kernel.arg_names}, constexprs
