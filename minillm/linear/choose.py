"""Which form a model's matrices take here: by device, dtype and the precision that was asked for.

    asked for   CPU, bfloat16                     CPU, float32           GPU
    none        packed                            plain                  plain
    auto        packed, and 4-bit codes of the    plain                  plain
                file beside it for a few rows
    int8        PyTorch's product for a few       widened at each call   our kernel for a few rows,
                rows, widened for more                                   widened for more
    int4        PyTorch's product                 widened at each call   our kernel for a few rows,
                                                                         widened for more
    fp8         emulated                          emulated               our kernel for a few rows,
                                                                         PyTorch's fp8 product for more

PyTorch's packed products are not a public interface, so each is tried once on a small matrix before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from minillm.linear.coded import INT8_MAX_ROWS, CodedLinear, int8_product, int8_product_can_read
from minillm.linear.dense import PackedLinear, PlainLinear, short
from minillm.linear.fp8 import FP8, EmulatedFp8, Fp8Linear, check_fp8
from minillm.linear.int4 import INT4_MAX_ROWS, FewRowsInt4, Int4Linear
from minillm.quantize import HEAD, ChannelQuantized, GroupQuantized, PackedInt4, round_rows, round_to_int4
from minillm.weights import Weight

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forms:
    """The forms one model uses for all its matrices.

    quantization  "none"; "auto": keep 4-bit codes, where the checkpoint has them, beside the dense form; "int8", "int4"
                  or "fp8": what every matrix of a layer is rounded to, and held as alone
    """

    dtype: torch.dtype
    device: torch.device
    dense: type[PlainLinear] | type[PackedLinear]
    quantization: str = "none"

    def make(self, weights: Sequence[Weight], bias: torch.Tensor | None = None, head: bool = False):
        """One linear map from matrices [N_i, K] stacked along N: y [T, sum N_i] = x [T, K] @ w.T + bias.

        head  this is the LM head
        """
        bias = None if bias is None else self.tensor(bias)
        precision = HEAD.get(self.quantization, self.quantization) if head else self.quantization
        if precision == "fp8":
            return self.fp8(round_rows(self.here(weights), FP8), bias)
        if precision == "int8":
            return self.int8(round_rows(self.here(weights), torch.int8), bias)
        if precision == "int4":
            return self.int4(round_to_int4(self.here(weights)), bias)
        tensors = [self.tensor(w) for w in weights]
        dense = self.dense(torch.cat(tensors) if len(tensors) > 1 else tensors[0], bias)
        if precision == "auto" and all(isinstance(w, GroupQuantized) for w in weights):
            codes = GroupQuantized.cat(weights)
            if Int4Linear.can_hold(codes):
                return FewRowsInt4(Int4Linear(codes, bias, self.dtype), dense)
        return dense

    def int8(self, weight: ChannelQuantized, bias: torch.Tensor | None = None) -> CodedLinear:
        if self._has_kernels:
            from minillm.kernels.coded_linear import MOST_ROWS, int8_rows

            return CodedLinear(weight, bias, int8_rows, MOST_ROWS)
        weight = ChannelQuantized(weight.codes, weight.scale.to(self.dtype))
        if self._has_library and int8_product_can_read(weight) and works(int8_product):
            return CodedLinear(weight, bias, int8_product, INT8_MAX_ROWS)
        return CodedLinear(weight, bias)

    def int4(self, weight: GroupQuantized, bias: torch.Tensor | None = None) -> CodedLinear | Int4Linear:
        if self._has_library and Int4Linear.can_hold(weight) and works(Int4Linear):
            return Int4Linear(weight, bias, self.dtype)
        packed = PackedInt4.pack(weight, self.dtype)
        if self._has_kernels:
            from minillm.kernels.coded_linear import MOST_ROWS, int4_rows
            from minillm.kernels.widen_int4 import widen_int4

            return CodedLinear(packed, bias, int4_rows, MOST_ROWS, widen_int4)
        return CodedLinear(packed, bias)

    def fp8(self, weight: ChannelQuantized, bias: torch.Tensor | None = None) -> Fp8Linear | EmulatedFp8:
        if self.device.type == "cuda":
            return Fp8Linear(weight, bias)
        return EmulatedFp8(weight, bias, self.dense, self.dtype)

    def tensor(self, weight: Weight) -> torch.Tensor:
        """A weight as an ordinary tensor of this model's dtype and device."""
        if isinstance(weight, GroupQuantized):
            weight = weight.dequantize(self.dtype)
        return weight.to(self.device, self.dtype)

    def here(self, weights: Sequence[Weight]) -> list[Weight]:
        """The weights on this model's device, where they are rounded from the numbers of the checkpoint."""
        return [weight.to(self.device) for weight in weights]

    @property
    def reason(self) -> str:
        """What was chosen, in a line."""
        dense = f"{'packed' if self.dense is PackedLinear else 'plain'} {short(self.dtype)}"
        widened = f"widened to {short(self.dtype)}"
        if self.quantization == "none":
            return f"none: {dense}"
        if self.quantization == "auto":
            return f"auto: {dense}, and the 4-bit codes of a 4-bit file for at most {INT4_MAX_ROWS} rows"
        if self.quantization == "fp8":
            native = self.device.type == "cuda"
            how = "our kernel for a few rows, PyTorch's fp8 product for more"
            return f"fp8: {how if native else 'emulated, which saves neither bytes nor time'}"
        if self._has_kernels:
            how = f"our kernel for a few rows, {widened} for more"
        elif self._has_library and self.quantization == "int4":
            how = "PyTorch's product for 4-bit codes"
        elif self._has_library:
            how = f"PyTorch's product for at most {INT8_MAX_ROWS} rows, {widened} for more"
        else:
            how = f"{widened} at each call"
        return f"{self.quantization}: {how}"

    @property
    def _has_library(self) -> bool:
        """PyTorch's products for codes: fast in bfloat16 on a CPU, plain loops in float32."""
        return self.device.type == "cpu" and self.dtype == torch.bfloat16

    @property
    def _has_kernels(self) -> bool:
        """Our products: tensor cores that Triton knows, and a half type."""
        if self.device.type != "cuda" or self.dtype == torch.float32:
            return False
        return torch.cuda.get_device_capability(self.device) >= (8, 0)


def choose_forms(dtype: torch.dtype, device: torch.device | str = "cpu", quantization: str = "none") -> Forms:
    """The forms for a device, a dtype and an `EngineConfig.quantization`. Raises ConfigError where fp8 cannot run.

    In float32 packing takes a third longer for one row, a quarter less for 8 to 32, and the same from 128 on; a
    plain tied head shares its memory with the embedding. One form for everything also means that a request's
    numbers do not depend on how many others share its step. The 4-bit product is fast in bfloat16 alone.
    """
    device = torch.device(device)
    packs = device.type == "cpu" and dtype != torch.float32 and works(PackedLinear, dtype)
    if quantization == "auto" and not (device.type == "cpu" and dtype == torch.bfloat16 and works(Int4Linear)):
        quantization = "none"
    if quantization == "fp8":
        check_fp8(device, dtype)
    return Forms(dtype, device, PackedLinear if packs else PlainLinear, quantization)


@cache
def works(form, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Try PackedLinear, Int4Linear or int8_product on a small matrix: is its product there, and right?"""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    try:
        if form is Int4Linear:
            rounded = round_to_int4([weight])
            linear = Int4Linear(rounded, dtype=dtype)
        elif form is int8_product:
            rounded = round_rows([weight], torch.int8)
            linear = CodedLinear(ChannelQuantized(rounded.codes, rounded.scale.to(dtype)), None, form, most_rows=70)
        else:
            rounded = None
            linear = form(weight.to(dtype))
        exact = (weight if rounded is None else rounded.dequantize()).T
        for rows in (1, 3, 70):
            x = torch.randn(rows, 64, generator=generator).to(dtype)
            expected = x.float() @ exact
            error = (linear(x).float() - expected).abs().max()
            if not error <= 2e-2 * expected.abs().max():
                raise RuntimeError(f"its products are wrong by {error:.2g}")
    except (RuntimeError, AttributeError) as error:  # NotImplementedError is a RuntimeError
        logger.info("%s in %s is not used: %s", form.__name__, dtype, error)
        return False
    return True
