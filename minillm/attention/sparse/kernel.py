"""Dynamic blocks on the GPU: the choice of `blocks.py` as the list of key tiles that our Triton kernel visits.

The kernel's tiles of queries begin at each request's first row of the step and hold as many queries as fit, so the
choice is made for those tiles rather than for blocks counted from the first token; what is kept of it is the same.
Requests of a few rows go to the decode tiles and are dense. Choosing is plain PyTorch. Used in lesson 15.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minillm.attention.per_request import request_keys
from minillm.attention.sparse.blocks import kept_blocks
from minillm.attention.triton import TritonAttention
from minillm.batch import Batch
from minillm.kernels.launch import LaunchRow
from minillm.kv_cache import KVLayer
from minillm.sparse_options import DynamicBlocks


class BlockListAttention(TritonAttention):
    """A body of the contract; `device`, `dtype`, `rows` and `num_splits` as in TritonAttention."""

    def __init__(self, options: DynamicBlocks, dtype: torch.dtype, device: torch.device | str = "cuda", **kwargs):
        super().__init__(dtype, device, **kwargs)
        self.options = options

    def _row(self, phase: str, kv_layer: KVLayer) -> LaunchRow:
        row = super()._row(phase, kv_layer)
        # A tile may not be larger than what is chosen; sizes are powers of two, so it fits in evenly.
        return replace(row, block_n=min(row.block_n, self.options.block)) if phase == "prefill" else row

    def _key_tiles(self, q, k, kv_layer: KVLayer, batch: Batch, row: LaunchRow, few: int) -> dict:
        from minillm.kernels.paged_attention import queries_per_tile

        kv_heads = kv_layer.k.shape[2]
        queries = queries_per_tile(row, q.shape[1] // kv_heads)
        per_block = self.options.block // row.block_n
        width = -(-max(batch.context_lens) // self.options.block) * per_block
        tiles = len(q) // queries + batch.num_requests
        block_list = torch.zeros(tiles, kv_heads, width, dtype=torch.int32, device=q.device)
        block_count = torch.zeros(tiles, kv_heads, dtype=torch.int32, device=q.device)
        windowless = replace(kv_layer, window=None)
        first = 0
        for request, (n, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            rows = slice(first, first + n)
            first += n
            if n <= few:
                continue
            keys, _ = request_keys(k[rows], k[rows], windowless, batch.block_tables[request], context)
            edges = [*range(0, n, queries), n]
            keep = kept_blocks(self.options, q[rows], keys, edges, kv_layer.window)  # [its tiles, Hkv, blocks]
            keep = keep.repeat_interleave(per_block, 2)  # in key tiles of the kernel
            begin = rows.start // queries + request  # as in `find_request`
            its = slice(begin, begin + len(keep))
            # The kept ones first, in order: False sorts before True.
            block_list[its, :, : keep.shape[2]] = (~keep).to(torch.int8).argsort(dim=-1, stable=True).int()
            block_count[its] = keep.sum(-1)
        return {"block_list": block_list, "block_count": block_count}
