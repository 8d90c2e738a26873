"""Which part of a model each of N ranks holds: whole heads, a share of the feed-forward, rows of the vocabulary.

A matrix [out, in] is cut in one of two ways. q, k, v, gate and up are cut by their outputs, so that a rank computes
its own heads and its own feed-forward values from all of x. o and down are cut by their inputs, so that they take
what the rank itself has just made: between the two cuts nothing has to be said to anyone. Norms and the embedding
are held whole. No process is started here. Lesson 18, after Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, gcd

import torch

from minillm.errors import ConfigError
from minillm.model import CheckedWeights
from minillm.model_config import ModelConfig
from minillm.quantize import GroupQuantized
from minillm.weights import LazyWeights, Weight

BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Cut along their rows. Papers write y = x A and call this column-parallel; a checkpoint holds A transposed."""
BY_INPUTS = ("o_proj", "down_proj")
"""Cut along their columns: row-parallel in the papers. What they give is one summand of the answer."""


def check_split(config: ModelConfig, size: int) -> None:
    """Raises ConfigError when a model cannot be cut into `size` equal parts, naming the numbers that would do."""
    heads, kv_heads, wide = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    common = gcd(heads, kv_heads, wide)
    if common % size:
        possible = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide {heads} heads, {kv_heads} K/V heads and a feed-forward width "
            f"of {wide}; this model can be split over {possible}"
        )


def share_of_config(config: ModelConfig, size: int) -> ModelConfig:
    """The shape of one rank's layers: fewer heads and a narrower feed-forward around the same residual stream."""
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_key_value_heads=config.num_key_value_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def share_of_weights(config: ModelConfig, weights: Mapping[str, Weight], rank: int, size: int) -> LazyWeights:
    """The tensors of one rank under the same names, cut when they are asked for.

    Raises CheckpointError as the whole model would, by the shapes of the whole model.
    """
    whole = CheckedWeights(config, weights)
    return LazyWeights(whole.shapes, lambda name: share_of_weight(name, whole[name], rank, size))


def share_of_weight(name: str, weight: Weight, rank: int, size: int) -> Weight:
    """One rank's part of a tensor under Hugging Face's name, in memory of its own."""
    kind = name.split(".")[-2]
    if kind in BY_OUTPUTS:
        return _cut(weight, 0, rank, size)
    if kind in BY_INPUTS:
        return _cut(weight, 1, rank, size)
    return weight


def vocabulary_rows(vocab_size: int, rank: int, size: int) -> slice:
    """The rows of the LM head that a rank computes: ceil(V / size) each, what is left for the last."""
    rows = ceil(vocab_size / size)
    return slice(min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size))


def _cut(weight: Weight, axis: int, rank: int, size: int) -> Weight:
    if not isinstance(weight, GroupQuantized):
        return weight.chunk(size, dim=axis)[rank].clone()
    if axis == 1 and weight.scale.shape[1] % size:  # the cut would go through a group of codes
        return _cut(weight.dequantize(), axis, rank, size)
    parts: list[torch.Tensor] = [weight.codes, weight.scale, weight.minimum]
    return GroupQuantized(*(part.chunk(size, dim=axis)[rank].clone() for part in parts))
