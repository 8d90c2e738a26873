"""The model of lesson 03, written with three functions that anyone can exchange: a norm, a rotation, a block.

It has the face of `Transformer`, so the engine runs it, and borrows the weights of one that is loaded. It is there
for reading and for a learner's functions; the engine's own model computes the same faster.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from minillm.course.plug import Part
from minillm.errors import GradeError
from minillm.linear import PlainLinear
from minillm.profiler import NO_PARTS


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows [..., E] divided by their root mean square, computed in float32, then scaled by weight [E]."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x [T, heads, D], each pair (d, d + D/2) turned by position x theta^(-2d/D); angles in float32."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = (positions[:, None] * frequencies)[:, None]  # [T, 1, D/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def block(x: torch.Tensor, w: dict, head_dim: int, norm: Callable, turn: Callable, attend: Callable) -> torch.Tensor:
    """One layer: rows [T, E] plus what attention adds, plus what the feed-forward part adds to that.

    w       input_norm, post_norm [E]; qkv [(H + 2 Hkv) D, E]; o [E, H D]; gate_up [2 F, E]; down [E, F]
    norm    (rows, weight) -> rows;  turn  (heads [T, h, D]) -> heads at their positions
    attend  (q [T, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, H, D]
    """
    heads = w["o"].shape[1] // head_dim
    kv_heads = (w["qkv"].shape[0] // head_dim - heads) // 2
    qkv = F.linear(norm(x, w["input_norm"]), w["qkv"]).unflatten(-1, (-1, head_dim))
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    x = x + F.linear(attend(turn(q), turn(k), v).flatten(1), w["o"])
    gate, up = F.linear(norm(x, w["post_norm"]), w["gate_up"]).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, w["down"])


REFERENCE = {"rms_norm": rms_norm, "rotate": rotate, "block": block}


class TextbookModel:
    """A loaded `Transformer`'s weights, multiplied by `rms_norm`, `rotate` and `block`.

    Raises GradeError for a model that these three do not describe: biases, norms of q and k, stretched rotations,
    or matrices that are no longer plain.
    """

    def __init__(self, model, parts: dict[str, Part]):
        if reason := not_in_the_textbook(model):
            raise GradeError(f"the textbook model cannot stand in for this one: {reason}")
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.embedding, self.lm_head, self.final_norm = model.embedding, model.lm_head, model.norm.weight
        self.layers = [layer_weights(layer) for layer in model.layers]
        self._rms_norm, self._rotate, self._block = (parts[name] for name in REFERENCE)

    def forward(self, batch, kv, attend, parts=NO_PARTS) -> torch.Tensor:
        """Logits [B', V] in float32 of the rows `batch.logits_indices`."""
        config = self.config

        def norm(rows, weight):
            return self._rms_norm.tensor(rows.shape, rows, weight, config.rms_norm_eps)

        def turn(heads):
            return self._rotate.tensor(heads.shape, heads, batch.positions, config.rope_theta)

        with parts("linear"):
            x = F.embedding(batch.token_ids, self.embedding)
            for w, kv_layer in zip(self.layers, kv.layers, strict=True):

                def look_back(q, k, v, kv_layer=kv_layer):
                    kv_layer.write(k, v, batch.slot_mapping)
                    return attend(q, k, v, kv_layer, batch)

                x = self._block.tensor(x.shape, x, w, config.head_dim, norm, turn, look_back)
        with parts("lm_head"):
            return self.lm_head(norm(x[batch.logits_indices], self.final_norm))


def not_in_the_textbook(model) -> str:
    """Why `rms_norm`, `rotate` and `block` do not describe this model; "" when they do."""
    config = model.config
    if config.qkv_bias or config.qk_norm:
        return f"{config.architecture} adds biases, or norms of q and k"
    if config.rope_scaling is not None:
        return "its rotation frequencies are stretched"
    if not isinstance(model.layers[0].qkv_proj, PlainLinear):
        return f"its matrices are packed for {model.dtype}; load it with dtype='float32'"
    return ""


def layer_weights(layer) -> dict[str, torch.Tensor]:
    """The matrices of one loaded layer under the names that `block` reads."""
    return {
        "input_norm": layer.input_norm.weight,
        "qkv": layer.qkv_proj.weight,
        "o": layer.o_proj.weight,
        "post_norm": layer.post_attention_norm.weight,
        "gate_up": layer.gate_up_proj.weight,
        "down": layer.down_proj.weight,
    }
