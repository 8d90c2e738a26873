"""One weight matrix in the form that multiplies fastest on this machine; every form answers `y = form(x)`.

    PlainLinear        the matrix as it is; any device and dtype
    PackedLinear       the matrix re-laid once in oneDNN's tiles, instead of at every call (CPU)
    Int4Linear         4-bit codes with a scale and a zero per group: a quarter of the bytes to read (CPU)
    FewRowsInt4        both: codes for a few rows, where reading the weight is the whole cost, dense for more

`choose_forms` picks once per model, after trying the special ones on a small matrix. What the codes mean is
`quantize.py`'s business. Built in lesson 16.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minillm.quantize import GroupQuantized
from minillm.weights import Weight

logger = logging.getLogger(__name__)

INT4_MAX_ROWS = 4
"""Most rows for which the 4-bit codes win: at 8 rows they only equal packed bfloat16, at 32 they take twice as long."""

PACK_FOR_ROWS = 64
"""Row count oneDNN lays the matrix out for. Good from 1 to 2,048 rows; a hint of 1 makes large products 8x slower."""


@dataclass(frozen=True)
class Forms:
    """The forms one model uses for all its matrices."""

    dtype: torch.dtype
    device: torch.device
    dense: type[PlainLinear] | type[PackedLinear]
    int4: bool = False  # keep 4-bit codes, where the checkpoint has them, beside the dense form

    def make(self, weights: Sequence[Weight], bias: torch.Tensor | None = None):
        """One linear map from matrices [N_i, K] stacked along N: y [T, sum N_i] = x [T, K] @ w.T + bias."""
        bias = None if bias is None else self.tensor(bias)
        tensors = [self.tensor(w) for w in weights]
        dense = self.dense(torch.cat(tensors) if len(tensors) > 1 else tensors[0], bias)
        if self.int4 and all(isinstance(w, GroupQuantized) for w in weights):
            codes = GroupQuantized.cat(list(weights)) if len(weights) > 1 else weights[0]
            if Int4Linear.can_hold(codes):
                return FewRowsInt4(Int4Linear(codes, bias, self.dtype), dense)
        return dense

    def tensor(self, weight: Weight) -> torch.Tensor:
        """A weight as an ordinary tensor of this model's dtype and device."""
        if isinstance(weight, GroupQuantized):
            weight = weight.dequantize(self.dtype)
        return weight.to(self.device, self.dtype)


def choose_forms(dtype: torch.dtype, device: torch.device | str = "cpu", quantization: str = "none") -> Forms:
    """Plain, except in half precision on a CPU: there packed where that works, with 4-bit codes beside it.

    In float32 packing takes a third longer for one row, a quarter less for 8 to 32, and the same from 128 on; a
    plain tied head shares its memory with the embedding. One form for everything also means that a request's
    numbers do not depend on how many others share its step. The 4-bit product is fast in bfloat16 alone.
    """
    device = torch.device(device)
    if device.type != "cpu" or dtype == torch.float32:
        return Forms(dtype, device, PlainLinear)
    dense = PackedLinear if _works(PackedLinear, dtype) else PlainLinear
    int4 = quantization == "auto" and dtype == torch.bfloat16 and _works(Int4Linear, dtype)
    return Forms(dtype, device, dense, int4)


class PlainLinear:
    """The matrix as it was given; the library lays it out anew inside every call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def num_weight_bytes(self) -> Counter[str]:
        return Counter({f"plain {_short(self.weight.dtype)}": self.weight.nbytes})


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
        return Counter({f"packed {_short(dtype)}": self.weight.numel() * dtype.itemsize})


class Int4Linear:
    """w = (code - 8) * scale + zero, with the codes of the file, never rounded again.

    PyTorch counts codes from the middle, files from the minimum: zero = minimum + 8 * scale.
    Scales and zeros are held in the dtype of x.
    """

    def __init__(self, weight: GroupQuantized, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16):
        self.multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        self.group = weight.group
        self.codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.to(torch.int32), 1)
        zero = weight.minimum + 8 * weight.scale
        scale_and_zero = torch.stack([weight.scale, zero], dim=-1)  # [N, K/group, 2]
        self.scale_and_zero = scale_and_zero.transpose(0, 1).contiguous().to(dtype)  # [K/group, N, 2]
        self.bias = bias

    @staticmethod
    def can_hold(weight: GroupQuantized) -> bool:
        """Whether the library's 4-bit product knows this shape."""
        return weight.shape[0] % 16 == 0 and weight.group in (32, 64, 128, 256)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # RMSNorm hands over the left half of a wider tensor; this product reads dense rows only.
        y = self.multiply(x.contiguous(), self.codes, self.group, self.scale_and_zero)
        return y if self.bias is None else y + self.bias

    @property
    def num_weight_bytes(self) -> Counter[str]:
        return Counter({"int4": self.codes.nbytes + self.scale_and_zero.nbytes})


class FewRowsInt4:
    """Two copies of one matrix; the number of rows decides which of them multiplies."""

    def __init__(self, int4: Int4Linear, dense: PlainLinear | PackedLinear):
        self.int4 = int4
        self.dense = dense

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.int4(x) if x.shape[0] <= INT4_MAX_ROWS else self.dense(x)

    @property
    def num_weight_bytes(self) -> Counter[str]:
        return self.int4.num_weight_bytes + self.dense.num_weight_bytes


def _works(form: type[PackedLinear] | type[Int4Linear], dtype: torch.dtype) -> bool:
    """Try a form on small matrices against plain multiplication: these operations are not a public interface."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (48, 64), dtype=torch.uint8, generator=generator)
    scale = torch.rand(48, 2, generator=generator) / 8
    weight = GroupQuantized(codes, scale, minimum=-7 * scale)
    try:
        if form is Int4Linear:
            linear = Int4Linear(weight, dtype=dtype)
        else:
            linear = form(weight.dequantize(dtype))
        for rows in (1, 3, 70):
            x = torch.randn(rows, 64, generator=generator).to(dtype)
            exact = x.float() @ weight.dequantize().T
            error = (linear(x).float() - exact).abs().max()
            if not error <= 2e-2 * exact.abs().max():
                raise RuntimeError(f"its products are wrong by {error:.2g}")
    except (RuntimeError, AttributeError) as error:  # NotImplementedError is a RuntimeError
        logger.info("%s in %s is not used: %s", form.__name__, dtype, error)
        return False
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
