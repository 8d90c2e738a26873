"""Weights of any size without a file: seeded noise in the shape of a known model.

For tests and for timing, where shapes matter and words do not. Each tensor is made when it is asked for,
from a seed of its own, so the order of asking changes nothing and an 8B model never stands in memory twice.
"""

from __future__ import annotations

import difflib
import hashlib

import torch

from minillm.errors import CheckpointError
from minillm.model_config import ModelConfig, RopeScaling
from minillm.weights import LazyWeights, expected_shapes

PREFIX = "random:"
_TINY = dict(
    vocab_size=320,  # 256 bytes, <|end|>, and rows without a token, as real models have them
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
)
_LLAMA3 = dict(vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0)
CONFIGS = {
    "tiny": ModelConfig(**_TINY, tie_word_embeddings=True),
    "tiny-mistral": ModelConfig(**_TINY, architecture="mistral", sliding_window=24),
    "tiny-qwen2": ModelConfig(**_TINY, architecture="qwen2", qkv_bias=True),
    "tiny-qwen3": ModelConfig(**_TINY, architecture="qwen3", qk_norm=True, tie_word_embeddings=True),
    "135m": ModelConfig(  # the embedded SmolLM2
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    "1b": ModelConfig(  # Llama 3.2 1B
        **_LLAMA3,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
    ),
    "3b": ModelConfig(  # Llama 3.2 3B
        **_LLAMA3,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
    ),
    "8b": ModelConfig(  # Llama 3.1 8B
        **_LLAMA3,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    ),
}


def random_weights(name: str, seed: int = 0) -> tuple[ModelConfig, LazyWeights]:
    """Config and float32 weights of `random:<name>`. Raises CheckpointError for an unknown name."""
    if name not in CONFIGS:
        near = difflib.get_close_matches(name, CONFIGS, n=1)
        hint = f"; did you mean {PREFIX + near[0]!r}?" if near else ""
        raise CheckpointError(f"no model {PREFIX + name!r}: known are {PREFIX}{{{', '.join(CONFIGS)}}}{hint}")
    config = CONFIGS[name]
    shapes = expected_shapes(config)
    return config, LazyWeights(shapes, lambda tensor: _noise(tensor, shapes[tensor], seed))


def _noise(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Uniform noise scaled so that a product keeps the size of its input, and logits spread by about 1.

    Norm weights lie around 1 and biases around 0, far enough from both that leaving one out shows.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    noise = torch.empty(shape)
    if name.endswith("norm.weight"):
        return noise.uniform_(0.5, 1.5, generator=generator)
    limit = (3 / shape[1]) ** 0.5 if len(shape) == 2 else 0.25  # variance 1 / fan-in
    return noise.uniform_(-limit, limit, generator=generator)
