"""Decode attention: one query per request against its whole context, so the bytes of K and V are the work.

Ours reads pages; the library reads dense tensors of equal lengths, the best case that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F

from benchmarks.gpu_check.attention import Ragged, bodies, head_counts
from benchmarks.gpu_check.sections import Check
from benchmarks.gpu_check.tell import with_rates


def rows(check: Check) -> Iterator[dict]:
    """TB/s over batch and context. `sdpa dense` gets its K and V side by side, copied beforehand."""
    watch = check.stopwatch(repeats=15)
    heads, kv_heads = head_counts(check)
    ours = bodies(check, ("triton",))
    for head_size in (16,) if check.dry else (128, 64):
        for batch in (1, 3) if check.dry else (1, 8, 64):
            for context in (40,) if check.dry else (1024, 4096, 16384, 65536):
                if 5 * batch * context * kv_heads * head_size * 4 > check.free_bytes:
                    continue
                step = Ragged(check, [(1, context)] * batch, heads, kv_heads, head_size)
                tried = {name: lambda step=step, attend=attend: step.attend(attend) for name, attend in ours.items()}
                times = watch.compare(tried | {"sdpa dense": dense(step, batch, context)})
                yield with_rates(
                    {
                        "head_size": head_size,
                        "batch": batch,
                        "context": context,
                        "times": times,
                        "work": {"bytes": step.read_bytes()},
                        "against": "sdpa dense",
                    }
                )


def dense(step: Ragged, batch: int, context: int) -> Callable:
    """The library's call for the same step."""
    tables = step.batch.block_tables.long()
    k, v = (pages[tables].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for pages in step.pages)
    q = step.q[:, :, None]  # [B, H, 1, D]
    group = q.shape[1] // k.shape[1]
    if step.q.device.type == "cuda":
        return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return lambda: F.scaled_dot_product_attention(q, *(x.repeat_interleave(group, 1) for x in (k, v)))
