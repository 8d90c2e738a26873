"""From one sequence to a ragged batch over pages: one call per request, one after another.

Any function `attention(q, k, v, window) -> (out, lse)` becomes a body of the contract: the rows of a
request are cut out of the batch, its keys and values gathered from the pages (a fresh prompt has them
at hand and gathers nothing), and the result put back. Simple, exact, and the form in which a learner's own
attention function runs in the engine. With a cache in eight bits a fresh prompt gathers too: what a token sees
must not depend on how its prompt was cut, or on a hit in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minillm.attention.mask import accumulation_dtype, check_batch, first_visible_key
from minillm.batch import Batch
from minillm.kv_cache import KVLayer


class PerRequest:
    """A body of the contract made of a function for one sequence.

    attention  (q [n, H, D], k [S, Hkv, D], v [S, Hkv, D], window) -> (out [n, H, D], lse [n, H])
    output     the same without the lse, for functions that compute it separately
    """

    def __init__(self, attention: Callable, output: Callable | None = None):
        self._attention = attention
        self._output = output or (lambda *inputs: attention(*inputs)[0])

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        check_batch(q, k, v, kv_layer, batch)
        for rows, keys, values in sequences(k, v, kv_layer, batch):
            out[rows] = self._output(q[rows], keys, values, kv_layer.window)
        return out

    def attend_with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, H, D], lse [T, H] float32, float64 for float64 inputs)."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype), device=q.device)
        check_batch(q, k, v, kv_layer, batch)
        for rows, keys, values in sequences(k, v, kv_layer, batch):
            out[rows], lse[rows] = self._attention(q[rows], keys, values, kv_layer.window)
        return out, lse


def sequences(k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch):
    """For each request with rows in this step: (its rows as a slice, its keys, its values).

    Keys [S', Hkv, D] end with the request's last token. They begin with its first one, or with the first
    block that a window still reaches.
    """
    start = 0
    for request, (n, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        rows = slice(start, start + n)
        start += n
        if n:
            yield rows, *request_keys(k[rows], v[rows], kv_layer, batch.block_tables[request], context)


def request_keys(
    k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, blocks: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values that the last n tokens of a context may see; k, v [n, Hkv, D] are their own."""
    n = k.shape[0]
    if n == context and not kv_layer.in_eight_bits:
        return k, v
    skipped = first_visible_key(context - n, kv_layer.window) // kv_layer.block_size
    return kv_layer.gather(blocks[skipped:], context - skipped * kv_layer.block_size)
