"""Weights and activations as 8-bit floats, e4m3: both sides of the product are rounded, so it runs at twice the rate.

    y[t, n] = x_scale[t] * w_scale[n] * sum over k of x_code[t, k] * w_code[n, k]

Each row of the weight and each row of x, a token, has a scale that puts its largest value at the largest code, 448.
A token's scale is found when it arrives, so none overflows, and one that is not finite spoils no other. e4m3 has three
bits of mantissa: a value is off by up to 1/16 of itself. After "FP8 Formats for Deep Learning" (Micikevicius et al.
2022, arXiv 2209.05433). Lesson 16.
"""

from __future__ import annotations

from collections import Counter

import torch

from minillm.eight_bit import quantize_rows
from minillm.errors import ConfigError
from minillm.linear.dense import PackedLinear, PlainLinear
from minillm.quantize import ChannelQuantized

FP8 = torch.float8_e4m3fn
MULTIPLE = 16  # of rows and columns, in PyTorch's fp8 product


class Fp8Linear:
    """Codes of one byte on a GPU of compute capability 8.9 or later, bfloat16 out: our kernel for a few rows, which
    shares the sums over K to read the codes fast, and PyTorch's product on the fp8 tensor cores for more.

    Raises ConfigError for a matrix that PyTorch's fp8 product does not take.
    """

    def __init__(self, weight: ChannelQuantized, bias: torch.Tensor | None = None):
        if any(size % MULTIPLE for size in weight.shape):
            raise ConfigError(
                f"quantization='fp8' needs matrices with multiples of {MULTIPLE} rows and columns on a GPU, and this "
                f"model has one of {list(weight.shape)}; use quantization='int8'"
            )
        from minillm.kernels.coded_linear import MOST_ROWS, fp8_rows  # not before a GPU is there
        from minillm.kernels.fp8_rows import round_rows_to_fp8

        self.round_rows, self.product, self.most_rows = round_rows_to_fp8, fp8_rows, MOST_ROWS
        self.codes = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = self.round_rows(x)
        if x.shape[0] <= self.most_rows:
            y = self.product(codes, scale, self.codes, torch.bfloat16)
        else:
            y = by_tensor_cores(codes, scale, self.codes)
        return y if self.bias is None else y + self.bias

    @property
    def num_weight_bytes(self) -> Counter[str]:
        return Counter({"fp8": self.codes.nbytes})


def by_tensor_cores(x: torch.Tensor, x_scale: torch.Tensor, weight: ChannelQuantized, fast: bool = False):
    """Codes x [T, K] with scales [T] times the weight: [T, N] in bfloat16.

    fast  add up within the tensor cores, with fewer bits than float32 has
    """
    return torch._scaled_mm(
        x, weight.codes.t(), x_scale[:, None], weight.scale[None, :], out_dtype=torch.bfloat16, use_fast_accum=fast
    )


class EmulatedFp8:
    """The same numbers where nothing multiplies them natively: e4m3 values held and multiplied in a wider type.

    Saves neither bytes nor time; it shows what the rounding does to a model's answers. Every code is a number of
    bfloat16, too, and products of two are exact in float32; float16 ends at 65,504, and is multiplied in float32.
    """

    def __init__(
        self,
        weight: ChannelQuantized,
        bias: torch.Tensor | None = None,
        dense: type[PlainLinear] | type[PackedLinear] = PlainLinear,
        dtype: torch.dtype = torch.float32,
    ):
        self.dtype = torch.float32 if dtype == torch.float16 else dtype
        self.dense = dense(weight.codes.to(self.dtype))
        self.scale = weight.scale
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = quantize_rows(x, FP8)
        y = self.dense(codes.to(self.dtype)).float() * scale[:, None] * self.scale
        y = y.to(x.dtype)
        return y if self.bias is None else y + self.bias

    @property
    def num_weight_bytes(self) -> Counter[str]:
        return Counter({f"fp8 held as {name}": size for name, size in self.dense.num_weight_bytes.items()})


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where fp8 products cannot run."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ConfigError(
            f"quantization='fp8' needs compute capability 8.9 (L4, RTX 40, H100), this GPU has {major}.{minor}; "
            "use quantization='int8', which needs none, or device='cpu', which emulates it"
        )
    if dtype != torch.bfloat16:
        raise ConfigError(f"quantization='fp8' gives bfloat16 on a GPU, and dtype is {dtype}; use dtype='bfloat16'")
