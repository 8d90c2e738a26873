"""FlashAttention's algorithm in PyTorch: the softmax is built up tile by tile, the n x S matrix never exists.

Two levels of tiles: a tile of queries keeps a running maximum, sum and output while it walks the tiles of
keys that its queries can see; tiles that none of them sees are never read. The memory falls from n x S scores
to one tile of them. In Python each tile costs some calls, so small tiles are slower than one big product.
Built in lesson 08, after FlashAttention-2 (Dao 2023, arXiv 2307.08691).
"""

from __future__ import annotations

import math

import torch

from minillm.attention.mask import accumulation_dtype, check_inputs, first_visible_key, visible


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    query_tile: int = 64,
    key_tile: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one sequence: q [n, H, D], k and v [S, Hkv, D] -> (out [n, H, D], lse [n, H])."""
    check_inputs(q, k, v, window)
    n, num_keys = q.shape[0], k.shape[0]
    precision = accumulation_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=precision, device=q.device)

    for start in range(0, n, query_tile):
        rows = slice(start, min(start + query_tile, n))
        position = num_keys - n + start  # of the tile's first query
        out[rows], lse[rows] = _one_query_tile(q[rows].to(precision), k, v, position, window, key_tile)
    return out, lse


def _one_query_tile(q, k, v, position, window, key_tile):
    """Queries [m, H, D] at `position` and following, against every key that one of them sees."""
    m, num_heads, head_size = q.shape
    groups = (k.shape[1], num_heads // k.shape[1])  # Hkv, G: G query heads share a K/V head
    q = q.unflatten(1, groups) / math.sqrt(head_size)  # [m, Hkv, G, D]
    highest = q.new_full(q.shape[:3], -math.inf)  # the largest score so far
    total = q.new_zeros(q.shape[:3])  # sum of exp(score - highest)
    mixed = torch.zeros_like(q)  # sum of exp(score - highest) * v

    positions = torch.arange(position, position + m, device=q.device)
    oldest = first_visible_key(position, window) // key_tile * key_tile
    for start in range(oldest, position + m, key_tile):
        stop = min(start + key_tile, position + m)
        s = torch.einsum("mkgd,skd->mkgs", q, k[start:stop].to(q.dtype))
        seen = visible(positions, torch.arange(start, stop, device=q.device), window)  # [m, tile]
        s.masked_fill_(~seen[:, None, None, :], -math.inf)

        higher = torch.maximum(highest, s.amax(dim=-1))
        base = higher.masked_fill(higher == -math.inf, 0.0)  # a row that has seen no key yet: avoid inf - inf
        shrink = torch.exp(highest - base)  # what was summed so far was relative to the old maximum
        p = torch.exp(s - base[..., None])
        total = total * shrink + p.sum(dim=-1)
        mixed = mixed * shrink[..., None] + torch.einsum("mkgs,skd->mkgd", p, v[start:stop].to(q.dtype))
        highest = higher

    out = mixed / total.masked_fill(total == 0, 1.0)[..., None]
    return out.flatten(1, 2), (highest + total.log()).flatten(1, 2)
