"""A matrix of ordinary numbers: as it is, or re-laid once for the library that multiplies it."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F

PACK_FOR_ROWS = 64
"""Row count oneDNN lays the matrix out for. Good from 1 to 2,048 rows; a hint of 1 makes large products 8x slower."""


class PlainLinear:
    """The matrix as it was given; the library lays it out anew inside every call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def num_weight_bytes(self) -> Counter[str]:
        return Counter({f"plain {short(self.weight.dtype)}": self.weight.nbytes})


class PackedLinear:
    """The matrix in the tile order of oneDNN, PyTorch's own library for CPUs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.multiply = torch.ops.mkldnn._linear_pointwise.default
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_FOR_ROWS)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.weight, self.bias, "none", [], "")

    @property
    def num_weight_bytes(self) -> Counter[str]:
        dtype = self.weight.dtype
        return Counter({f"packed {short(dtype)}": self.weight.numel() * dtype.itemsize})


def short(dtype: torch.dtype) -> str:
    """ "bfloat16" """
    return str(dtype).removeprefix("torch.")
