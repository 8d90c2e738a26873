"""The staircase of tile quantisation: how the time of a layer's products grows with the rows, and in which tiles.

A library multiplies in tiles of rows, and a tile that is begun is computed whole, so time stands still within a tile
and jumps behind it. Which tiles it takes depends on processor, type and shape: this file looks for them in measured
times. What a scheduler can do about it is `scheduler/align.py`. Lesson 10.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from math import ceil

import torch

TILES = (16, 32, 64, 128)  # rows, the sizes that are looked for
EDGES = tuple(range(96, 289, 16))
LENGTHS = tuple(sorted({n for m in EDGES for n in (m, m + 1, m + 8) if n <= EDGES[-1]}))
PUBLISHED_MS = {128: 55.0, 256: 69.8, 257: 92.3}
"""Milliseconds by tokens of a step: SARATHI (Agrawal et al. 2023, arXiv 2308.16369), figure 7."""


def layer_products(model, num_tokens: int) -> Callable[[], None]:
    """The four products of the model's middle layer on rows of noise [num_tokens, ...]."""
    layer, config = model.layers[len(model.layers) // 2], model.config
    widths = config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size
    x, heads, wide = (torch.randn(num_tokens, width, device=model.device).to(model.dtype) for width in widths)

    def run() -> None:
        layer.qkv_proj(x)
        layer.o_proj(heads)
        layer.gate_up_proj(x)
        layer.down_proj(wide)

    return run


def filled(num_tokens: int, tile: int) -> int:
    """Rows that are computed where tiles are: 257 -> 384 in tiles of 128."""
    return ceil(num_tokens / tile) * tile


def fit(seconds: Mapping[int, float], tile: int) -> tuple[float, float, float]:
    """(a, b, share of the variance that is left) of `seconds = a + b x filled rows`, by least squares."""
    taken = torch.tensor(list(seconds.values()), dtype=torch.float64)
    rows = torch.tensor([[1.0, filled(n, tile)] for n in seconds], dtype=torch.float64)
    a, b = torch.linalg.lstsq(rows, taken).solution.tolist()
    error = taken - rows @ torch.tensor([a, b], dtype=torch.float64)
    return a, b, float(error.var() / taken.var())


def unexplained(seconds: Mapping[int, float]) -> dict[int, float]:
    """tile -> the share that `fit` leaves; tile 1 is a straight line. Each has two free numbers, so they compare."""
    return {tile: fit(seconds, tile)[2] for tile in (1, *TILES)}


def jumps(ratio: Callable[[int, int], float], edges: tuple[int, ...] = EDGES[:-1]) -> dict[int, float]:
    """tile -> how many times as long one row more takes at its edges, those of larger tiles left out; the median.

    ratio  (n, m) -> how many times as long n rows take as m
    """
    found: dict[int, list[float]] = {tile: [] for tile in TILES}
    for edge in edges:
        found[max(tile for tile in TILES if edge % tile == 0)].append(ratio(edge + 1, edge))
    return {tile: statistics.median(ratios) for tile, ratios in found.items() if ratios}
