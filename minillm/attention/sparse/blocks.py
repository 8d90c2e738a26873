"""Dynamic blocks (A14): the content decides which blocks of keys a block of queries reads.

Queries and keys are averaged over their blocks; the softmax of the averages' scores estimates how much attention
each block of keys gets. The sink (first block) and the diagonal are always kept, then the largest, until the kept
ones reach a share of the mass or a number. What is kept is computed exactly. An average hides a single important
key in a dull block: that is where this loses. One choice serves the G query heads of a K/V head, as the kernel reads
K and V once for all of them. After MInference and FlexPrefill (arXiv 2407.02490, 2502.20766). Used in lesson 15.
"""

from __future__ import annotations

import math

import torch

from minillm.attention.mask import accumulation_dtype, check_inputs, visible, visible_keys
from minillm.attention.sdpa import library_attention
from minillm.errors import ShapeError
from minillm.sparse_options import DynamicBlocks


class DynamicBlockAttention:
    """`attention(q, k, v, window) -> (out, lse)` for one sequence, by library calls on the kept blocks.

    Blocks of queries begin at multiples of the block, counted from the request's first token, so a prompt cut there
    gives the same choice as an uncut one.
    """

    def __init__(self, options: DynamicBlocks):
        self.options = options

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_inputs(q, k, v, window)
        n, num_keys = q.shape[0], k.shape[0]
        if n > num_keys:
            raise ShapeError(f"{n} queries cannot end a context of {num_keys} keys; give at least as many keys")
        group, block = q.shape[1] // k.shape[1], self.options.block
        edges, keep = self.choose(q, k, window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype), device=q.device)
        positions = torch.arange(num_keys - n, num_keys, device=q.device)
        for tile, kept in enumerate(keep):
            rows = slice(edges[tile], edges[tile + 1])
            for kv_head, blocks in enumerate(kept):
                keys = (blocks.nonzero() * block + torch.arange(block, device=q.device)).flatten()
                keys = keys[keys <= num_keys - n + rows.stop - 1]
                heads = slice(kv_head * group, (kv_head + 1) * group)
                mask = visible(positions[rows], keys, window)
                out[rows, heads], lse[rows, heads] = library_attention(
                    q[rows, heads], k[keys, kv_head : kv_head + 1], v[keys, kv_head : kv_head + 1], mask
                )
        return out, lse

    def choose(self, q: torch.Tensor, k: torch.Tensor, window: int | None = None) -> tuple[list[int], torch.Tensor]:
        """(rows where the blocks of queries begin, and n; what each of them keeps [tiles, Hkv, blocks] bool)."""
        edges = aligned_edges(len(q), len(k) - len(q), self.options.block)
        return edges, kept_blocks(self.options, q, k, edges, window)

    def seen_keys(self, q: torch.Tensor, k: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """Which keys each query sees, by the definition: [H, n, S] bool."""
        edges, keep = self.choose(q, k, window)
        return mask_of(keep, q, k, edges, self.options.block, window)


def aligned_edges(n: int, first_position: int, block: int) -> list[int]:
    """Rows where blocks of queries begin, and n: the rows stand at first_position and following."""
    starts = [0, *range(block - first_position % block, n, block), n]
    return sorted(set(starts))


def kept_blocks(
    options: DynamicBlocks, q: torch.Tensor, k: torch.Tensor, edges: list[int], window: int | None = None
) -> torch.Tensor:
    """The choice: q [n, H, D] cut at `edges` against k [S, Hkv, D] in blocks -> bool [len(edges) - 1, Hkv, blocks]."""
    n, num_keys = q.shape[0], k.shape[0]
    kv_heads, block = k.shape[1], options.block
    precision = accumulation_dtype(q.dtype)
    lengths = torch.tensor(edges, device=q.device).diff()  # [tiles]
    q_mean = _mean_of_runs(q.to(precision), lengths)  # [tiles, H, D]
    sizes = torch.full((-(-num_keys // block),), block, device=q.device)  # [blocks]
    sizes[-1] -= len(sizes) * block - num_keys
    k_mean = _mean_of_runs(k.to(precision), sizes)  # [blocks, Hkv, D]

    last = num_keys - n + torch.tensor(edges[1:], device=q.device) - 1  # position of each tile's last query
    first = last - lengths + 1
    numbers = torch.arange(len(sizes), device=q.device)
    legal = numbers <= (last // block)[:, None]  # [tiles, blocks]
    if window is not None:  # its last key is one that the first query sees, or later
        legal &= (numbers + 1) * block - 1 > (first - window)[:, None]
    forced = legal & ((numbers == 0) | (numbers >= (first // block)[:, None]))

    grouped = q_mean.unflatten(1, (kv_heads, -1))
    scores = torch.einsum("tkgd,bkd->tkgb", grouped, k_mean) / math.sqrt(q.shape[2])
    scores = (scores + sizes.log()).masked_fill(~legal[:, None, None], -math.inf)
    mass = scores.softmax(-1).mean(2)  # [tiles, Hkv, blocks]: over the query heads of a K/V head

    rank = (mass + 2.0 * forced[:, None]).masked_fill(~legal[:, None], -1.0)  # forced ones before all others
    order = rank.argsort(dim=-1, descending=True, stable=True)
    if options.top is not None:
        enough = torch.arange(len(sizes), device=q.device) >= options.top
        enough = enough.expand_as(order)
    elif options.mass >= 1:
        enough = torch.zeros_like(order, dtype=torch.bool)
    else:
        sorted_mass = mass.gather(-1, order)
        enough = sorted_mass.cumsum(-1) - sorted_mass >= options.mass  # of those before it
    keep = torch.empty_like(enough).scatter_(-1, order, ~enough)
    return (keep | forced[:, None]) & legal[:, None]


def mask_of(
    keep: torch.Tensor, q: torch.Tensor, k: torch.Tensor, edges: list[int], block: int, window: int | None = None
) -> torch.Tensor:
    """The mask [H, n, S] that a choice stands for, causality and window included."""
    n, num_keys = q.shape[0], k.shape[0]
    lengths = torch.tensor(edges, device=q.device).diff()
    by_row = keep.repeat_interleave(lengths, 0)  # [n, Hkv, blocks]
    by_key = by_row.repeat_interleave(block, 2)[:, :, :num_keys].transpose(0, 1)  # [Hkv, n, S]
    heads = by_key.repeat_interleave(q.shape[1] // k.shape[1], 0)
    return heads & visible_keys(n, num_keys, window, q.device)


def _mean_of_runs(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Means of consecutive runs of rows: x [n, heads, D], lengths [m] that sum to n -> [m, heads, D]."""
    owners = torch.repeat_interleave(torch.arange(len(lengths), device=x.device), lengths)
    sums = x.new_zeros((len(lengths), *x.shape[1:])).index_add_(0, owners, x)
    return sums / lengths[:, None, None]
