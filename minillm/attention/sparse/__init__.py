"""Sparse attention: each query reads a part of its keys, chosen by place, by content or by hash.

    window.py   SlidingWindow   the last W keys and the first few                prefill and decode
    blocks.py   DynamicBlocks   blocks whose averaged score is high              prefill; decode is dense
    lsh.py      LSH             keys in the same hash bucket                     prefill; decode is dense
    kernel.py   the first two through our Triton kernel

Each is exact over the keys that it keeps, and each states them as a mask, `seen_keys`. Of the ladder of equalities
the window keeps every rung: what a row sees depends on its position alone. LSH and blocks keep batched = solo and
paged = dense. Chunked = one shot and prefix hit = cold hold for LSH if no chunk is a single row, since such a row is
taken for a decode; for blocks if chunks also begin at multiples of `block`, since a block of queries chooses together.
A preempted request computes its reply again as a prompt, which under these two is not what decoding had computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minillm.attention.sparse import window
from minillm.attention.sparse.blocks import DynamicBlockAttention
from minillm.attention.sparse.kernel import BlockListAttention
from minillm.attention.sparse.lsh import LSHAttention
from minillm.attention.sparse.prefill import SparsePrefill
from minillm.attention.sparse.window import WindowAttention
from minillm.attention.triton import TritonAttention
from minillm.sparse_options import LSH, DynamicBlocks, SlidingWindow, Sparse

__all__ = ["choosing", "make_sparse", "seen_keys"]


def make_sparse(
    options: Sparse, device: torch.device | str, dtype: torch.dtype, dense: Callable, dense_reason: str
) -> tuple[Callable, str]:
    """(attend, reason): the body of a method on a device, made around the dense body that is the default there."""
    body = dense_reason.split(":")[0]
    if isinstance(options, SlidingWindow):
        if isinstance(dense, TritonAttention):
            dense = TritonAttention(dtype, device, sinks=options.sinks)
        return WindowAttention(options, dense), f"{options}, as asked: prefill and decode, by {body}"
    if isinstance(options, DynamicBlocks) and isinstance(dense, TritonAttention):
        reason = f"{options}, as asked: prefill by {body} over lists of key tiles; decode dense"
        return BlockListAttention(options, dtype, device), reason
    return SparsePrefill(_method(options), dense), f"{options}, as asked: prefill by PyTorch; decode dense by {body}"


def seen_keys(options: Sparse, q: torch.Tensor, k: torch.Tensor, own_window: int | None = None) -> torch.Tensor:
    """The mask [H, n, S] of a method for q [n, H, D] that end the keys k [S, Hkv, D]; n x S large, for measuring."""
    if isinstance(options, SlidingWindow):
        return window.seen_keys(options, q, k, own_window)
    return _method(options).seen_keys(q, k, own_window)


def choosing(options: Sparse) -> Callable | None:
    """(q, k, window) -> the choice alone, without the attention over it; None for a window, which chooses nothing."""
    return None if isinstance(options, SlidingWindow) else _method(options).choose


def _method(options: DynamicBlocks | LSH) -> DynamicBlockAttention | LSHAttention:
    return DynamicBlockAttention(options) if isinstance(options, DynamicBlocks) else LSHAttention(options)
