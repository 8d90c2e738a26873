"""RMSNorm: divide each row by its root mean square, then scale every column by a learned weight.

Built in lesson 03, after Zhang and Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FEW_ROWS = 16
"""Most rows for which one LayerNorm call on a CPU is quicker than the formula (measured; they meet at 24)."""


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis; any number of leading axes.

    Computed in float32 and rounded once. `F.rms_norm` is one kernel on a GPU, but on a CPU a chain of eight
    operations, so there
    * few rows, where starting an operation costs more than its arithmetic, become one LayerNorm: the doubled
      row [x, -x] has mean 0 and variance mean(x^2), so that LayerNorm of it is RMSNorm of x (half the time);
    * many rows follow the formula in place, because fresh memory costs more than arithmetic (two thirds).
    """

    def __init__(self, weight: torch.Tensor, eps: float):
        self.weight = weight  # [n]
        self.eps = eps
        self.on_cpu = weight.device.type == "cpu"
        if self.on_cpu:
            self.doubled_weight = torch.cat([weight, weight])
            self.float_weight = weight.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        n = self.weight.shape[0]
        if not self.on_cpu:
            return F.rms_norm(x, (n,), self.weight, self.eps)
        if x.shape[0] <= FEW_ROWS:
            doubled = torch.cat([x, -x], dim=-1)
            return F.layer_norm(doubled, (2 * n,), self.doubled_weight, None, self.eps)[..., :n]
        y = x.to(torch.float32, copy=True)
        mean_square = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square() / n
        return y.mul_(torch.rsqrt(mean_square + self.eps)).mul_(self.float_weight).to(x.dtype)
