"""Inputs of attention checks that show one slip and hide the others.

A ring of keys hides a softmax over the wrong axis, a loud query hides a missing scale, and a window into a buffer of
NaN shows whoever assumes a memory layout.
"""

from __future__ import annotations

import math

import torch

DEEP = -200.0  # e^-200 is 0 in float32
LOUD = 20.0  # score of the key that a query asks for; e^-20 is far below every tolerance


def ring(n: int, d: int, g: torch.Generator) -> torch.Tensor:
    """n vectors, each the one before turned by the same angles: the scores of two rings depend on i - j alone."""
    angles = 2 * math.pi * torch.arange(n)[:, None] * torch.arange(1, d // 2 + 1) / n
    size, phase = torch.rand(d // 2, generator=g) + 0.5, 2 * math.pi * torch.rand(d // 2, generator=g)
    return 1.5 * torch.cat([size * (angles + phase).cos(), size * (angles + phase).sin()], dim=1)


def lookup(n: int, keys: int, heads: int, kv_heads: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [n, H, 16], k [S, Hkv, 16]): query n-1-i asks for key S-1-i, in each K/V head written in another code."""
    codes = [torch.eye(16)[torch.randperm(16, generator=g)[:keys]] for _ in range(kv_heads)]
    k = torch.stack(codes, dim=1)
    return LOUD * math.sqrt(16) * k[keys - n :].repeat_interleave(heads // kv_heads, dim=1), k


def inside_nan(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a transposed window into a larger buffer of NaN, as slices of a fused projection are."""
    n, heads, d = x.shape
    buffer = torch.full((heads + 2, n + 2, d + 3), math.nan)
    view = buffer[1:-1, 1:-1, 1 : d + 1].transpose(0, 1)
    view.copy_(x)
    return view
