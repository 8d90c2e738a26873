"""Decode attention on a processor: numba kernels that read K and V where they lie, block by block.

A decode step is one query row per request against its whole context: too thin for a matrix product, and
copying the context together first would cost more than the arithmetic. So each thread walks the block
tables of its share of the keys (`cpu_plan.py` makes equal shares): a tile of keys is widened to float32,
scored against all heads, later the values the same way. Rows whose keys were shared out to several
threads are merged by their log-sum-exp, as in Flash-Decoding. bfloat16 arrives as its uint16 bits, fp8 as uint8.
Needs numba and is imported only where it is used. All of it stands in one file, because numba's cache on
disk does not notice when an imported function changes. Read in lesson 11.
"""

from __future__ import annotations

import math
import threading

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from minillm.attention.cpu_plan import READ, REQUEST, SLOT, START, STOP, Pieces, Read, cut
from minillm.kv_cache import KVLayer

TILE = 32  # keys widened at a time: 24 KiB for 3 K/V heads of 64, which stays in the first-level cache
LOG2_E = np.float32(math.log2(math.e))
LN_2 = np.float32(math.log(2.0))
TAYLOR = tuple(np.float32(math.log(2.0) ** k / math.factorial(k)) for k in range(7))  # of 2**f around 0
CACHE_LINE = 64  # bytes
ONE_AT_A_TIME = threading.Lock()  # numba's plainest threading layer ends the process when two threads enter it
# Sums may be reordered, as in any vectorised sum. NaN keeps its meaning: a broken model must show.
REORDER = {"reassoc", "contract", "arcp", "nsz"}
NO_SCALES = np.empty((0, 0, 0), np.float32)


def _jit(**options):
    """numba.njit, compiled once per machine where its cache folder can be written, else once per process."""

    def compile_later(function):
        try:
            return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
        except RuntimeError:  # "no locator available": nowhere to write
            return numba.njit(nogil=True, error_model="numpy", **options)(function)

    return compile_later


def decode(q: torch.Tensor, kv_layer: KVLayer, tables: np.ndarray, pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of q [R, H, D] (contiguous) per read, against the pages: (out [R, H, D], lse [R, H] float32)."""
    rows, heads, size = q.shape
    out = torch.empty_like(q)
    out_array = _array(out)
    lse = np.empty((rows, heads), np.float32)
    part_out = np.empty((pieces.num_slots, heads, size), np.float32)
    part_lse = np.empty((pieces.num_slots, heads), np.float32)
    scale = np.float32(1.0 / math.sqrt(size))
    with ONE_AT_A_TIME:
        decode_on_threads(
            *(_array(q), _array(kv_layer.k), _array(kv_layer.v), _scales(kv_layer.k_scale), _scales(kv_layer.v_scale)),
            *(tables, pieces.pieces, pieces.first_piece, scale, out_array, lse, part_out, part_lse),
        )
    if pieces.num_slots:
        _merge_splits(pieces.splits, part_out, part_lse, out_array, lse)
    return out, torch.from_numpy(lse)


def use_threads(num_threads: int) -> None:
    """Make numba's pool as large as torch's. Once per step: to change it around every call costs more than a layer."""
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))


def warm_up(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Compile the kernel for a dtype and what the pages hold, or read it from numba's cache."""
    num_threads = torch.get_num_threads()
    q, pages = torch.zeros(1, 1, 8, dtype=dtype), torch.zeros(1, 1, 1, 8, dtype=kv_dtype)
    scales = (None, None) if kv_dtype == dtype else (torch.ones(1, 1, 1),) * 2
    for num_keys, workers in ((1, 1), (32, 2)):  # alone, and cut in two and merged
        table = np.zeros((1, num_keys), np.int32)
        decode(q, KVLayer(pages, pages, None, *scales), table, cut([Read(0, 0, 0, num_keys)], workers))
    torch.set_num_threads(num_threads)  # starting numba's OpenMP pool gives torch, which shares it, all cores


def _array(x: torch.Tensor) -> np.ndarray:
    """A tensor's memory as numba reads it."""
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return x.view(bits[x.dtype]).numpy() if x.dtype in bits else x.numpy()


def _scales(scale: torch.Tensor | None) -> np.ndarray:
    return NO_SCALES if scale is None else scale.numpy()


@_jit(parallel=True)
def decode_on_threads(q, k, v, k_scale, v_scale, tables, pieces, first_piece, scale, out, lse, part_out, part_lse):
    """Attention of the rows in `pieces`, written to out [R, H, D] and lse [R, H], one thread per worker.

    q           [R, H, D]  float32, or bfloat16 as uint16; out alike
    k, v        [P, block_size, Hkv, D]  of the same type, C-contiguous; or int8, or fp8 e4m3 as uint8, and then
                k_scale, v_scale [P, block_size, Hkv] float32 are read beside them
    tables      [B, max_blocks] int32
    pieces      [N, 5] int32, first_piece [W + 1], splits [M, 3]: see cpu_plan.Pieces
    scale       multiplies the scores
    part_out, part_lse  [slots, H, D] and [slots, H] float32: room for the pieces of rows that were cut
    """
    for worker in numba.prange(len(first_piece) - 1):
        begin, end = first_piece[worker], first_piece[worker + 1]
        _work(begin, end, q, k, v, k_scale, v_scale, tables, pieces, scale, out, lse, part_out, part_lse)


@_jit(fastmath=REORDER)
def _work(begin, end, q, k, v, k_scale, v_scale, tables, pieces, scale, out, lse, part_out, part_lse):
    """One worker's pieces begin .. end - 1, one after another."""
    heads, size = q.shape[1], q.shape[2]
    longest = 0
    for i in range(begin, end):
        longest = max(longest, pieces[i, STOP] - pieces[i, START])
    p = np.empty((heads, longest + 4), np.float32)
    scaled = np.empty((heads, size), np.float32)
    mixed = np.empty((heads, size), np.float32)
    tile = np.empty((TILE, k.shape[2], size), np.float32)
    for i in range(begin, end):
        read, slot = pieces[i, READ], pieces[i, SLOT]
        for h in range(heads):
            for d in range(size):
                scaled[h, d] = _widen(q[read, h, d]) * (scale * LOG2_E)
        table, start, stop = tables[pieces[i, REQUEST]], pieces[i, START], pieces[i, STOP]
        row_lse = lse[read] if slot < 0 else part_lse[slot]
        _attend(scaled, k, v, k_scale, v_scale, table, start, stop, tile, p, mixed, row_lse)
        if slot < 0:
            _store(mixed, out[read])
        else:
            _store(mixed, part_out[slot])


@_jit(fastmath=REORDER)
def _attend(q, k, v, k_scale, v_scale, table, start, stop, tile, p, mixed, lse):
    """Scaled queries q [H, D] of one row against the keys start .. stop - 1 of its block table.

    Leaves the output in mixed [H, D] and its log-sum-exp in lse [H]; p [H, stop - start + 4] is scratch.
    """
    heads, size = mixed.shape
    group = heads // k.shape[2]
    num_keys = stop - start
    for first in range(0, num_keys, TILE):
        rows = min(TILE, num_keys - first)
        _load(tile, k, k_scale, table, start + first, rows)
        last = first + rows == num_keys
        next_first = 0 if last else first + rows
        for h in range(heads):
            # Ask for a share of the next tile now, so that memory works while this head computes.
            _ask_for(v if last else k, table, start + next_first, min(TILE, num_keys - next_first), h, heads)
            _score(q[h], tile, h // group, rows, p[h], first)

    for h in range(heads):
        highest = _max(p[h], num_keys)
        total = np.float32(0.0)
        for i in range(num_keys):
            p[h, i] = _exp2(p[h, i] - highest)
            total += p[h, i]
        for i in range(num_keys):
            p[h, i] /= total
        for i in range(num_keys, num_keys + 4):
            p[h, i] = 0.0
        for d in range(size):
            mixed[h, d] = 0.0
        lse[h] = (highest + math.log2(total)) * LN_2

    for first in range(0, num_keys, TILE):
        rows = min(TILE, num_keys - first)
        _load(tile, v, v_scale, table, start + first, rows)
        for h in range(heads):
            _ask_for(v, table, start + first + TILE, min(TILE, num_keys - first - TILE), h, heads)
            _mix(p[h], first, tile, h // group, rows, mixed[h])


@_jit(fastmath=REORDER)
def _load(tile, pages, scales, table, first, rows):
    """tile[:rows] = rows first .. first + rows - 1 of the context, widened; zeros up to a multiple of 4 rows."""
    block_size, heads, size = pages.shape[1], pages.shape[2], pages.shape[3]
    for i in range(rows):
        block, offset = table[(first + i) // block_size], (first + i) % block_size
        for h in range(heads):
            scale = _scale(pages, scales, block, offset, h)
            for d in range(size):
                tile[i, h, d] = _widen(pages[block, offset, h, d]) * scale
    for i in range(rows, (rows + 3) // 4 * 4):
        for h in range(heads):
            for d in range(size):
                tile[i, h, d] = 0.0


@_jit(fastmath=REORDER)
def _score(q, tile, kv_head, rows, p, first):
    """p[first + i] = q . tile[i, kv_head]."""
    for i in range(rows):
        score = np.float32(0.0)
        for d in range(len(q)):
            score += q[d] * tile[i, kv_head, d]
        p[first + i] = score


@_jit(fastmath=REORDER)
def _mix(p, first, tile, kv_head, rows, mixed):
    """mixed += sum over i of p[first + i] * tile[i, kv_head]; four rows per pass save loads of `mixed`."""
    for i in range(0, rows, 4):
        p0, p1, p2, p3 = p[first + i], p[first + i + 1], p[first + i + 2], p[first + i + 3]
        for d in range(len(mixed)):
            mixed[d] += (
                p0 * tile[i, kv_head, d]
                + p1 * tile[i + 1, kv_head, d]
                + p2 * tile[i + 2, kv_head, d]
                + p3 * tile[i + 3, kv_head, d]
            )


@_jit()
def _merge_splits(splits, part_out, part_lse, out, lse):
    """Rows that were cut into slots begin .. end - 1: their average, weighted by exp(lse)."""
    mixed = np.empty(part_out.shape[1:], np.float32)
    for i in range(len(splits)):
        read, begin, end = splits[i, 0], splits[i, 1], splits[i, 2]
        for h in range(mixed.shape[0]):
            highest = part_lse[begin, h]
            for slot in range(begin + 1, end):
                highest = max(highest, part_lse[slot, h])
            total = np.float32(0.0)
            for slot in range(begin, end):
                total += math.exp(part_lse[slot, h] - highest)
            lse[read, h] = highest + math.log(total)
            for d in range(mixed.shape[1]):
                mixed[h, d] = 0.0
                for slot in range(begin, end):
                    mixed[h, d] += math.exp(part_lse[slot, h] - lse[read, h]) * part_out[slot, h, d]
        _store(mixed, out[read])


@_jit()
def _store(mixed, out):
    for h in range(mixed.shape[0]):
        for d in range(mixed.shape[1]):
            out[h, d] = _narrow(mixed[h, d], out)


@_jit(fastmath=True)
def _max(x, n):
    highest = x[0]
    for i in range(1, n):
        highest = max(highest, x[i])
    return highest


@_jit(fastmath=REORDER)
def _exp2(x):
    """2**x for x <= 0 in float32, relative error 2e-7; plain arithmetic, so that the compiler vectorises it."""
    x = np.float32(-126.0) if x < np.float32(-126.0) else x  # below, float32 has no normal numbers
    whole = np.floor(x + np.float32(0.5))
    f = x - whole  # -0.5 .. 0.5
    y = TAYLOR[6]
    y = y * f + TAYLOR[5]
    y = y * f + TAYLOR[4]
    y = y * f + TAYLOR[3]
    y = y * f + TAYLOR[2]
    y = y * f + TAYLOR[1]
    y = y * f + TAYLOR[0]
    exponent = (np.int32(whole) + np.int32(127)) << np.int32(23)  # the bits of 2**whole
    return y * np.int32(exponent).view(np.float32)


def _widen(x):
    """float32 of a stored number: bfloat16 is the upper half of a float32."""


@overload(_widen)
def _widen_of(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    if x == types.int8:
        return lambda x: np.float32(x)
    if x == types.uint8:
        return lambda x: _widen_fp8(x)
    return lambda x: x


@_jit()
def _widen_fp8(x):
    """float32 of a float8_e4m3fn: sign, 4 bits of exponent counted from -7, 3 bits; a table is 3 times as slow.

    Its exponents are moved up by 120 as integers. A factor of 2**120, as in `eight_bit.fp8_values`, may be multiplied
    with the scale first when sums are reordered, and overflow. The NaN code becomes 480; a row's scale says NaN.
    """
    bits = np.uint32(x)  # from here on 32 bits wide: a Python number in between would make all of it 64
    sign, magnitude = np.uint32(bits & np.uint32(128)) << np.uint32(24), np.uint32(bits & np.uint32(127))
    normal = np.uint32((magnitude << np.uint32(20)) + np.uint32(120 << 23)).view(np.float32)
    tiny = np.float32(np.int32(magnitude)) * np.float32(2.0**-9)  # exponent 0: eighths of 2**-6
    value = tiny if magnitude < np.uint32(8) else normal
    return np.uint32(np.float32(value).view(np.uint32) | sign).view(np.float32)


def _scale(pages, scales, block, row, head):
    """What the numbers of a row are multiplied with; 1 where the pages hold the numbers themselves."""


@overload(_scale)
def _scale_of(pages, scales, block, row, head):
    if pages.dtype in (types.int8, types.uint8):
        return lambda pages, scales, block, row, head: scales[block, row, head]
    return lambda pages, scales, block, row, head: np.float32(1.0)


def _narrow(x, out):
    """A float32 as `out` stores it: bfloat16 is rounded to the nearest, ties to even."""


@overload(_narrow)
def _narrow_of(x, out):
    if out.dtype != types.uint16:
        return lambda x, out: x

    def to_bfloat16_bits(x, out):
        if x != x:
            return np.uint16(0x7FC0)
        bits = np.float32(x).view(np.uint32)
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16(np.uint32(bits + half) >> np.uint32(16))

    return to_bfloat16_bits


@_jit()
def _ask_for(pages, table, first, rows, part, parts):
    """Prefetch every `parts`-th of the context rows first .. first + rows - 1, beginning with number `part`."""
    block_size, heads, size = pages.shape[1], pages.shape[2], pages.shape[3]
    step = CACHE_LINE // pages.itemsize
    for i in range(first + part, first + rows, parts):
        for h in range(heads):
            for d in range(0, size, step):
                _prefetch(pages, table[i // block_size], i % block_size, h, d)


@intrinsic
def _prefetch(typingctx, array, block, row, head, d):
    """Ask for the cache line of array[block, row, head, d] without waiting for it."""

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        kinds = signature.args[1:]
        indices = [context.cast(builder, x, kind, types.intp) for x, kind in zip(args[1:], kinds, strict=True)]
        pointer = cgutils.get_item_pointer(context, builder, signature.args[0], view, indices)
        byte_pointer, number = ir.PointerType(ir.IntType(8)), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep_close, data = number(0), number(3), number(1)
        builder.call(function, [builder.bitcast(pointer, byte_pointer), read, keep_close, data])
        return context.get_dummy_value()

    return types.void(array, block, row, head, d), codegen
