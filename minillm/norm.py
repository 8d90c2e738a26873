"""RMSNorm: divide each row by its root mean square, then scale every column by a learned weight.

Built in lesson 03, after Zhang and Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FEW_ROWS = 32
"""Measured on a CPU: up to here one LayerNorm call is quicker than the seven small calls of F.rms_norm."""


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis; any number of leading axes.

    On a CPU `F.rms_norm` is a chain of small operations, and for a single row starting each of them costs
    more than its arithmetic. LayerNorm is one fused operation, and of the doubled row [x, -x] it computes
    the same thing: that row has mean 0 and variance mean(x^2). Both compute in float32 and round once.
    """

    def __init__(self, weight: torch.Tensor, eps: float):
        self.weight = weight  # [n]
        self.eps = eps
        self.doubled_weight = torch.cat([weight, weight]) if weight.device.type == "cpu" else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        n = self.weight.shape[0]
        if self.doubled_weight is None or x.shape[0] > FEW_ROWS:
            return F.rms_norm(x, (n,), self.weight, self.eps)
        doubled = torch.cat([x, -x], dim=-1)
        return F.layer_norm(doubled, (2 * n,), self.doubled_weight, None, self.eps)[..., :n]
