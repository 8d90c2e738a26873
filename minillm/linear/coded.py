"""int8 or int4 codes as the only copy of a matrix: few rows read the codes as they are, many have them widened first.

One row uses each weight once, so the product takes as long as its bytes take to arrive, and a product that widens the
codes on the way, in registers, has fewer of them. With many rows the arithmetic is what takes time, and the libraries'
dense products are the fastest there are: then the matrix is written out in the dtype of x, multiplied and thrown away,
which costs the same for 64 rows as for 2,048.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F

from minillm.quantize import ChannelQuantized, PackedInt4

Codes = ChannelQuantized | PackedInt4
Product = Callable[[torch.Tensor, Codes], torch.Tensor]
Widen = Callable[[Codes, torch.dtype], torch.Tensor]


class CodedLinear:
    """y = x @ w.T + bias with w held as codes.

    weight     the codes and scales, on the device of x
    product    multiplies rows with codes: (x [T, K], weight) -> y [T, N]; None: there is none here
    most_rows  T up to which `product` is used; above it, or without one, the codes are widened
    widen      (weight, dtype) -> the matrix [N, K] as ordinary numbers; None: the weight's own `dequantize`
    """

    def __init__(
        self,
        weight: Codes,
        bias: torch.Tensor | None = None,
        product: Product | None = None,
        most_rows: int = 0,
        widen: Widen | None = None,
    ):
        self.codes = weight
        self.bias = bias
        self.product = product
        self.most_rows = most_rows
        self.widen = widen or type(weight).dequantize

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.product is None or x.shape[0] > self.most_rows:
            return F.linear(x, self.widen(self.codes, x.dtype), self.bias)
        y = self.product(x, self.codes)
        return y if self.bias is None else y + self.bias

    @property
    def num_weight_bytes(self) -> Counter[str]:
        return Counter({"int8" if isinstance(self.codes, ChannelQuantized) else "int4": self.codes.nbytes})


INT8_MAX_ROWS = 8
"""Most rows for which PyTorch's int8 product on a CPU takes less time than widening the codes and multiplying.

In microseconds, as in int4.py, for 1, 8, 16 and 512 rows: 174, 395, 508 and 5,257, the last two widened."""


def int8_product(x: torch.Tensor, weight: ChannelQuantized) -> torch.Tensor:
    """PyTorch's product for int8 codes on a CPU, with scales in the dtype of x.

    It reads whole vectors at addresses that divide by their size, and a row that lies otherwise ends the process: so
    x is copied, to where PyTorch puts new tensors, and `int8_product_can_read` is to be asked first.
    """
    rows = x.clone(memory_format=torch.contiguous_format)
    return torch.ops.aten._weight_int8pack_mm.default(rows, weight.codes, weight.scale)


def int8_product_can_read(weight: ChannelQuantized) -> bool:
    """Whether rows of x and of codes begin where vectors do, and end where they do."""
    return weight.shape[1] % 32 == 0
