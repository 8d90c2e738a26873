"""4-bit codes on a CPU, in the layout of PyTorch's own product for them; alone, or beside a dense copy.

The product widens the codes anew for every few rows. Microseconds of one matrix of SmolLM2-135M (3,072 x 576, read
from memory) on two cores of an AMD EPYC with AVX-512, for 1, 8 and 512 rows: 60, 183 and 12,605; packed bfloat16: 228,
213 and 4,496. So alone they make a decode fast and a prefill slow. Not for float32, where the product is plain loops.
"""

from __future__ import annotations

from collections import Counter

import torch

from minillm.linear.dense import PackedLinear, PlainLinear
from minillm.quantize import GroupQuantized

INT4_MAX_ROWS = 4
"""Most rows for which the 4-bit codes win: at 8 rows they only equal packed bfloat16, at 32 they take twice as long."""


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
