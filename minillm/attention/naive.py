"""Attention as the textbook writes it: the whole n x S matrix of scores, a softmax over each row, a sum.

Slow and large on purpose: it is the oracle that every other body is tested against, and it hands out the
probabilities for pictures. It computes in float32, or in float64 when given float64. Built in lesson 02,
after "Attention Is All You Need" (Vaswani et al. 2017, arXiv 1706.03762).
"""

from __future__ import annotations

import math

import torch

from minillm.attention.mask import accumulation_dtype, check_inputs, visible_keys


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one sequence: q [n, H, D], k and v [S, Hkv, D] -> (out [n, H, D], lse [n, H]).

    out has q's dtype. lse is the natural logarithm of each row's sum of exp(score), float32 (float64 for
    float64 inputs): with it two results over different keys can be merged. A row without keys gives 0 and -inf.
    """
    check_inputs(q, k, v, window)
    s = scores(q, k, window)  # [H, n, S]
    out = torch.einsum("hns,shd->nhd", _softmax(s), _one_per_query_head(v, q).to(s.dtype))
    return out.to(q.dtype), torch.logsumexp(s, dim=-1).T.contiguous()


def probabilities(q: torch.Tensor, k: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """How much each query takes from each key: [H, n, S], rows sum to 1 (to 0 where no key is visible)."""
    check_inputs(q, k, k, window)
    return _softmax(scores(q, k, window))


def scores(q: torch.Tensor, k: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """q.k / sqrt(D) as [H, n, S], -inf where the query does not see the key."""
    precision = accumulation_dtype(q.dtype)
    k = _one_per_query_head(k, q)
    s = torch.einsum("nhd,shd->hns", q.to(precision), k.to(precision)) / math.sqrt(q.shape[-1])
    return s.masked_fill(~visible_keys(q.shape[0], k.shape[0], window, q.device), -math.inf)


def _one_per_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention: K/V head j serves the H / Hkv query heads j*H/Hkv and following. -> [S, H, D]"""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _softmax(s: torch.Tensor) -> torch.Tensor:
    # softmax of a row of -inf is 0/0; such a row sees no key and takes nothing.
    sees_nothing = (s == -math.inf).all(dim=-1, keepdim=True)
    return torch.softmax(s, dim=-1).masked_fill(sees_nothing, 0.0)
