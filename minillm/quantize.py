"""Weights in fewer bits: groups of integer codes with one scale and one minimum each.

So far one format: the 4-bit blocks of a GGUF file (Q4_0, Q4_1), kept as they were shipped instead of
being widened and rounded again. How such a weight is multiplied is `linear.py`'s business. Lesson 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class GroupQuantized:
    """w[n, k] = codes[n, k] * scale[n, k // group] + minimum[n, k // group]

    codes    [N, K] uint8, 0..15
    scale    [N, K / group] float32
    minimum  [N, K / group] float32
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [N, K] as ordinary numbers."""
        n, k = self.codes.shape
        grouped = self.codes.view(n, -1, self.group).float()
        grouped.mul_(self.scale[..., None]).add_(self.minimum[..., None])  # in place: fresh memory costs more
        return grouped.view(n, k).to(dtype)

    @staticmethod
    def cat(parts: list[GroupQuantized]) -> GroupQuantized:
        """Stack weights along N, as a fused projection needs them."""
        return GroupQuantized(
            torch.cat([p.codes for p in parts]),
            torch.cat([p.scale for p in parts]),
            torch.cat([p.minimum for p in parts]),
        )
