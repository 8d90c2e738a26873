"""A processor's KV write in eight bits: each row is quantised and put into its page in one loop, compiled by numba.

In PyTorch (`eight_bit.quantize_rows`, then four copies by index) the same takes fifteen operations, and with the few
rows of a decode starting those costs a tenth of the step. Codes and scales are equal, but for a value at the border
between two codes. Needs numba and is imported only where it is used. All of it stands in one file, because numba's
cache on disk does not notice when an imported function changes.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload

from minillm.eight_bit import LARGEST, SMALLEST_SCALE

SMALLEST = np.float32(SMALLEST_SCALE)
CODES = {torch.int8: types.int8, torch.float8_e4m3fn: types.uint8}
ROWS = {torch.float32: types.float32, torch.bfloat16: types.uint16}
"""What the kernel takes: bfloat16 arrives as its bits, fp8 leaves as them."""


class RowWriter:
    """write(k, v, layer, slots): rows k, v [T, Hkv, D] into the 8-bit pages of a KVLayer, at slots [T].

    dtype, kv_dtype  of the rows and of the codes; the kernel is compiled here, or read from numba's cache

    Raises KeyError for types that it does not take, IndexError for a slot that the pages do not have.
    """

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype):
        rows, codes = ROWS[dtype], CODES[kv_dtype]
        scales = types.Array(types.float32, 3, "C")
        signature = types.void(
            types.Array(rows, 3, "A"), types.Array(codes, 4, "C"), scales, types.int64[::1], types.float32
        )
        self._kernel = _compiled(signature)
        self._largest = np.float32(LARGEST[kv_dtype])

    def __call__(self, k: torch.Tensor, v: torch.Tensor, layer, slots: torch.Tensor) -> None:
        slots = slots.numpy()
        self._kernel(_bits(k), _bits(layer.k), layer.k_scale.numpy(), slots, self._largest)
        self._kernel(_bits(v), _bits(layer.v), layer.v_scale.numpy(), slots, self._largest)


def _bits(x: torch.Tensor) -> np.ndarray:
    as_bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return x.view(as_bits[x.dtype]).numpy() if x.dtype in as_bits else x.numpy()


def _compiled(signature):
    try:
        return numba.njit([signature], cache=True, nogil=True, error_model="numpy")(_write)
    except RuntimeError:  # "no locator available": nowhere to write a cache
        return numba.njit([signature], nogil=True, error_model="numpy")(_write)


def _write(rows, pages, scales, slots, largest_code):
    """rows [T, Hkv, D], pages [P, block_size, Hkv, D], scales [P, block_size, Hkv], slots [T]."""
    block_size = pages.shape[1]
    row = np.empty(rows.shape[2], np.float32)
    for t in range(rows.shape[0]):
        if slots[t] < 0 or slots[t] >= pages.shape[0] * block_size:
            raise IndexError("a slot lies outside the pages")
        block, offset = slots[t] // block_size, slots[t] % block_size
        for h in range(rows.shape[1]):
            most = np.uint32(0)
            for d in range(len(row)):
                row[d] = _widen(rows[t, h, d])
                # Compared as integers, the bits of NaN are larger than those of any number.
                most = max(most, np.uint32(np.float32(row[d]).view(np.uint32) & np.uint32(0x7FFFFFFF)))
            scale = np.uint32(most).view(np.float32) / largest_code
            scale = SMALLEST if scale < SMALLEST else scale
            scales[block, offset, h] = scale
            for d in range(len(row)):
                pages[block, offset, h, d] = _code(row[d] / scale, pages)


def _widen(x):
    """float32 of a number: bfloat16 is the upper half of one."""


@overload(_widen)
def _widen_of(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def _code(x, pages):
    """The code nearest to x, in halves the even one. What NaN becomes does not matter: its row's scale is NaN."""


@overload(_code)
def _code_of(x, pages):
    if pages.dtype == types.int8:
        return lambda x, pages: np.int8(np.rint(x))
    return to_fp8


def to_fp8(x, pages):
    """Bits of float8_e4m3fn: sign, 4 bits of exponent counted from -7, 3 bits. |x| is at most 448, but for rounding."""
    bits = np.float32(x).view(np.uint32)
    sign, magnitude = np.uint32(bits >> np.uint32(24)) & np.uint32(128), np.uint32(bits & np.uint32(0x7FFFFFFF))
    half = np.uint32(0x7FFFF) + (np.uint32(magnitude >> np.uint32(20)) & np.uint32(1))
    normal = np.uint32(np.uint32(magnitude + half) >> np.uint32(20)) - np.uint32(120 << 3)
    tiny = np.uint32(np.rint(np.abs(x) * np.float32(512.0)))  # exponent 0: eighths of 2**-6
    code = tiny if magnitude < np.uint32(121 << 23) else normal
    return np.uint8(sign | np.uint32(code))
