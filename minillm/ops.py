"""What stands between a layer's matrix products: residual add and norm, rotation and KV write, activation.

`PlainOps` says each in PyTorch, one step after another; it runs everywhere and is what the fused kernels are
tested against. `kernels/fused_ops.py` does each in one Triton kernel. `choose_ops` picks once per model.
How many bytes that saves is told in lesson 16.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F

from minillm.kv_cache import KVLayer
from minillm.norm import RMSNorm
from minillm.rope import rotate


class PlainOps:
    """The steps as PyTorch operations."""

    reason = "plain: PyTorch operations"

    def add_norm(
        self, x: torch.Tensor, update: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + update, its norm) of rows [T, E]; x may be overwritten. Without an update: (x, its norm)."""
        if update is not None:
            x = x + update
        return x, norm(x)

    def turn_and_write(
        self,
        heads: torch.Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_layer: KVLayer,
        slot_mapping: torch.Tensor,
        parts,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, D], k and v [T, Hkv, D] of stacked heads [T, H + 2 Hkv, D], turned to their positions.

        norms   of q and of k over D, before the turn (Qwen3), or None
        angles  cos and sin as `Rope.at` makes them
        parts   the profiler: writing the pages is a part of its own
        """
        num_kv_heads = kv_layer.k.shape[2]
        with parts("linear"):
            qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
            if norms is not None:
                q_norm, k_norm = norms
                qk = torch.cat([q_norm(qk[:, :-num_kv_heads]), k_norm(qk[:, -num_kv_heads:])], dim=1)
            qk = rotate(qk, *angles)  # one call for both
            q, k = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:]
        with parts("kv_write"):
            kv_layer.write(k, v, slot_mapping)
        return q, k, v

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [T, F], of gate and up side by side [T, 2 F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def choose_ops(device: torch.device | str):
    """Fused on a GPU where Triton is installed, else plain. Its `reason` is what `minillm doctor` prints."""
    if torch.device(device).type != "cuda" or importlib.util.find_spec("triton") is None:
        return PlainOps()
    from minillm.kernels.fused_ops import FusedOps

    return FusedOps()
