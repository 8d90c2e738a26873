"""How long a step takes if arithmetic or memory is the only limit, and how near a measured time comes to that.

The call that a simulator needs, for a step of sequences (n, context) as in `costs.py`:

    step_seconds(config, sequences, device, dtype="float16", compute_efficiency=1.0, memory_efficiency=1.0,
                 overhead_s=0.0, num_sampled=None) -> float

It is a bound and not a promise: the efficiencies are the shares of the two peaks that real kernels reach, 1.0 if
nothing is known. Lesson 04; after Williams, Waterman and Patterson 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from minillm import costs
from minillm.costs import Operation, Sequences
from minillm.devices import Device
from minillm.errors import ConfigError
from minillm.model_config import ModelConfig

BYTES_PER_VALUE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}


@dataclass(frozen=True)
class Roofline:
    """Seconds that some work takes if the slower of arithmetic and memory is the only limit."""

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
    """One pass as a whole, as if all its operations overlapped: the lower bound."""
    sequences = list(sequences)
    flops, moved = costs.step_flops(config, sequences), costs.step_bytes(config, sequences, size_of(dtype))
    return _bound(flops, moved, device, dtype, compute_efficiency, memory_efficiency)


def step_seconds(
    config: ModelConfig,
    sequences: Sequences,
    device: Device,
    dtype: str = "float16",
    compute_efficiency: float = 1.0,
    memory_efficiency: float = 1.0,
    overhead_s: float = 0.0,
    num_sampled: int | None = None,
    naive: bool = False,
) -> float:
    """One pass with its operations one after another, each at its own roof, plus `overhead_s`. 0 for an empty step.

    num_sampled  rows that reach the LM head; by default one for each sequence, 0 for a chunk that is not the last
    naive        attention computes the full square and sends its scores through memory
    """
    sequences = list(sequences)
    if not sequences:
        return 0.0
    done = costs.operations(config, sequences, size_of(dtype), num_sampled, naive)
    efficiencies = compute_efficiency, memory_efficiency
    return overhead_s + sum(operation_time(op, device, dtype, *efficiencies).seconds for op in done)


def operation_time(
    operation: Operation,
    device: Device,
    dtype: str = "float16",
    compute_efficiency: float = 1.0,
    memory_efficiency: float = 1.0,
) -> Roofline:
    """One operation of `costs.operations`."""
    return _bound(operation.flops, operation.bytes, device, dtype, compute_efficiency, memory_efficiency)


def _bound(flops, moved, device: Device, dtype: str, compute_efficiency: float, memory_efficiency: float) -> Roofline:
    for share in (compute_efficiency, memory_efficiency):
        if not 0 < share <= 1:
            raise ConfigError(f"an efficiency of {share} is not a share of a peak; give more than 0, at most 1")
    compute_s = flops / (device.peak(dtype) * compute_efficiency)
    return Roofline(flops, moved, compute_s, moved / (device.bandwidth * memory_efficiency))


def predict_ttft(
    config: ModelConfig, n: int, device: Device, chunk: int | None = None, cached: int = 0, **how
) -> float:
    """Seconds from a prompt of n tokens to its first token, alone on the device.

    chunk   most tokens of one step; None computes the prompt in one
    cached  tokens at its beginning that the prefix cache holds, fewer than n
    how     dtype, efficiencies and overhead_s of `step_seconds`
    """
    if not 0 <= cached < n or (chunk is not None and chunk < 1):
        raise ConfigError(f"{n} tokens, {cached} of them cached, in chunks of {chunk}: at least one must be computed")
    ends = [*range(cached + (chunk or n), n, chunk or n), n]
    starts = [cached, *ends[:-1]]
    return sum(
        step_seconds(config, [(end - start, end)], device, num_sampled=int(end == n), **how)
        for start, end in zip(starts, ends, strict=True)
    )


# ---- how near a measurement comes ----------------------------------------------------------------


def mfu(flops: float, seconds: float, device: Device, dtype: str = "float16") -> float:
    """Model FLOPs utilisation: counted FLOPs per second over the peak."""
    return flops / seconds / device.peak(dtype)


def mbu(moved: float, seconds: float, device: Device) -> float:
    """Memory bandwidth utilisation: bytes that had to move, per second, over the peak."""
    return moved / seconds / device.bandwidth


# ---- how much work at once -----------------------------------------------------------------------


def ridge_batch(device: Device, dtype: str = "float16") -> int:
    """Least rows at which a matrix takes longer to multiply with than to read: 2 FLOPs per row and value."""
    return ceil(device.ridge(dtype) * size_of(dtype) / 2)


def attention_tiles(num_heads: int, n: int, block_m: int = 128) -> int:
    """Independent pieces of one layer's prefill attention: heads x ceil(n / BLOCK_M)."""
    return num_heads * ceil(n / block_m)


def waves(num_tiles: int, device: Device) -> int:
    """Rounds in which a device works through its tiles, one tile on each SM at a time."""
    return ceil(num_tiles / device.num_sms)


def busy(num_tiles: int, device: Device) -> float:
    """Share of the SMs that have a tile, over all waves: 1.0 if the last wave is full too."""
    return num_tiles / (waves(num_tiles, device) * device.num_sms)


def size_of(dtype: str) -> int:
    """Bytes of one value. Raises ConfigError for a type that nothing here knows."""
    if dtype not in BYTES_PER_VALUE:
        raise ConfigError(f"no size known for {dtype!r}; known: {', '.join(BYTES_PER_VALUE)}")
    return BYTES_PER_VALUE[dtype]
