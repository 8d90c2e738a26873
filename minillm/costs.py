"""What a forward pass costs before it runs: FLOPs, bytes, and the time that a roofline allows it.

Sums over a ModelConfig, no tensors. One multiply-add counts as two FLOPs; norms, RoPE, softmax and
activations are left out, because they are under 2% of the arithmetic. A step is described by its
sequences, each (n, context): n tokens computed now, context tokens in the cache afterwards; a prefill is
(n, n), a decode (1, context). Lesson 04; the roofline is Williams et al. 2009.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from minillm.config import ModelConfig
from minillm.devices import Device

Sequences = Iterable[tuple[int, int]]  # (tokens computed now, context afterwards)


# ---- FLOPs ---------------------------------------------------------------------------------------


def layer_parameters(config: ModelConfig) -> int:
    """Weights of the matrices of one layer, the ones that every token is multiplied with."""
    c, d = config, config.head_dim
    attention = c.hidden_size * d * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    return attention + 3 * c.hidden_size * c.intermediate_size


def linear_flops(config: ModelConfig, num_tokens: int) -> int:
    """All projections of all layers: 2 x parameters x tokens."""
    return 2 * layer_parameters(config) * config.num_hidden_layers * num_tokens


def visible_pairs(n: int, context: int, causal: bool = True, window: int | None = None) -> int:
    """(query, key) pairs that one head scores for n queries at the end of `context` keys."""
    if not causal:
        return n * context
    pairs = n * (context - n) + n * (n + 1) // 2  # row i sees context - n + i + 1 keys
    if window is not None:
        hidden = [max(0, context - n + i + 1 - window) for i in range(n)]
        pairs -= sum(hidden)
    return pairs


def attention_flops(config: ModelConfig, sequences: Sequences, causal: bool = True) -> int:
    """Scores and weighted values of all layers: 4 x H x D FLOPs for each visible pair."""
    sequences = list(sequences)
    per_pair = 4 * config.num_attention_heads * config.head_dim
    total = 0
    for layer in range(config.num_hidden_layers):
        window = config.layer_window(layer)
        total += per_pair * sum(visible_pairs(n, context, causal, window) for n, context in sequences)
    return total


def lm_head_flops(config: ModelConfig, num_rows: int) -> int:
    """The vocabulary product, only for rows that are sampled."""
    return 2 * config.hidden_size * config.vocab_size * num_rows


def step_flops(config: ModelConfig, sequences: Sequences, num_sampled: int | None = None, causal: bool = True) -> int:
    """One forward pass. `num_sampled` rows reach the LM head; by default one for each sequence."""
    sequences = list(sequences)
    rows = len(sequences) if num_sampled is None else num_sampled
    tokens = sum(n for n, _ in sequences)
    return linear_flops(config, tokens) + attention_flops(config, sequences, causal) + lm_head_flops(config, rows)


def quadratic_crossover(config: ModelConfig) -> float:
    """Prompt length where causal attention costs what all projections cost: parameters of a layer / (H x D)."""
    return layer_parameters(config) / (config.num_attention_heads * config.head_dim)


# ---- bytes ---------------------------------------------------------------------------------------


def weight_bytes(config: ModelConfig, bytes_per_value: float = 2) -> float:
    """All parameters, a tied head counted once."""
    return config.num_parameters * bytes_per_value


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: float = 2) -> float:
    """2 (K and V) x layers x Hkv x D x bytes per value."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * bytes_per_value


def score_bytes(config: ModelConfig, n: int, bytes_per_value: float = 2) -> float:
    """The n x n scores of all heads of one layer, which naive attention holds at once."""
    return config.num_attention_heads * n * n * bytes_per_value


def step_bytes(config: ModelConfig, sequences: Sequences, bytes_per_value: float = 2) -> float:
    """Least traffic of one pass: every weight once, the cached context read, the new K and V written.

    Embedding rows and activations are left out: under 1% of a decode's bytes, and a fused kernel keeps most of a
    prefill's in cache.
    """
    sequences = list(sequences)
    matrices = layer_parameters(config) * config.num_hidden_layers + config.hidden_size * config.vocab_size
    moved = sum(context + n for n, context in sequences)
    return matrices * bytes_per_value + kv_bytes_per_token(config, bytes_per_value) * moved


def intensity(config: ModelConfig, sequences: Sequences, bytes_per_value: float = 2) -> float:
    """FLOPs per byte of one pass: how often each byte that is loaded gets used."""
    sequences = list(sequences)
    return step_flops(config, sequences) / step_bytes(config, sequences, bytes_per_value)


# ---- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roofline:
    """Seconds that one pass takes if the slower of arithmetic and memory is the only limit."""

    flops: float
    bytes: float
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        return "compute" if self.compute_s >= self.memory_s else "memory"


def roofline(
    config: ModelConfig,
    sequences: Sequences,
    device: Device,
    dtype: str = "float16",
    compute_efficiency: float = 1.0,
    memory_efficiency: float = 1.0,
) -> Roofline:
    """One pass on a device. The efficiencies are the shares of the two peaks that real kernels reach."""
    sequences = list(sequences)
    bytes_per_value = 1 if dtype == "float8" else 2
    flops, moved = step_flops(config, sequences), step_bytes(config, sequences, bytes_per_value)
    return Roofline(
        flops,
        moved,
        flops / (device.peak(dtype) * compute_efficiency),
        moved / (device.bandwidth * memory_efficiency),
    )


def attention_tiles(num_heads: int, n: int, block_m: int = 128) -> int:
    """Independent pieces of one layer's prefill attention: heads x ceil(n / BLOCK_M)."""
    return num_heads * ceil(n / block_m)


def waves(num_tiles: int, device: Device) -> int:
    """Rounds in which a device works through its tiles, one tile on each SM at a time."""
    return ceil(num_tiles / device.num_sms)
