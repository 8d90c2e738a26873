"""The shape of a model: its sizes and what sets its architecture apart, as its files tell them.

`checkpoint/` makes one from a GGUF header or a config.json, `model.py` builds the layers from it, and `costs.py` counts
with it. It is frozen and validated when it is made, and knows nothing of the engine's options.
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.option_checks import choice, positive

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 style frequency scaling (`rope_type: llama3`): long wavelengths are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-family decoder, under Hugging Face's field names.

    Raises ConfigError when the sizes cannot belong together.
    """

    vocab_size: int  # V
    hidden_size: int  # E
    intermediate_size: int  # F
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    num_key_value_heads: int  # Hkv
    head_dim: int  # D
    architecture: str = "llama"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False  # qwen2
    qk_norm: bool = False  # qwen3: RMSNorm over each head of q and k, before RoPE
    sliding_window: int | None = None  # visible keys per query, its own included
    sliding_layers: tuple[int, ...] | None = None  # layers that use the window; None means all

    def __post_init__(self):
        choice("architecture", self.architecture, ARCHITECTURES)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            positive(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; every K/V head must serve the same number of queries"
            )
        if self.head_dim % 8 or self.head_dim > 256:
            raise ConfigError(f"head_dim={self.head_dim} is not supported; use a multiple of 8 up to 256")
        if self.sliding_window is not None:
            positive("sliding_window", self.sliding_window)

    def layer_window(self, layer: int) -> int | None:
        """Visible keys per query in this layer, or None for all of them."""
        if self.sliding_layers is not None and layer not in self.sliding_layers:
            return None
        return self.sliding_window

    @property
    def num_parameters(self) -> int:
        """All weights, embeddings included, a tied head counted once."""
        e, d = self.hidden_size, self.head_dim
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        attention = e * (q + 2 * kv) + q * e + (q + 2 * kv if self.qkv_bias else 0) + (2 * d if self.qk_norm else 0)
        layer = attention + 3 * e * self.intermediate_size + 2 * e
        embeddings = self.vocab_size * e * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + e
