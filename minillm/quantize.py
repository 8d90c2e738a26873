"""Weights in fewer bits: what the codes of int4, int8 and fp8 stand for, and how a matrix is rounded to them.

    int4  w[n, k] = codes[n, k] * scale[n, g] + minimum[n, g]   codes 0..15; a group g is 32 to 128 neighbours of a row
    int8  w[n, k] = codes[n, k] * scale[n]                      codes -127..127, evenly spaced
    fp8   w[n, k] = codes[n, k] * scale[n]                      codes are e4m3 numbers, spaced by their size

A scale for each row can be left out of the sum over k and multiplied to its result; 16 levels are too few for a whole
row, so int4 has one for each group. The 4-bit blocks of a GGUF file (Q4_0, Q4_1) are such groups of 32 and are kept
as they were shipped. How codes are multiplied is the business of `linear/`. Rounding to nearest, no calibration data:
what that can add is told by GPTQ (Frantar et al. 2022, arXiv 2210.17323). Lesson 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minillm.eight_bit import SCALE_BYTES, quantize_rows
from minillm.errors import ConfigError

HEAD = {"int4": "int8", "fp8": "none"}
"""How the LM head is held where the layers are held otherwise: rounding it changes the logits themselves, with no layer
after it to even that out. 4-bit files hold it in 8 bits, too."""
SCALE_BYTES_INT4 = 2  # scales and minima of groups have the model's half type
INT4_LEVELS = 15
INT4_GROUPS = (128, 64, 32)
"""Group sizes that we round to, the largest that divides a row: scale and minimum take 16 bits each, so a weight takes
4.25 bits in groups of 128 and 5 in groups of 32."""


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
    def cat(parts: Sequence[GroupQuantized]) -> GroupQuantized:
        """Stack weights along N, as a fused projection needs them."""
        return GroupQuantized(
            torch.cat([p.codes for p in parts]),
            torch.cat([p.scale for p in parts]),
            torch.cat([p.minimum for p in parts]),
        )

    def to(self, device: torch.device | str) -> GroupQuantized:
        return GroupQuantized(*(part.to(device) for part in (self.codes, self.scale, self.minimum)))


@dataclass
class PackedInt4:
    """A GroupQuantized in half a byte per code, the groups of all rows side by side: a tile of rows is one piece of
    memory, and neither half of its bytes has to change places.

    codes              [K / group, N, group / 2] uint8; byte j holds code j of its group in the low half and code
                       j + group / 2 in the high half
    scale_and_minimum  [K / group, N, 2]
    """

    codes: torch.Tensor
    scale_and_minimum: torch.Tensor

    @classmethod
    def pack(cls, weight: GroupQuantized, dtype: torch.dtype = torch.float32) -> PackedInt4:
        """dtype  of scales and minima"""
        low, high = weight.codes.view(weight.shape[0], -1, 2, weight.group // 2).unbind(2)  # [N, K / group, group / 2]
        pairs = torch.stack([weight.scale, weight.minimum], dim=-1)
        return cls((low | high << 4).transpose(0, 1).contiguous(), pairs.transpose(0, 1).contiguous().to(dtype))

    @property
    def shape(self) -> torch.Size:
        groups, n, half = self.codes.shape
        return torch.Size((n, groups * 2 * half))

    @property
    def group(self) -> int:
        return 2 * self.codes.shape[2]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale_and_minimum.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [N, K] as ordinary numbers."""
        scale, minimum = self.scale_and_minimum[..., None, :].unbind(-1)  # [K / group, N, 1]
        grouped = torch.cat([self.codes & 15, self.codes >> 4], dim=2).float().mul_(scale).add_(minimum)
        return grouped.to(dtype).transpose(0, 1).reshape(self.shape)


@dataclass
class ChannelQuantized:
    """w[n, k] = codes[n, k] * scale[n]

    codes  [N, K] int8 or float8_e4m3fn
    scale  [N]
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [N, K] as ordinary numbers."""
        codes = self.codes if self.codes.dtype == torch.int8 else self.codes.to(dtype)
        return codes * self.scale.to(dtype)[:, None]  # int8 is widened on the way: one pass on a GPU


def round_to_int4(weights: Sequence[torch.Tensor | GroupQuantized]) -> GroupQuantized:
    """Weights [N_i, K] stacked along N: shipped 4-bit codes as they are, tensors rounded to 16 levels per group
    between its smallest and its largest weight.

    Raises ConfigError for rows that no group divides.
    """
    coded = [weight for weight in weights if isinstance(weight, GroupQuantized)]
    group = coded[0].group if coded else int4_group(weights[0].shape[1])
    return GroupQuantized.cat(
        [weight if isinstance(weight, GroupQuantized) else _round_groups(weight, group) for weight in weights]
    )


def round_rows(weights: Sequence[torch.Tensor | GroupQuantized], dtype: torch.dtype) -> ChannelQuantized:
    """Weights [N_i, K] stacked along N, each row rounded to codes of `dtype` that reach as far as its largest weight.

    dtype  int8 or float8_e4m3fn
    """
    tensors = [w.dequantize() if isinstance(w, GroupQuantized) else w for w in weights]
    parts = [quantize_rows(tensor, dtype) for tensor in tensors]
    return ChannelQuantized(*(torch.cat(part) for part in zip(*parts, strict=True)))


def bytes_per_weight(precision: str, k: int, plain: float) -> float:
    """What a weight in a row of k takes, its share of scales included; `plain` in a precision that rounds nothing."""
    if precision == "int4":
        return 0.5 + 2 * SCALE_BYTES_INT4 / int4_group(k)
    return 1 + SCALE_BYTES / k if precision in ("int8", "fp8") else plain


def int4_group(k: int) -> int:
    """Weights that share a scale in a row of k. Raises ConfigError where none of INT4_GROUPS divides it."""
    for group in INT4_GROUPS:
        if k % group == 0:
            return group
    raise ConfigError(
        f"quantization='int4' cuts rows into groups of {INT4_GROUPS[-1]} or more weights, and this model has rows of "
        f"{k}; use quantization='int8'"
    )


def _round_groups(weight: torch.Tensor, group: int) -> GroupQuantized:
    grouped = weight.float().view(weight.shape[0], -1, group)
    minimum, maximum = grouped.aminmax(dim=-1)
    scale = (maximum - minimum) / INT4_LEVELS
    step = scale.where(scale > 0, 1)[..., None]  # all weights of the group are equal: code 0
    codes = ((grouped - minimum[..., None]) / step).round_().clamp_(0, INT4_LEVELS)
    return GroupQuantized(codes.to(torch.uint8).view(weight.shape), scale, minimum)
