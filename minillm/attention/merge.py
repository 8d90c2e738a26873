"""Merging attention results over different keys: the reason why every body can return its log-sum-exp.

If one part of the keys gave out_a with LSE a and another gave out_b with LSE b, attention over both is
their average, weighted by exp(a) and exp(b). So a long context can be cut into splits, computed in any
order or in parallel, and put together exactly. Used in lesson 11, after Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import math

import torch


def merge(outs: torch.Tensor, lses: torch.Tensor, owners: torch.Tensor, num_rows: int):
    """Merge N partial results into `num_rows` rows: (out [num_rows, H, D], lse [num_rows, H]).

    outs [N, H, D] and lses [N, H] are the partial results, owners [N] says which row each belongs to. A row
    without any visible key gives 0 and -inf.
    """
    highest = lses.new_full((num_rows, lses.shape[1]), -math.inf)
    highest.scatter_reduce_(0, owners[:, None].expand_as(lses), lses, "amax")
    base = highest.masked_fill(highest == -math.inf, 0.0)
    weights = torch.exp(lses - base[owners])  # [N, H]
    total = torch.zeros_like(highest).index_add_(0, owners, weights)
    mixed = outs.new_zeros((num_rows, *outs.shape[1:])).index_add_(0, owners, outs * weights[..., None])
    return mixed / total.masked_fill(total == 0, 1.0)[..., None], base + total.log()
