"""LSH attention (A13): queries and keys are hashed, and a query reads its own bucket only. An experiment.

Angular hashing: of a few random directions and their opposites, a vector's bucket is the one it points to most.
Keys are sorted by (bucket, position); a query finds its place in that order and reads the chunk before it, of its
own bucket: the latest keys that it may see, causally. Reformer (Kitaev et al. 2020, arXiv 2001.04451) cuts sorted
rows into fixed chunks and was trained with Q = K. Here the chunk ends at each query, so that what a row sees does not
depend on later ones; and Q differs from K, so vectors that attend to each other often miss each other's bucket.
"""

from __future__ import annotations

import math

import torch

from minillm.attention.mask import accumulation_dtype, check_inputs
from minillm.sparse_options import LSH

ROWS_AT_A_TIME = 32
"""Queries whose keys are copied together: each has keys of its own."""


class LSHAttention:
    """`attention(q, k, v, window) -> (out, lse)` for one sequence. A query always sees its own key."""

    def __init__(self, options: LSH):
        self.options = options

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_inputs(q, k, v, window)
        precision = accumulation_dtype(q.dtype)
        found = self.choose(q, k, window)  # [n, H, C]
        kv_head = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=precision, device=q.device)
        for rows in torch.arange(len(q), device=q.device).split(ROWS_AT_A_TIME):
            index = found[rows]
            keys, values = (x[index.clamp(min=0), kv_head[:, None]].to(precision) for x in (k, v))  # [m, H, C, D]
            scores = torch.einsum("mhd,mhcd->mhc", q[rows].to(precision), keys) / math.sqrt(q.shape[2])
            scores = scores.masked_fill(index < 0, -math.inf)
            lse[rows] = scores.logsumexp(-1)
            weights = (scores - lse[rows].masked_fill(lse[rows] == -math.inf, 0.0)[..., None]).exp()
            values = values.masked_fill((index < 0)[..., None], 0.0)
            out[rows] = torch.einsum("mhc,mhcd->mhd", weights, values).to(q.dtype)
        return out, lse

    def choose(self, q: torch.Tensor, k: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """Key numbers [n, H, C] that each query sees, each once, or -1; C = sinks + 1 + rounds x bucket."""
        n, num_keys = q.shape[0], k.shape[0]
        group = q.shape[1] // k.shape[1]
        positions = torch.arange(num_keys - n, num_keys, device=q.device)
        back = torch.arange(min(self.options.bucket, num_keys), device=q.device)
        firsts = torch.arange(min(self.options.sinks, num_keys), device=q.device).expand(n, -1)
        always = torch.cat([firsts, positions[:, None]], 1)  # [n, sinks + 1]
        always = always.masked_fill((always > positions[:, None]) | (always < 0), -1)
        found = [always[:, None].expand(-1, q.shape[1], -1)]
        for q_bucket, k_bucket in zip(self.buckets(q), self.buckets(k), strict=True):  # [n, H], [S, Hkv]
            place = k_bucket.T * num_keys + torch.arange(num_keys, device=q.device)  # [Hkv, S]: bucket, then position
            place, order = place.contiguous().sort(-1)
            own = q_bucket.T.contiguous().view(k.shape[1], -1) * num_keys  # [Hkv, G x n]
            end = torch.searchsorted(place, own + positions.clamp(min=-1).repeat(group), right=True)
            start = torch.searchsorted(place, own)
            index = end[..., None] - 1 - back  # [Hkv, G x n, bucket]: backwards from the query's place
            keys = order.gather(1, index.clamp(min=0).flatten(1)).view_as(index)
            keys = keys.masked_fill(index < start[..., None], -1)
            found.append(keys.unflatten(1, (group, n)).flatten(0, 1).transpose(0, 1))  # [n, H, bucket]
        found = torch.cat(found, -1).sort(-1).values
        again = torch.zeros_like(found, dtype=torch.bool)
        again[..., 1:] = found[..., 1:] == found[..., :-1]
        if window is not None:
            again |= found <= (positions - window)[:, None, None]
        return found.masked_fill(again, -1)

    def buckets(self, x: torch.Tensor) -> torch.Tensor:
        """The bucket of every vector in every round: [n, heads, D] -> [rounds, n, heads] int64."""
        if self.options.buckets == 1:
            return torch.zeros(self.options.rounds, *x.shape[:2], dtype=torch.int64, device=x.device)
        directions = self.directions(x.shape[2]).to(x.device)
        along = torch.einsum("nhd,rdb->rnhb", x.float(), directions)
        return torch.cat([along, -along], -1).argmax(-1)

    def directions(self, head_size: int) -> torch.Tensor:
        """[rounds, D, buckets / 2], the same in every layer, step and process."""
        generator = torch.Generator().manual_seed(self.options.seed)
        return torch.randn(self.options.rounds, head_size, self.options.buckets // 2, generator=generator)

    def seen_keys(self, q: torch.Tensor, k: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """Which keys each query sees, by the definition: [H, n, S] bool."""
        found = self.choose(q, k, window)
        seen = torch.zeros(*q.shape[:2], k.shape[0] + 1, dtype=torch.bool, device=q.device)
        seen.scatter_(-1, found.masked_fill(found < 0, k.shape[0]), True)  # -1 goes into a column that is cut off
        return seen[..., :-1].transpose(0, 1)
