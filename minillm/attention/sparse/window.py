"""A sliding window with sinks (A12): every query sees its last W keys and the first few of the request.

The window is what the dense bodies already know: they read no key before it, so the work per query is W and not n.
The sinks are a second, tiny set of keys. Attention over both is the average of the two results, weighted by their
log-sum-exps, so every dense body gets sinks without knowing of them; our Triton kernel has a switch for them and
needs no second pass. Sinks after StreamingLLM (Xiao et al. 2023, arXiv 2309.17453). Used in lesson 15.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from minillm.attention.mask import visible_keys
from minillm.attention.triton import TritonAttention
from minillm.batch import Batch
from minillm.kv_cache import KVLayer
from minillm.sparse_options import SlidingWindow

VALUES_AT_A_TIME = 2**22
"""Of the sink keys that are copied once per row: 16 MiB in float32."""


class WindowAttention:
    """A body of the contract, for prefill and decode alike: `dense` under a window, and the sinks merged in.

    A layer that has a window of its own keeps the smaller one. A row near the start of the request, whose window
    reaches the sinks, sees each of them once.
    """

    def __init__(self, options: SlidingWindow, dense):
        self.options = options
        self._dense = dense
        self._kernel_sees_sinks = isinstance(dense, TritonAttention) and dense.sinks == options.sinks

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> torch.Tensor:
        return self.attend_with_lse(q, k, v, kv_layer, batch)[0]

    def attend_with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, H, D], lse [T, H] float32, float64 for float64 inputs)."""
        window = narrower(self.options.window, kv_layer.window)
        kv_layer = replace(kv_layer, window=window)
        out, lse = self._dense.attend_with_lse(q, k, v, kv_layer, batch)
        if self._kernel_sees_sinks or not self.options.sinks or window is None:
            return out, lse
        if max(batch.context_lens, default=0) <= window:  # every window reaches the first key
            return out, lse
        return add_sinks(out, lse, q, kv_layer, batch, self.options.sinks)


def narrower(a: int | None, b: int | None) -> int | None:
    """The smaller of two windows, where None is no window."""
    return min((window for window in (a, b) if window is not None), default=None)


def add_sinks(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, kv_layer: KVLayer, batch: Batch, sinks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, H, D] and lse [T, H] with the first `sinks` keys of each request merged in where no window saw them."""
    sinks = min(sinks, max(batch.context_lens))
    device = q.device
    kv_heads = kv_layer.k.shape[2]
    keys = torch.arange(sinks, device=device)
    blocks = batch.block_tables[:, keys // kv_layer.block_size].long()  # [B, sinks]
    slots = blocks * kv_layer.block_size + keys % kv_layer.block_size
    requests = torch.repeat_interleave(
        torch.arange(batch.num_requests), torch.tensor(batch.query_lens, dtype=torch.int64)
    ).to(device)
    seen = keys <= batch.positions[:, None] - kv_layer.window  # [T, sinks]; the others the window has seen
    merged_out, merged_lse = torch.empty_like(out), torch.empty_like(lse)
    piece = max(1, VALUES_AT_A_TIME // (sinks * kv_heads * q.shape[2]))
    for rows in torch.arange(len(q), device=device).split(piece):
        chosen = slots[requests[rows]]  # [m, sinks]
        k, v = (pages.flatten(0, 1)[chosen].to(lse.dtype) for pages in (kv_layer.k, kv_layer.v))  # [m, sinks, Hkv, D]
        grouped = q[rows].to(lse.dtype).unflatten(1, (kv_heads, -1))  # [m, Hkv, G, D]
        scores = torch.einsum("mkgd,mskd->mkgs", grouped, k) / math.sqrt(q.shape[2])
        scores = scores.masked_fill(~seen[rows][:, None, None], -math.inf).flatten(1, 2)  # [m, H, sinks]
        total = torch.logaddexp(lse[rows], scores.logsumexp(-1))
        base = total.masked_fill(total == -math.inf, 0.0)
        weights = (scores - base[..., None]).exp().unflatten(1, (kv_heads, -1))
        # A row that is not seen may hold anything, and 0 x NaN is NaN.
        v = v.masked_fill(~seen[rows][..., None, None], 0.0)
        mixed = torch.einsum("mkgs,mskd->mkgd", weights, v).flatten(1, 2)
        merged_out[rows] = (out[rows] * (lse[rows] - base).exp()[..., None] + mixed).to(out.dtype)
        merged_lse[rows] = total
    return merged_out, merged_lse


def seen_keys(options: SlidingWindow, q: torch.Tensor, k: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Which keys each query sees, by the definition: [H, n, S] bool."""
    n, num_keys = q.shape[0], k.shape[0]
    causal = visible_keys(n, num_keys, device=q.device)
    seen = visible_keys(n, num_keys, narrower(options.window, window), q.device)
    seen[:, : options.sinks] |= causal[:, : options.sinks]
    return seen.expand(q.shape[1], -1, -1)
