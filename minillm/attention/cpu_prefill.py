"""Prefill on a processor: PyTorch's attention, or tiles of queries as plain matrix products, and which of them runs.

PyTorch's kernel multiplies bfloat16 in small blocks, which is fast with AMX. Without AMX two large products with a
softmax between them take about half its time, although they write the scores of a tile to memory. The price: scores
are rounded to bfloat16 once, where the library keeps them in float32, and the output is two to three times further
from the exact one. Query heads that share a K/V head become rows of one product, so that head is read once for all.
Explained in lesson 11.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from minillm.attention.mask import accumulation_dtype, first_visible_key, visible
from minillm.attention.sdpa import library_attention

LIBRARY_TILE = 256
"""Queries per library call when a mask is needed: the masked-out corner of a tile is computed for nothing."""
PRODUCT_TILE = 128
"""Queries per product. Of 128, 192 and 256 the fastest at every length, on two cores of an AMD EPYC."""
FEWEST_SCORES = 2**16
"""Queries x keys from which on products pay. In the engine, on one core of an AMD EPYC, a prompt of 128 tokens takes
1.16 of the library's time and 256 take 0.90; on two, 1,024 take 0.65."""
BIAS = 8
"""A channel of the keys whose mean is this many times its spread is a bias, see `without_bias`."""
SAMPLE = 64
"""Keys, evenly spaced, by which a bias is told: over all 512 of a prompt the statistics took 2% of its prefill. The
first key, the sink of many heads, is none of them: it is unlike the others, and would hide any bias."""


def choose_prefill(dtype: torch.dtype) -> tuple[Callable, str]:
    """(`by_library` or `by_products`, the reason), for chunks of prompts of this dtype on this processor."""
    name = str(dtype).removeprefix("torch.")
    if dtype != torch.bfloat16:
        return by_library, f"prefill by PyTorch's attention, the faster and more exact one in {name}"
    if _has("_is_amx_tile_supported"):
        return by_library, "prefill by PyTorch's attention, which uses this processor's AMX"
    if not _has("_is_avx512_bf16_supported"):
        return by_library, f"prefill by PyTorch's attention: this processor has no {name} products"
    return by_products, f"prefill by matrix products in tiles of {PRODUCT_TILE} queries: this processor has no AMX"


def by_library(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, with_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries [n, H, D] that end the keys [S, Hkv, D], n <= S: (out [n, H, D], lse [n, H], which is free here).

    A fresh prompt is one causal call, anything else one call per tile of queries with the keys that it sees.
    """
    n, num_keys = q.shape[0], k.shape[0]
    if n == num_keys and (window is None or window >= n):
        return library_attention(q, k, v, causal=True)
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
    for rows, position, first, end in _tiles(n, num_keys, window, LIBRARY_TILE):
        mask = visible(torch.arange(position, end), torch.arange(first, end), window)
        out[rows], lse[rows] = library_attention(q[rows], k[first:end], v[first:end], mask)
    return out, lse


def by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, with_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same from plain products: a tile's scores, their softmax, times the values. lse is None unless asked for.

    Few scores go to the library all the same, and it returns their lse anyway.
    """
    n, num_heads, head_size = q.shape
    num_keys, kv_heads = k.shape[:2]
    if n * num_keys < FEWEST_SCORES:
        return by_library(q, k, v, window)
    scale = 1 / math.sqrt(head_size)
    k, bias = without_bias(k)
    keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()  # [Hkv, S, D]
    queries = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, G, n, D]

    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype)) if with_lse else None
    room = q.new_empty(num_heads * min(n, PRODUCT_TILE) * num_keys)  # fresh memory costs as much as a product
    for rows, position, first, end in _tiles(n, num_keys, window, PRODUCT_TILE):
        tile = queries[:, :, rows].flatten(1, 2)  # [Hkv, G x n', D], n' queries of this tile
        scores = room[: num_heads * (rows.stop - rows.start) * (end - first)].view(kv_heads, tile.shape[1], -1)
        torch.baddbmm(scores, tile, keys[:, first:end].mT, beta=0, alpha=scale, out=scores)  # beta=0 reads no room
        _hide(scores.view(num_heads, rows.stop - rows.start, -1), position, first, end, window)
        if lse is not None:
            lse[rows] = scores.to(lse.dtype).logsumexp(-1).view(num_heads, -1).T
        torch.softmax(scores, -1, out=scores)
        mixed = torch.bmm(scores, values[:, first:end])  # [Hkv, G x n', D]
        out[rows] = mixed.view(num_heads, -1, head_size).transpose(0, 1)
    if lse is not None:
        grouped = q.unflatten(1, (kv_heads, -1)).to(lse.dtype)
        lse += scale * torch.einsum("nhgd,hd->nhg", grouped, bias).flatten(1)
    return out, lse


def without_bias(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys [S, Hkv, D] without what all of them share, that bias [Hkv, D] in float32); k itself where there is none.

    A bias moves all scores of a query by the same amount, which softmax does not see but rounding does: bfloat16
    numbers near 300 are 2 apart, and Qwen2's keys get scores like that. Other channels stay as they are, for a
    difference has to be rounded anew: centred throughout, the output was up to twice as far off.
    """
    every = -(-len(k) // SAMPLE)
    sample = k[every // 2 :: every].to(accumulation_dtype(k.dtype))
    spread, mean = torch.std_mean(sample, 0, correction=0)
    bias = mean * (mean.abs() > BIAS * spread)
    return ((k - bias).to(k.dtype) if bias.any() else k), bias


def _tiles(n: int, num_keys: int, window: int | None, size: int):
    """(rows, position of the first of them, first key that it sees, end of the keys that the last one sees)."""
    before = num_keys - n
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        yield rows, before + start, first_visible_key(before + start, window), before + rows.stop


def _hide(scores: torch.Tensor, position: int, first: int, end: int, window: int | None) -> None:
    """-inf where a query of the tile does not see a key: scores [H, n', end - first], in place."""
    start = position if window is None else first  # without a window all queries of the tile see all keys before it
    seen = visible(torch.arange(position, end), torch.arange(start, end), window)
    scores[..., start - first :] += torch.zeros(seen.shape, dtype=scores.dtype).masked_fill_(~seen, -math.inf)


def _has(feature: str) -> bool:
    """What PyTorch's probe of this name says of the processor; False where there is no such probe."""
    return getattr(torch.cpu, feature, bool)()
