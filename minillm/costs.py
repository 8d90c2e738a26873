"""What a forward pass costs before it runs: FLOPs and bytes of every operation.

Sums over a ModelConfig, no tensors. How long that takes on a device is `roofline.py`'s business, what has to be
held in memory `memory.py`'s. One multiply-add counts as two FLOPs; norms, RoPE, softmax and activations are left
out: under 2% of the arithmetic. A step is described by its sequences, each (n, context): n tokens computed now,
context tokens in the cache afterwards; a prefill is (n, n), a chunk (n, more than n), a decode (1, context).
Lesson 04.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from minillm.model_config import ModelConfig

Sequences = Iterable[tuple[int, int]]  # (tokens computed now, context afterwards)
WeightSize = Callable[[str, int], float]
LM_HEAD = "LM head"
NAIVE_PASSES = 6  # over the scores: written; read and written by the mask; so by the softmax; read to mix the values


# ---- FLOPs ---------------------------------------------------------------------------------------


def layer_matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the matrices of one layer, stacked as the model stacks them."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return {
        "qkv": (e, (heads + 2 * kv_heads) * d),
        "output": (heads * d, e),
        "gate and up": (e, 2 * f),
        "down": (f, e),
    }


def layer_parameters(config: ModelConfig) -> int:
    """Weights of the matrices of one layer, the ones that every token is multiplied with."""
    return sum(inputs * outputs for inputs, outputs in layer_matrices(config).values())


def linear_flops(config: ModelConfig, num_tokens: int) -> int:
    """All projections of all layers: 2 x parameters x tokens."""
    return 2 * layer_parameters(config) * config.num_hidden_layers * num_tokens


def visible_pairs(n: int, context: int, causal: bool = True, window: int | None = None) -> int:
    """(query, key) pairs that one head scores for n queries at the end of `context` keys."""
    if not causal:
        return n * context
    pairs = n * (context - n) + n * (n + 1) // 2  # row i sees context - n + i + 1 keys
    if window is not None and context > window:
        hidden = context - window  # keys that the last row no longer sees; one fewer for each row before it
        rows = min(n, hidden)
        pairs -= rows * (2 * hidden - rows + 1) // 2
    return pairs


def attention_flops(config: ModelConfig, sequences: Sequences, causal: bool = True) -> int:
    """Scores and weighted values of all layers: 4 x H x D FLOPs for each visible pair."""
    sequences = list(sequences)
    pairs = sum(
        layers * visible_pairs(n, context, causal, window)
        for window, layers in _layers_by_window(config).items()
        for n, context in sequences
    )
    return 4 * config.num_attention_heads * config.head_dim * pairs


def lm_head_flops(config: ModelConfig, num_rows: int) -> int:
    """The vocabulary product, only for rows that are sampled."""
    return 2 * config.hidden_size * config.vocab_size * num_rows


def step_flops(config: ModelConfig, sequences: Sequences, num_sampled: int | None = None, causal: bool = True) -> int:
    """One forward pass. `num_sampled` rows reach the LM head; by default one for each sequence."""
    sequences = list(sequences)
    rows = len(sequences) if num_sampled is None else num_sampled
    tokens = sum(n for n, _ in sequences)
    return linear_flops(config, tokens) + attention_flops(config, sequences, causal) + lm_head_flops(config, rows)


def quadratic_crossover(config: ModelConfig, causal: bool = True) -> float:
    """Prompt length where attention costs what all projections cost: parameters of a layer / (H x D) when causal,
    half of that for a kernel that computes the full square."""
    length = layer_parameters(config) / (config.num_attention_heads * config.head_dim)
    return length if causal else length / 2


# ---- bytes ---------------------------------------------------------------------------------------


def weight_bytes(config: ModelConfig, bytes_per_value: float = 2, weight_size: WeightSize | None = None) -> float:
    """All parameters, a tied head counted once, unless it is held in another type than the embedding."""
    total = config.num_parameters * bytes_per_value
    if weight_size is None:
        return total
    for name, (inputs, outputs) in layer_matrices(config).items():
        total += config.num_hidden_layers * inputs * outputs * (weight_size(name, inputs) - bytes_per_value)
    size = weight_size(LM_HEAD, config.hidden_size)
    saved = 0 if config.tie_word_embeddings and size != bytes_per_value else bytes_per_value
    return total + config.vocab_size * config.hidden_size * (size - saved)


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: float = 2) -> float:
    """2 (K and V) x layers x Hkv x D x bytes per value."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * bytes_per_value


def score_bytes(config: ModelConfig, n: int, bytes_per_value: float = 2) -> float:
    """The n x n scores of all heads of one layer, which naive attention holds at once."""
    return config.num_attention_heads * n * n * bytes_per_value


@dataclass(frozen=True)
class Operation:
    """One kind of work of a step, summed over the layers that do it.

    weights      bytes of matrices, each read once
    kv           bytes of the cache that are read and written
    scores       bytes of score matrices that travel to memory and back, none in a fused kernel
    activations  bytes of rows in and out, if none of them stayed in an on-chip cache; not part of `bytes`
    """

    name: str
    flops: float
    weights: float = 0
    kv: float = 0
    scores: float = 0
    activations: float = 0

    @property
    def bytes(self) -> float:
        """The least traffic: weights, cache, scores."""
        return self.weights + self.kv + self.scores


def operations(
    config: ModelConfig,
    sequences: Sequences,
    bytes_per_value: float = 2,
    num_sampled: int | None = None,
    naive: bool = False,
    kv_bytes_per_value: float | None = None,
    weight_size: WeightSize | None = None,
) -> list[Operation]:
    """Every operation of one pass, in the order of the model.

    num_sampled         rows that reach the LM head; by default one for each sequence, none for a chunk that is not the
                        last
    naive               attention computes the full square and sends its scores through memory
    kv_bytes_per_value  of the cache, where it is kept in another type than the rest
    weight_size         (name of a matrix, its inputs) -> bytes per weight, where they are not `bytes_per_value`
    """
    sequences, layers = list(sequences), config.num_hidden_layers
    tokens = sum(n for n, _ in sequences)
    rows = len(sequences) if num_sampled is None else num_sampled

    def product(name: str, inputs: int, outputs: int, rows: int, times: int) -> Operation:
        size = inputs * outputs * times
        moved = (inputs + outputs) * rows * times
        weights = size * (weight_size(name, inputs) if weight_size else bytes_per_value)
        return Operation(name, 2 * size * rows, weights, activations=moved * bytes_per_value)

    done = {name: product(name, *shape, tokens, layers) for name, shape in layer_matrices(config).items()}
    head = [product(LM_HEAD, config.hidden_size, config.vocab_size, rows, 1)] if rows else []
    kv_size = bytes_per_value if kv_bytes_per_value is None else kv_bytes_per_value
    attention = _attention(config, sequences, bytes_per_value, kv_size, naive)
    return [done["qkv"], attention, *list(done.values())[1:], *head]


def _attention(
    config: ModelConfig, sequences: list[tuple[int, int]], bytes_per_value: float, kv_size: float, naive: bool
) -> Operation:
    """K and V of each visible token are read, those of the new ones written; a window shortens what is read."""
    written = config.num_hidden_layers * sum(n for n, _ in sequences)
    read = sum(
        layers * sum(context if window is None else min(context, window + n - 1) for n, context in sequences)
        for window, layers in _layers_by_window(config).items()
    )
    pairs = config.num_hidden_layers * sum(n * context for n, context in sequences) if naive else 0
    rows = 2 * config.num_attention_heads * config.head_dim * written  # q in, the mix out
    return Operation(
        "attention",
        attention_flops(config, sequences, causal=not naive),
        kv=2 * config.num_key_value_heads * config.head_dim * (read + written) * kv_size,
        scores=NAIVE_PASSES * config.num_attention_heads * pairs * bytes_per_value,
        activations=rows * bytes_per_value,
    )


def _layers_by_window(config: ModelConfig) -> dict[int | None, int]:
    if config.sliding_window is None:
        return {None: config.num_hidden_layers}
    return Counter(config.layer_window(layer) for layer in range(config.num_hidden_layers))


def step_bytes(
    config: ModelConfig, sequences: Sequences, bytes_per_value: float = 2, num_sampled: int | None = None
) -> float:
    """Least traffic of one pass: every weight once, the cached context read, the new K and V written.

    Embedding rows and activations are left out: under 1% of a decode's bytes, and a fused kernel keeps most of a
    prefill's in cache.
    """
    return sum(op.bytes for op in operations(config, sequences, bytes_per_value, num_sampled))


def intensity(config: ModelConfig, sequences: Sequences, bytes_per_value: float = 2) -> float:
    """FLOPs per byte of one pass."""
    sequences = list(sequences)
    return step_flops(config, sequences) / step_bytes(config, sequences, bytes_per_value)


def reuse(config: ModelConfig, sequences: Sequences, bytes_per_value: float = 2) -> float:
    """How often each value that is loaded takes part in a multiply-add: 1 means every byte is used once."""
    return intensity(config, sequences, bytes_per_value) * bytes_per_value / 2
