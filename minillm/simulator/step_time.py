"""How long a step takes: at the roofline of a GPU, or as measured on this machine.

A step is the list of its sequences (n, context), n tokens computed now and `context` in the cache afterwards, with
the number of rows that reach the LM head, as in `costs.py`. Both models are sums over the step's totals, so
that a hundred thousand requests can be simulated in a minute.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from minillm import costs
from minillm.devices import Device
from minillm.errors import ConfigError
from minillm.model_config import ModelConfig
from minillm.parallel.cost import communication_seconds
from minillm.roofline import operation_time, size_of

COMPUTE_EFFICIENCY = 0.6  # share of the peak that the matrix products of a prefill reach; assumed, not measured
MEMORY_EFFICIENCY = 0.8  # share of the bandwidth that a decode reaches; assumed too
OVERHEAD_S = 0.002  # scheduling, launches and sampling of one step; assumed too
LINK_BANDWIDTH = 300e9  # bytes per second each way between the GPUs of one server: NVLink 3, A100 datasheet
LINK_LATENCY_S = 10e-6  # of one all-reduce; assumed


class Totals(NamedTuple):
    """What a step amounts to."""

    tokens: int
    pairs: int  # (query, visible key) pairs of one head
    kv_rows: int  # rows of the cache that are read and written in each layer

    @classmethod
    def of(cls, sequences: list[tuple[int, int]]) -> Totals:
        tokens = pairs = kv_rows = 0
        for n, context in sequences:
            tokens += n
            kv_rows += context + n
            pairs += context if n == 1 else n * (context - n) + n * (n + 1) // 2
        return cls(tokens, pairs, kv_rows)


class StepTime(Protocol):
    """Seconds of a step. `num_sampled` rows reach the LM head."""

    def __call__(self, sequences: list[tuple[int, int]], num_sampled: int) -> float: ...


@dataclass(frozen=True)
class RooflineStepTime:
    """`roofline.step_seconds` on one GPU, or on `tensor_parallel_size` of them that share every matrix and all heads.

    tile_rows  rows of the tiles in which a product is computed: from one tile on each is paid whole (for fewer rows
               there are kernels with smaller tiles), a staircase where arithmetic is the limit. 1: none. Tiles over
               columns and waves over SMs are left out.

    Two all-reduces per layer add up the parts, and the logits are gathered. Raises ConfigError when heads cannot be
    shared evenly.
    """

    config: ModelConfig
    device: Device
    dtype: str = "float16"
    tensor_parallel_size: int = 1
    compute_efficiency: float = COMPUTE_EFFICIENCY
    memory_efficiency: float = MEMORY_EFFICIENCY
    overhead_s: float = OVERHEAD_S
    link_bandwidth: float = LINK_BANDWIDTH
    link_latency_s: float = LINK_LATENCY_S
    tile_rows: int = 1

    def __post_init__(self):
        if self.tile_rows < 1:
            raise ConfigError(f"tile_rows={self.tile_rows}; a tile has 1 row or more")
        heads, kv_heads, size = (
            self.config.num_attention_heads,
            self.config.num_key_value_heads,
            self.tensor_parallel_size,
        )
        if size < 1 or heads % size or kv_heads % size:
            raise ConfigError(f"tensor_parallel_size={size} does not divide {heads} heads and {kv_heads} KV heads")
        linear = [op for op in costs.operations(self.config, [(1, 1)], self._value_bytes, 0) if op.name != "attention"]
        head = costs.operations(self.config, [(1, 1)], self._value_bytes, 1)[-1]
        flops_s = self.device.peak(self.dtype) * self.compute_efficiency * size
        bytes_s = self.device.bandwidth * self.memory_efficiency * size
        per_row = costs.kv_bytes_per_token(self.config, self._value_bytes)
        per_pair = 4 * self.config.num_hidden_layers * heads * self.config.head_dim
        set_once = object.__setattr__
        set_once(self, "_products", [(op.flops / flops_s, op.bytes / bytes_s) for op in linear])
        set_once(self, "_head", (head.flops / flops_s, head.bytes / bytes_s))
        set_once(self, "_attention", (per_pair / flops_s, per_row / bytes_s))

    @property
    def _value_bytes(self) -> int:
        return size_of(self.dtype)

    def __call__(self, sequences: list[tuple[int, int]], num_sampled: int) -> float:
        if not sequences:
            return 0.0
        tokens = sum(n for n, _ in sequences)
        rows = tokens if tokens < self.tile_rows else -(-tokens // self.tile_rows) * self.tile_rows
        seconds = self.overhead_s + self._communication(tokens, num_sampled)
        for per_row, at_least in self._products:
            seconds += max(per_row * rows, at_least)
        if num_sampled:
            seconds += max(self._head[0] * num_sampled, self._head[1])
        if self.config.sliding_window is not None:
            return seconds + self._attention_in_windows(sequences)
        total = Totals.of(sequences)
        return seconds + max(self._attention[0] * total.pairs, self._attention[1] * total.kv_rows)

    def _attention_in_windows(self, sequences: list[tuple[int, int]]) -> float:
        """By the operation itself, which knows windows; the heads are shared by all GPUs."""
        (attention,) = (
            op for op in costs.operations(self.config, sequences, self._value_bytes) if op.name == "attention"
        )
        efficiencies = self.compute_efficiency, self.memory_efficiency
        alone = operation_time(attention, self.device, self.dtype, *efficiencies).seconds
        return alone / self.tensor_parallel_size

    def _communication(self, num_tokens: int, num_sampled: int) -> float:
        link = self.link_bandwidth, self.link_latency_s, self._value_bytes
        return communication_seconds(self.config, num_tokens, num_sampled, self.tensor_parallel_size, *link)

    @property
    def assumptions(self) -> dict:
        """What the numbers rest on, for the output."""
        names = (
            "compute_efficiency",
            "memory_efficiency",
            "overhead_s",
            "link_bandwidth",
            "link_latency_s",
            "tile_rows",
        )
        where = {"device": self.device.name, "dtype": self.dtype, "tensor_parallel_size": self.tensor_parallel_size}
        return where | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class FittedStepTime:
    """A sum fitted to measured steps: a broken line over the tokens, and a price for each pair, row and sequence.

    knots     [(tokens, seconds)] in order; straight between them and on beyond the last
    pair_s    per (query, key) pair
    row_s     per row of the cache
    sampled_s per row that is sampled, the first one apart
    """

    knots: tuple[tuple[int, float], ...]
    pair_s: float
    row_s: float
    sampled_s: float

    def __call__(self, sequences: list[tuple[int, int]], num_sampled: int) -> float:
        if not sequences:
            return 0.0
        total = Totals.of(sequences)
        extra = self.pair_s * total.pairs + self.row_s * total.kv_rows + self.sampled_s * max(0, num_sampled - 1)
        return self.line(total.tokens) + extra

    def line(self, num_tokens: int) -> float:
        """Seconds of everything that is done row by row."""
        right = min(max(1, bisect_left(self.knots, (num_tokens,))), len(self.knots) - 1)
        (x0, y0), (x1, y1) = self.knots[right - 1], self.knots[right]
        return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)

    @property
    def assumptions(self) -> dict:
        return {
            "device": "this machine, calibrated",
            "knots": [list(knot) for knot in self.knots],
            "pair_s": self.pair_s,
            "row_s": self.row_s,
            "sampled_s": self.sampled_s,
        }
