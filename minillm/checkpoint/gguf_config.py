"""From the metadata of a GGUF file to a ModelConfig.

Keys carry the architecture as a prefix ("llama.block_count"). What our model does not compute is refused
by name instead of being left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minillm.errors import CheckpointError, ConfigError
from minillm.model_config import ModelConfig, RopeScaling
from minillm.weights import Shape

ARCHITECTURES = ("llama", "qwen2", "qwen3")
LLAMA3_CONTEXT = 8192  # what Llama 3 saw before its RoPE was stretched; low and high factor are 1 and 4


def gguf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, Shape], rope_factors: np.ndarray | None, path: Path
) -> ModelConfig:
    """The shape of the model in a GGUF file.

    shapes        of the file's tensors; vocabulary size, tied head and biases are read off them
    rope_factors  [D/2], one divisor per frequency, in files of Llama 3.1 and later
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{path}: architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    values = {k.removeprefix(f"{architecture}."): v for k, v in metadata.items() if k.startswith(f"{architecture}.")}

    def need(key: str, default: Any = None, kind: type = int) -> Any:
        value = values.get(key, default)
        if type(value) is not kind:
            found = "is missing" if value is None else f"is {value!r}, not one {kind.__name__}"
            raise CheckpointError(f"{path}: metadata '{architecture}.{key}' {found}")
        return value

    _refuse_unknown_parts(metadata, values, path)
    hidden, heads = need("embedding_length"), need("attention.head_count")
    head_dim = need("attention.key_length", hidden // max(heads, 1))
    theta = need("rope.freq_base", 10000.0, float)
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, head_dim) != head_dim:
            raise CheckpointError(f"{path}: '{architecture}.{key}' is {values[key]}, but heads have size {head_dim}")
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{path}: tensor 'token_embd.weight' is missing")
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=hidden,
            intermediate_size=need("feed_forward_length"),
            num_hidden_layers=need("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=need("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=need("context_length"),
            rms_norm_eps=need("attention.layer_norm_rms_epsilon", kind=float),
            rope_theta=theta,
            rope_scaling=None if rope_factors is None else _llama3_scaling(rope_factors, theta, head_dim, path),
            tie_word_embeddings="output.weight" not in shapes,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=values.get("attention.sliding_window") or None,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _refuse_unknown_parts(metadata: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> None:
    scaling = values.get("rope.scaling.type", "none")
    if scaling != "none":
        raise CheckpointError(f"{path}: RoPE scaling {scaling!r} is not supported; supported: none, llama3")
    if values.get("expert_count"):
        raise CheckpointError(f"{path}: mixture of {values['expert_count']} experts is not supported")
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{path} is one of {metadata['split.count']} parts; merge them with gguf-split first")


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int, path: Path) -> RopeScaling:
    """The scaling whose divisors stand in the file: it holds the finished numbers, the model wants the rule."""
    factors = np.asarray(factors, dtype=np.float64).reshape(-1)
    if len(factors) != head_dim // 2:
        raise CheckpointError(f"{path}: 'rope_freqs.weight' has {len(factors)} entries, not head_dim / 2")
    scaling = RopeScaling(float(factors.max()), 1.0, 4.0, LLAMA3_CONTEXT)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)  # [D/2]
    # 1: a wavelength that fits the old context four times is kept; 0: one longer than the context is stretched
    keep = np.clip((LLAMA3_CONTEXT / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    if not np.allclose(factors, 1 / ((1 - keep) / scaling.factor + keep), rtol=1e-4):
        raise CheckpointError(f"{path}: the RoPE factors in 'rope_freqs.weight' are not those of Llama 3")
    return scaling
