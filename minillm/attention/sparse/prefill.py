"""From a sparse method for one sequence to a body of the contract: prefill is sparse, decode stays dense.

A method that chooses keys by content is made for prefill, where a choice serves many rows. So a request with a
single row in the step, a decode, reads all its keys through the dense body, and the tokens that a reply adds are
never sparse. A prompt's last row is such a row too if a chunk, or a hit in the prefix cache, leaves it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from minillm.attention.mask import accumulation_dtype, check_batch
from minillm.attention.per_request import request_keys
from minillm.batch import Batch
from minillm.kv_cache import KVLayer


class SparsePrefill:
    """A body made of a method and a dense body.

    attention  (q [n, H, D], k [S, Hkv, D], v [S, Hkv, D], window) -> (out [n, H, D], lse [n, H]); k and v begin with
               the request's first token, also where the layer has a window
    dense      the body for single rows
    """

    def __init__(self, attention: Callable, dense):
        self._attention = attention
        self._dense = dense
        self._single: tuple[Batch | None, Batch | None, torch.Tensor | None] = (None, None, None)  # of the last batch

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> torch.Tensor:
        return self.attend_with_lse(q, k, v, kv_layer, batch)[0]

    def attend_with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, H, D], lse [T, H] float32, float64 for float64 inputs)."""
        if all(n <= 1 for n in batch.query_lens):
            return self._dense.attend_with_lse(q, k, v, kv_layer, batch)
        check_batch(q, k, v, kv_layer, batch)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype), device=q.device)
        singles, rows = self._singles(batch)
        if singles is not None:
            out[rows], lse[rows] = self._dense.attend_with_lse(q[rows], k[rows], v[rows], kv_layer, singles)
        windowless = replace(kv_layer, window=None)
        first = 0
        for request, (n, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            rows = slice(first, first + n)
            first += n
            if n > 1:
                keys, values = request_keys(k[rows], v[rows], windowless, batch.block_tables[request], context)
                out[rows], lse[rows] = self._attention(q[rows], keys, values, kv_layer.window)
        return out, lse

    def _singles(self, batch: Batch) -> tuple[Batch | None, torch.Tensor | None]:
        """The requests with one row as a batch of their own, and their rows; the same objects for every layer."""
        if self._single[0] is not batch:
            self._single = (batch, *single_rows(batch))
        return self._single[1:]


def single_rows(batch: Batch) -> tuple[Batch | None, torch.Tensor | None]:
    """(the requests of one row as a batch, their rows [R]); (None, None) if there are none."""
    requests = [request for request, n in enumerate(batch.query_lens) if n == 1]
    if not requests:
        return None, None
    device = batch.token_ids.device
    starts = [0]
    for n in batch.query_lens:
        starts.append(starts[-1] + n)
    rows = torch.tensor([starts[request] for request in requests], device=device)
    chosen = torch.tensor(requests, device=device)
    singles = Batch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        query_start_loc=torch.arange(len(requests) + 1, dtype=torch.int32, device=device),
        seq_lens=batch.seq_lens[chosen],
        block_tables=batch.block_tables[chosen],
        slot_mapping=batch.slot_mapping[rows],
        logits_indices=batch.logits_indices[:0],
        query_lens=[1] * len(requests),
        context_lens=[batch.context_lens[request] for request in requests],
    )
    return singles, rows
