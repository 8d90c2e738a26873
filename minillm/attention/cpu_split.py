"""Decode attention on a processor in plain PyTorch, for machines or dtypes without the numba kernel.

Rows of different context lengths become one batched product without padding to the longest: every context
is cut into splits of the same few blocks, all splits are computed together, and each row merges its own by
their log-sum-exp. Only the last split of a row reads more than the row sees. Lesson 11 builds the same idea.
"""

from __future__ import annotations

import torch

from minillm.attention.cpu_plan import Read
from minillm.attention.merge import merge
from minillm.attention.sdpa import library_call
from minillm.kv_cache import KVLayer

SPLIT = 64
"""Keys per split, rounded down to whole blocks (but at least one block)."""


class Splits:
    """Which blocks and keys each split of some reads covers: N splits of `width` blocks each.

    blocks   [N x width] block ids; a split that has fewer repeats its first one
    seen     [N, width x block_size] bool: the keys that the split's row sees
    unseen   the others, as row numbers among all N x width x block_size
    owners   [N] which read the split belongs to
    """

    def __init__(self, reads: list[Read], block_tables: torch.Tensor, block_size: int):
        width = max(1, SPLIT // block_size)
        first_keys, owners = [], []
        for number, read in enumerate(reads):
            start = read.start // block_size * block_size
            for first_key in range(start, read.stop, width * block_size):
                first_keys.append(first_key)
                owners.append(number)
        self.owners = torch.tensor(owners)
        first = torch.tensor(first_keys)[:, None]  # [N, 1]
        start, stop, request = (
            torch.tensor(column)[self.owners, None]
            for column in zip(*((read.start, read.stop, read.request) for read in reads), strict=True)
        )
        keys = first + torch.arange(width * block_size)  # [N, keys]
        self.seen = (keys >= start) & (keys < stop)
        self.unseen = (~self.seen).flatten().nonzero().flatten()
        index = first // block_size + torch.arange(width)  # [N, width] into the block table
        index = torch.where(index * block_size < stop, index, index[:, :1])
        self.blocks = block_tables[request, index].flatten()


def decode(q: torch.Tensor, kv_layer: KVLayer, splits: Splits) -> tuple[torch.Tensor, torch.Tensor]:
    """q [R, H, D] -> (out [R, H, D] in q's dtype, lse [R, H])."""
    num_rows, num_heads, head_size = q.shape
    num_splits, num_keys = splits.seen.shape
    kv_heads = kv_layer.k.shape[2]
    grouped = q.unflatten(1, (kv_heads, num_heads // kv_heads))[splits.owners]  # [N, Hkv, G, D]
    # Rows that are not seen may hold anything, and 0 x NaN is NaN.
    k, v = (
        rows.index_fill_(0, splits.unseen, 0.0).view(num_splits, num_keys, kv_heads, head_size)
        for rows in kv_layer.read_blocks(splits.blocks)
    )
    mask = splits.seen[:, None, None, :]  # [N, 1, 1, keys]
    out, lse = library_call(grouped, k.transpose(1, 2), v.transpose(1, 2), mask)
    out, lse = merge(out.flatten(1, 2).to(lse.dtype), lse.flatten(1, 2), splits.owners, num_rows)
    return out.to(q.dtype), lse
