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
    keys = torch.arange(min(sinks, max(batch.context_lens)), device=q.device)
    blocks = batch.block_tables[:, keys // kv_layer.block_size].long()  # [B, sinks]
    slots = blocks * kv_layer.block_size + keys % kv_layer.block_size
    out, lse = out.clone(), lse.clone()
    singles, first = [], 0  # decodes are computed together, longer chunks one by one
    for request, n in enumerate(batch.query_lens):
        if n == 1:
            singles.append((request, first))
        elif n and batch.context_lens[request] > kv_layer.window:
            rows = torch.arange(first, first + n, device=q.device)[None]
            _add(out, lse, q, kv_layer, batch, keys, rows, slots[request : request + 1])
        first += n
    if singles:
        requests, rows = torch.tensor(singles, device=q.device).unbind(1)
        _add(out, lse, q, kv_layer, batch, keys, rows[:, None], slots[requests])
    return out, lse


def _add(out, lse, q, kv_layer: KVLayer, batch: Batch, keys, rows, slots) -> None:
    """Merge in place: `rows` [R, m] of R requests, whose sinks `keys` [sinks] lie in the cache's `slots` [R, sinks]."""
    groups = (kv_layer.k.shape[2], q.shape[1] // kv_layer.k.shape[2])  # Hkv, G
    seen = keys <= batch.positions[rows][..., None] - kv_layer.window  # [R, m, sinks]; the window has seen the others
    k, v = (rows.to(lse.dtype).transpose(1, 2) for rows in kv_layer.read_rows(slots))
    # A sink that no row sees may not be written yet, and 0 x NaN is NaN.
    v = v.masked_fill(~seen.any(1)[:, None, :, None], 0.0)  # [R, Hkv, sinks, D]
    grouped = q[rows].to(lse.dtype).unflatten(2, groups).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [R, Hkv, G x m, D]
    scores = (grouped @ k.transpose(2, 3) / math.sqrt(q.shape[2])).unflatten(2, (groups[1], -1))
    scores = scores.masked_fill(~seen[:, None, None], -math.inf)  # [R, Hkv, G, m, sinks]
    before = lse[rows].unflatten(2, groups).permute(0, 2, 3, 1)  # [R, Hkv, G, m]
    total = torch.logaddexp(before, scores.logsumexp(-1))
    base = total.masked_fill(total == -math.inf, 0.0)
    mixed = (scores - base[..., None]).exp().flatten(2, 3) @ v  # [R, Hkv, G x m, D]
    mixed = mixed.unflatten(2, (groups[1], -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [R, m, H, D]
    share = (before - base).exp().permute(0, 3, 1, 2).flatten(2, 3)  # [R, m, H]: of what the window gave
    out[rows] = (out[rows] * share[..., None] + mixed).to(out.dtype)
    lse[rows] = total.permute(0, 3, 1, 2).flatten(2, 3)


def seen_keys(options: SlidingWindow, q: torch.Tensor, k: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Which keys each query sees, by the definition: [H, n, S] bool."""
    n, num_keys = q.shape[0], k.shape[0]
    causal = visible_keys(n, num_keys, device=q.device)
    seen = visible_keys(n, num_keys, narrower(options.window, window), q.device)
    seen[:, : options.sinks] |= causal[:, : options.sinks]
    return seen.expand(q.shape[1], -1, -1)
