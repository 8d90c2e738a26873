"""Rotary position embedding: each pair of a head's dimensions turns by an angle that grows with the position.

The pair is (d, d + D/2), the "half-split" layout of Hugging Face checkpoints; GGUF files store neighbouring
pairs, which `checkpoint/` undoes when it reads them. Angles are computed in float32 from the positions of
the step itself, once for all layers: no table exists that a long sequence could overrun. Built in lesson 03,
after RoFormer (Su et al. 2021, arXiv 2104.09864); the frequency scaling is that of Llama 3.1.
"""

from __future__ import annotations

import math

import torch

from minillm.model_config import ModelConfig


class Rope:
    """cos and sin of every angle, for the positions of one step."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.dtype = dtype
        self.frequencies = inverse_frequencies(config).to(device)  # [D/2] float32

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, D] for positions [T], in the form `rotate` wants them: sin carries its signs."""
        angles = positions[:, None] * self.frequencies  # [T, D/2] float32
        cos, sin = angles.cos(), angles.sin()
        cos = torch.cat([cos, cos], dim=-1).to(self.dtype)
        sin = torch.cat([-sin, sin], dim=-1).to(self.dtype)
        return cos[:, None], sin[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] turned by the angles of `Rope.at`.

    For each pair (a, b) = (x[d], x[d + D/2]):  a' = a cos - b sin,  b' = b cos + a sin.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per token of each pair, [D/2] float32: theta^(-2d/D), stretched where the config asks for it.

    Llama-3 scaling leaves short wavelengths alone (they encode the order of neighbours), divides the
    frequency of long ones by `factor`, and blends linearly in between.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies

    wavelengths = 2 * math.pi / frequencies  # tokens per full turn
    turns = scaling.original_max_position_embeddings / wavelengths  # within the length it was trained on
    # 1: many turns, keep the frequency;  0: few turns, stretch it by `factor`
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
