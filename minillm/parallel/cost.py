"""What the ranks of one step say to each other costs: bytes and seconds, from the shape alone.

Each of N ranks multiplies 1/N of every matrix, so its own work shrinks with N; what is summed does not, which is why
a split pays between GPUs with a fast link and rarely elsewhere. `ranks.Traffic` counts the same bytes in a running
engine. Lesson 18.
"""

from __future__ import annotations

from minillm import roofline
from minillm.costs import Sequences
from minillm.devices import Device
from minillm.model_config import ModelConfig


def summed_bytes(config: ModelConfig, num_tokens: int, bytes_per_value: float = 2) -> float:
    """Two all-reduces of T x E values in each layer; the same for every number of ranks."""
    return 2 * config.num_hidden_layers * num_tokens * config.hidden_size * bytes_per_value


def gathered_bytes(config: ModelConfig, num_sampled: int, bytes_per_value: float = 2) -> float:
    """The logits of the sampled rows, put together on rank 0."""
    return num_sampled * config.vocab_size * bytes_per_value


def communication_seconds(
    config: ModelConfig,
    num_tokens: int,
    num_sampled: int,
    size: int,
    link_bandwidth: float,
    link_latency_s: float = 0.0,
    bytes_per_value: float = 2,
) -> float:
    """Seconds that `size` ranks spend in the collectives of one step, with nothing computed meanwhile.

    link_bandwidth  bytes per second from one rank to another, one way
    link_latency_s  of each collective, whatever its size

    In a ring each rank sends 2 (N - 1) / N of what is summed: once to add up, once to hand out the sum. Of the logits
    (N - 1) / N arrive at rank 0.
    """
    if size == 1:
        return 0.0
    moved = 2 * summed_bytes(config, num_tokens, bytes_per_value) + gathered_bytes(config, num_sampled, bytes_per_value)
    calls = 2 * config.num_hidden_layers + (num_sampled > 0)
    return (size - 1) / size * moved / link_bandwidth + calls * link_latency_s


def step_seconds(
    config: ModelConfig,
    sequences: Sequences,
    device: Device,
    size: int,
    link_bandwidth: float,
    link_latency_s: float = 0.0,
    num_sampled: int | None = None,
    dtype: str = "float16",
    **how,
) -> float:
    """`roofline.step_seconds` on `size` devices: 1/N of the work on each, and the collectives. 0 for an empty step.

    how  efficiencies and overhead_s of `roofline.step_seconds`; the overhead is not divided
    """
    sequences = list(sequences)
    if not sequences:
        return 0.0
    overhead_s = how.pop("overhead_s", 0.0)
    alone = roofline.step_seconds(config, sequences, device, dtype, num_sampled=num_sampled, **how)
    tokens = sum(n for n, _ in sequences)
    sampled = len(sequences) if num_sampled is None else num_sampled
    link = link_bandwidth, link_latency_s, roofline.size_of(dtype)
    return overhead_s + alone / size + communication_seconds(config, tokens, sampled, size, *link)
