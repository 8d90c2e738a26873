"""What has to be held at once: parameters, the activations of one step, KV cache, and what its layout wastes.

An estimate from the shape alone: `resources.py` decides what a running engine takes. Bytes that move are counted
in `costs.py`. Lesson 04, and lesson 06 for what pages save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minillm import costs
from minillm.errors import ConfigError
from minillm.model_config import ModelConfig

SCORE_COPIES = 3  # naive attention holds scores, probabilities and the copy between them; so K, V and its result
SCORE_BYTES = 4  # scores and logits are float32


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose. `fragmentation` is KV memory that is reserved and holds no token."""

    parameters: float
    activations: float
    kv: float
    fragmentation: float

    @property
    def total(self) -> float:
        return self.parameters + self.activations + self.kv + self.fragmentation


def estimate(
    config: ModelConfig,
    contexts: Sequence[int],
    bytes_per_value: float = 2,
    block_size: int = 16,
    reserved: int | None = None,
    step_tokens: int = 2048,
    naive: bool = False,
    kv_bytes_per_value: float | None = None,
    weight_size: costs.WeightSize | None = None,
) -> Memory:
    """Memory of an engine that holds one sequence for each of `contexts`.

    reserved            tokens that each sequence reserves at once; None gives it pages of `block_size` as it grows
    step_tokens         most tokens of one step; the activations are theirs
    naive               attention that holds its scores, and a longest prompt that is computed in one step
    kv_bytes_per_value  of the cache, where it is kept in another type than the rest: `eight_bit.bytes_per_value`
    weight_size         bytes per weight of each matrix, as `costs.operations` has it
    """
    kv_size = bytes_per_value if kv_bytes_per_value is None else kv_bytes_per_value
    per_token = costs.kv_bytes_per_token(config, kv_size)
    rows, keys = (max(contexts, default=0),) * 2 if naive else (step_tokens, 0)
    return Memory(
        parameters=costs.weight_bytes(config, bytes_per_value, weight_size),
        activations=activations(config, rows, bytes_per_value, len(contexts), keys),
        kv=per_token * sum(contexts),
        fragmentation=per_token * wasted_tokens(contexts, block_size, reserved),
    )


def wasted_tokens(contexts: Sequence[int], block_size: int = 16, reserved: int | None = None) -> int:
    """Rows of the cache that are reserved for these sequences and hold nothing.

    Raises ConfigError for a sequence that is longer than its reservation.
    """
    if reserved is None:
        return sum(-context % block_size for context in contexts)
    longest = max(contexts, default=0)
    if longest > reserved:
        raise ConfigError(f"reserved={reserved} tokens cannot hold a context of {longest}; reserve at least as many")
    return sum(reserved - context for context in contexts)


def activations(
    config: ModelConfig, num_tokens: int, bytes_per_value: float = 2, num_sampled: int = 1, naive_context: int = 0
) -> float:
    """The most bytes of rows that one step of `num_tokens` has alive at once in `Transformer.forward`: in attention,
    in the feed-forward block, or at the logits. One layer at a time is at work.

    naive_context  keys that naive attention scores for each token, 0 for a fused kernel
    """
    heads, kv_heads, d, e = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
    row = e + 2 * d + (heads + 2 * kv_heads) * d + (heads + kv_heads) * d  # x; cos, sin; qkv; q and k, turned
    feed_forward = row + heads * d + 3 * e + 3 * config.intermediate_size  # attended; x, y, x + y; gate, up, product
    naive = SCORE_COPIES * heads * (naive_context * SCORE_BYTES / bytes_per_value + d) if naive_context else 0
    layer = num_tokens * max(feed_forward, row + naive) * bytes_per_value
    logits = num_tokens * (e + 2 * d) * bytes_per_value + num_sampled * config.vocab_size * SCORE_BYTES
    return max(layer, logits)


def largest_batch(config: ModelConfig, memory: float, context: int, **how) -> int:
    """Most sequences of `context` tokens that fit into `memory` bytes; `how` as in `estimate`."""
    return _largest(lambda batch: estimate(config, [context] * batch, **how).total <= memory)


def largest_context(config: ModelConfig, memory: float, batch: int = 1, **how) -> int:
    """Longest context that `batch` sequences can have in `memory` bytes; `how` as in `estimate`, but nothing reserved.

    The model may have been trained for fewer: see `max_position_embeddings`. Raises ConfigError for a batch of none,
    which any context would fit.
    """
    if batch < 1:
        raise ConfigError(f"batch={batch} has no longest context; give 1 or more")
    return _largest(lambda context: estimate(config, [context] * batch, **how).total <= memory)


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest n that fits, 0 if not even 1 does: doubled until it no longer fits, then halved in."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
