"""The steps between a layer's matrix products, each in one Triton kernel: `ops.PlainOps` with fewer bytes moved.

Takes and returns exactly what `PlainOps` does, so a model runs with either.
"""

from __future__ import annotations

import torch

from minillm.kernels.rms_norm import add_rms_norm
from minillm.kernels.rope_kv_write import rope_kv_write
from minillm.kernels.silu_mul import silu_mul
from minillm.kv_cache import KVLayer
from minillm.norm import RMSNorm


class FusedOps:
    """The steps as Triton kernels; what each takes is written in `PlainOps`."""

    reason = "fused: three Triton kernels (norm, rotation with KV write, activation)"

    def add_norm(
        self, x: torch.Tensor, update: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, update, norm.weight, norm.eps)

    def turn_and_write(
        self,
        heads: torch.Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_layer: KVLayer,
        slot_mapping: torch.Tensor,
        parts,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with parts("kv_write"):  # the rotation is inside
            scales = kv_layer.k_scale, kv_layer.v_scale
            rope_kv_write(heads, norms, *angles, kv_layer.k, kv_layer.v, slot_mapping, *scales)
        num_kv_heads = kv_layer.k.shape[2]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        return heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)
