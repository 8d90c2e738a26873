"""Which query sees which key: the one place that knows the causal rule and the window.

Positions count from the first token of the request. A query sees the keys at or before its own
position (causal), and of those only the last `window`, its own included. With n queries that end a
context of S keys, query i stands at position S - n + i (bottom-right alignment: the last query sees
every key). Also here: the checks that every body makes on its inputs. Drawn in figure F4.
"""

from __future__ import annotations

import torch

from minillm.batch import Batch
from minillm.errors import ShapeError
from minillm.kv_cache import KVLayer


def visible(query_positions: torch.Tensor, key_positions: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """True where a query sees a key. Positions [n] and [m] give [n, m]; m may be a part of the context."""
    distance = query_positions[:, None] - key_positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def visible_keys(num_queries: int, num_keys: int, window: int | None = None, device=None) -> torch.Tensor:
    """The whole mask [n, S] of queries that end a context of S keys."""
    keys = torch.arange(num_keys, device=device)
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)
    return visible(queries, keys, window)


def first_visible_key(query_position: int, window: int | None = None) -> int:
    """The oldest key that a query at this position sees: everything before it need not be read."""
    return 0 if window is None else max(0, query_position - window + 1)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums and log-sum-exps are kept in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> None:
    """Raise ShapeError unless q [n, H, D] and k, v [S, Hkv, D] belong together and `window` is positive."""
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape:
        raise ShapeError(
            f"attention needs q [n, H, D] and k, v [S, Hkv, D] of one shape; "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            f"{heads} query heads are not a multiple of {kv_heads} K/V heads, so they cannot share them evenly"
        )
    if q.shape[2] != k.shape[2]:
        raise ShapeError(f"q has head size {q.shape[2]} and k, v have {k.shape[2]}; they must be equal")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ShapeError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; convert them to one floating-point dtype")
    if window is not None and window < 1:
        raise ShapeError(f"window={window} must be at least 1 (the query's own key), or None for all keys")


def check_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch) -> None:
    """Raise ShapeError unless the batch owns every row of q, k and v, and the pages and block tables fit them."""
    check_inputs(q, k, v, kv_layer.window)
    if not sum(batch.query_lens) == q.shape[0] == k.shape[0]:
        raise ShapeError(
            f"q has {q.shape[0]} rows and k {k.shape[0]}, but the batch's requests have {sum(batch.query_lens)}"
        )
    kv_heads, head_size = kv_layer.k.shape[2:]
    if kv_layer.v.shape != kv_layer.k.shape or head_size != q.shape[2] or q.shape[1] % kv_heads:
        raise ShapeError(
            f"queries {list(q.shape)} do not fit pages of k {list(kv_layer.k.shape)} and v {list(kv_layer.v.shape)}"
        )
    if kv_layer.dtype != q.dtype:
        raise ShapeError(f"queries are {q.dtype}, but the pages hold {kv_layer.dtype}; convert one of them")
    longest = max(batch.context_lens, default=0)
    if longest > batch.block_tables.shape[1] * kv_layer.block_size:
        raise ShapeError(
            f"a context of {longest} tokens does not fit a block table of {batch.block_tables.shape[1]} blocks "
            f"of {kv_layer.block_size}"
        )
