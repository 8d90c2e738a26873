"""Attention: one contract, many bodies.

    attend(q, k, v, kv_layer, batch) -> out

    q         [T, H, D]    queries of this step, after RoPE
    k, v      [T, Hkv, D]  the keys and values of the same tokens, already written to the pages
    kv_layer  KVLayer      this layer's pages (and its window)
    batch     Batch        which rows belong to which request, and where its pages are
    out       [T, H, D]    same dtype as q

Row i of a request that ends at context length S with n rows in this step sees the keys
0 .. S - n + i (bottom-right causal alignment: the last query sees every key), and of those only the
last `window` when the layer has one. A row that sees no key gives 0 and LSE -inf, never NaN.

Bodies, from the plainest to the fastest: `naive` builds the n x n matrix and is the oracle; `flash` is
the tiled online softmax in PyTorch; `sdpa` calls the library; `cpu` is the default on processors, `triton`
on GPUs. `sparse/` reads a part of the keys: sliding windows, dynamic blocks, LSH.
"""

from minillm.attention.choose import choose_attention
from minillm.attention.cpu import CPUAttention
from minillm.attention.per_request import PerRequest

__all__ = ["CPUAttention", "PerRequest", "choose_attention"]
