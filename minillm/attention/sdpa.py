"""Attention by PyTorch's `scaled_dot_product_attention`, under the conventions of this package.

The library counts its causal mask from the first query and the first key (top-left), ours ends at the
last ones (bottom-right): the two agree only with as many queries as keys, and anything else goes in as an
explicit mask. On a CPU, grouped heads are strided views of K and V, not copies per query head, and the
log-sum-exp comes from the library; elsewhere it costs a second pass over the scores.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from minillm.attention.mask import accumulation_dtype, check_inputs, visible_keys


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one sequence: q [n, H, D], k and v [S, Hkv, D] -> (out [n, H, D], lse [n, H])."""
    check_inputs(q, k, v, window)
    return _one_sequence(q, k, v, window, with_lse=True)


def output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """`attention` without its log-sum-exp, which is not free on every device."""
    check_inputs(q, k, v, window)
    return _one_sequence(q, k, v, window, with_lse=False)[0]


def _one_sequence(q, k, v, window, with_lse):
    n, num_keys = q.shape[0], k.shape[0]
    if n > num_keys:
        # The first rows stand before the first key. What the library answers there differs from device to
        # device (NaN, or an LSE of 0), so it never sees such rows.
        blind = n - num_keys
        out = q.new_zeros(q.shape)
        lse = q.new_full(q.shape[:2], -math.inf, dtype=accumulation_dtype(q.dtype))
        if num_keys:
            out[blind:], seen_lse = _one_sequence(q[blind:], k, v, window, with_lse)
            if seen_lse is not None:
                lse[blind:] = seen_lse
        return out, lse
    if window is not None and window >= num_keys:
        window = None
    if n == 1 and window is None:
        return library_attention(q, k, v, with_lse=with_lse)
    if n == num_keys and window is None:
        return library_attention(q, k, v, causal=True, with_lse=with_lse)
    return library_attention(q, k, v, mask=visible_keys(n, num_keys, window, q.device), with_lse=with_lse)


def library_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One library call: q [n, H, D], k and v [S, Hkv, D] -> (out [n, H, D], lse [n, H] or None).

    mask [n, S] is True where a query sees a key, at least once in every row. Without it every query sees every
    key, or with `causal` and n == S those up to its own.
    """
    n, num_heads, head_size = q.shape
    num_keys, kv_heads = k.shape[:2]
    grouped = q.unflatten(1, (kv_heads, num_heads // kv_heads)).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    if mask is None and not causal:
        grouped = grouped.flatten(1, 2)[:, None]  # all rows are alike: G x n of them read K/V once
    shape = (kv_heads, grouped.shape[1], num_keys, head_size)
    keys, values = (x.transpose(0, 1)[:, None].expand(shape) for x in (k, v))  # strided, not copied
    if q.device.type != "cpu":  # a GPU kernel misreads stride-0 keys under a mask (pytorch issue 191937)
        keys, values = keys.contiguous(), values.contiguous()
    out, lse = library_call(grouped, keys, values, mask, causal, with_lse)
    out = out.reshape(num_heads, n, head_size).transpose(0, 1)
    return out, None if lse is None else lse.reshape(num_heads, n).T


def library_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The library in its own layout, [batch, heads, rows, D]: (out, lse [batch, heads, rows] or None)."""
    # It reads the D values of a row as neighbours in memory.
    q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (q, k, v))
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
    flash_on_cpu = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if q.device.type == "cpu" and flash_on_cpu is not None:
        # What F.scaled_dot_product_attention runs on a CPU; called by its own name it returns the LSE too.
        out, lse = flash_on_cpu(q, k, v, 0.0, causal, attn_mask=bias)
        return out, lse.to(accumulation_dtype(q.dtype))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
    return out, log_sum_exp(q, k, bias, causal) if with_lse else None


def log_sum_exp(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None = None, causal: bool = False
) -> torch.Tensor:
    """The LSE [batch, heads, rows] that the library keeps to itself, from the scores computed once more."""
    precision = accumulation_dtype(q.dtype)
    scores = torch.matmul(q.to(precision), k.to(precision).transpose(-1, -2)) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(~visible_keys(q.shape[-2], k.shape[-2], device=q.device), -math.inf)
    return torch.logsumexp(scores, dim=-1)
