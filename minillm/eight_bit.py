"""A row of K or V in eight bits: D codes and one float32 scale, the value of one step.

Each token and K/V head has a scale of its own, so a row can be written without looking at any other and one large
value spoils D values and not a whole block. int8 spaces its steps evenly; fp8 e4m3 spaces them by size, finer near
zero and coarser at the top. 1 + 4 / D bytes per value. `cpu_rows.py` and `kernels/rope_kv_write.py` do in one pass
what is said here in PyTorch. With fewer bits than eight, channels of K that are large in every token want scales of
their own (KIVI, Liu et al. 2024, arXiv 2402.02750). Lesson 16; e4m3 after "FP8 Formats for Deep Learning"
(Micikevicius et al. 2022, arXiv 2209.05433).
"""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The formats, and the largest code of each."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of a row of zeros, which it gives back. Below it a GPU may take numbers for zero."""
SCALE_BYTES = 4


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] as (codes [..., D] of an 8-bit dtype, scales [...] float32): x is about codes * scale.

    The largest value of a row becomes the largest code, so none overflows. int8 is off by at most half a step, which
    is 1/254 of that value; fp8 by at most 1/16 of each value itself, or 1/458,752 of the largest where that is more.
    A row that holds NaN or an infinity gets a scale that is not finite, and gives back no finite value.
    """
    largest = torch.linalg.vector_norm(x, float("inf"), dim=-1, dtype=torch.float32)
    scale = (largest / LARGEST[dtype]).clamp_(min=SMALLEST_SCALE)
    codes = x / scale[..., None]
    return (codes if dtype.is_floating_point else codes.round_()).to(dtype), scale


def restore_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes [..., D] * scale [...], computed in float32, as a new tensor of `dtype`."""
    values = codes.float() if codes.dtype == torch.int8 else fp8_values(codes)
    return values.mul_(scale[..., None]).to(dtype)


def fp8_values(codes: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn as float32, but NaN as 480: a twelfth of the time that `codes.float()` takes on a CPU.

    The bits of a code, moved to where float32 has its sign, exponent and mantissa, are the code's value x 2^-120,
    for float32 counts exponents from -127 and e4m3 from -7.
    """
    bits = codes.view(torch.int8).to(torch.int32).bitwise_left_shift_(20)
    return bits.bitwise_and_(-0x7810_0000).view(torch.float32).mul_(2.0**120)  # 0x87F0_0000: sign, 4 and 3 bits


def bytes_per_value(dtype: torch.dtype, head_size: int) -> float:
    """What a value of a row of `head_size` takes, its share of the scale included."""
    return dtype.itemsize + (SCALE_BYTES / head_size if dtype in LARGEST else 0)
