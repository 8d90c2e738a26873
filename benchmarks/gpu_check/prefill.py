"""Prefill attention: our dense kernel against the library's, then our paged kernel in one go and in chunks.

Shapes are those of the FlashAttention papers: 16,384 tokens in all, heads x head size = 2,048, causal. FLOPs count what
a causal mask leaves: half of 4 n^2 D per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_check.attention import Ragged, bodies, head_counts, name_of
from benchmarks.gpu_check.sections import Check
from benchmarks.gpu_check.tell import with_rates
from minillm.errors import ConfigError
from minillm.kernels.flash import flash_attention
from minillm.kernels.launch import find_row

TOKENS = 16384
WIDTH = 2048
INPUT_SETS = 2


def rows(check: Check) -> Iterator[dict]:
    """TFLOP/s of one causal layer for a growing context, all bodies in turn."""
    watch = check.stopwatch(repeats=12)
    for head_size in (16,) if check.dry else (64, 128):
        running = libraries(check)
        try:
            row = find_row("flash", check.capability, head_size, name_of(check.dtype))
            running = {"ours": lambda q, k, v, row=row: flash_attention(q, k, v, row)[0]} | running
        except ConfigError as error:
            yield {"head_size": head_size, "note": str(error)}
        for n in (32,) if check.dry else (512, 1024, 2048, 4096, 8192, 16384):
            heads, batch = (2, 1) if check.dry else (WIDTH // head_size, TOKENS // n)
            shape = (batch, n, heads, head_size)
            inputs = [
                tuple(torch.randn(shape, device=check.device).to(check.dtype) for _ in "qkv") for _ in range(INPUT_SETS)
            ]
            tried = dict(running)
            if 8 * batch * heads * n * n < check.free_bytes:  # three matrices of scores and then some
                tried["naive"] = naive
            yield with_rates(
                {
                    "head_size": head_size,
                    "n": n,
                    "batch": batch,
                    "heads": heads,
                    "dtype": name_of(check.dtype),
                    "times": watch.compare(tried, inputs),
                    "work": {"flops": 2 * batch * heads * n * n * head_size},
                    "against": next(iter(libraries(check))),
                }
            )


def libraries(check: Check) -> dict[str, Callable]:
    """`scaled_dot_product_attention` by backend; the first one is what ours is compared with."""
    backends = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
    if check.dry:
        backends = {"sdpa math": SDPBackend.MATH}
    elif check.capability < (8, 0):
        backends = {"sdpa efficient": SDPBackend.EFFICIENT_ATTENTION}

    def attend(backend):
        def run(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)

        return run

    return {name: attend(backend) for name, backend in backends.items()}


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The n x n matrix in the model's dtype, as a model without a fused kernel computes it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v


def paged(check: Check) -> Iterator[dict]:
    """One prompt over pages, whole and in chunks: a chunk reads again what the chunks before it wrote.

    `dense` is our kernel without pages, for the price of paging.
    """
    watch = check.stopwatch(repeats=8)
    heads, kv_heads = head_counts(check)
    attend = bodies(check, ("triton", "sdpa"))
    for head_size in (16,) if check.dry else (64, 128):
        for n in (48,) if check.dry else (2048, 8192, 16384):
            for chunk in (n, 16) if check.dry else sorted({n, 2048, 512}, reverse=True):
                ends = [*range(chunk, n, chunk), n]
                starts = [0, *ends[:-1]]
                parts = [
                    Ragged(check, [(end - start, end)], heads, kv_heads, head_size)
                    for start, end in zip(starts, ends, strict=True)
                ]
                tried = {
                    name: lambda one=one, parts=parts: [part.attend(one) for part in parts]
                    for name, one in attend.items()
                    if name == "triton" or len(parts) <= 4
                }
                if len(parts) == 1 and "triton" in attend:
                    one, row = parts[0], find_row("flash", check.capability, head_size, name_of(check.dtype))
                    tried["dense"] = lambda one=one, row=row: flash_attention(
                        one.q[None], one.k[None], one.v[None], row
                    )
                yield with_rates(
                    {
                        "head_size": head_size,
                        "n": n,
                        "chunk": chunk,
                        "times": watch.compare(tried),
                        "work": {"flops": 2 * heads * n * n * head_size},
                        "against": "sdpa",
                    }
                )
