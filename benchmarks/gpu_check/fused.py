"""The three fused kernels between a layer's products against the same steps in PyTorch, in the shape of an 8B model.

`work` counts the bytes that a step has to move at least, so the plain steps, which move more, show a lower rate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_check.sections import Check
from benchmarks.gpu_check.tell import with_rates
from minillm.kernels.fused_ops import FusedOps
from minillm.kv_cache import KVLayer
from minillm.norm import RMSNorm
from minillm.ops import PlainOps
from minillm.profiler import NO_PARTS

INPUT_SETS = 3
BLOCK_SIZE = 16


def rows(check: Check) -> Iterator[dict]:
    e, f, heads, kv_heads, d = (64, 96, 4, 2, 16) if check.dry else (4096, 14336, 32, 8, 128)
    steps = {"pytorch": PlainOps(), "fused": FusedOps()}
    watch = check.stopwatch()

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=check.device).to(check.dtype)

    norm = RMSNorm(noise(e), 1e-5)
    size = check.dtype.itemsize
    for tokens in (1, 5) if check.dry else (1, 64, 2048):
        inputs = [(noise(tokens, e), noise(tokens, e)) for _ in range(INPUT_SETS)]
        bodies = {name: lambda x, update, ops=ops: ops.add_norm(x, update, norm) for name, ops in steps.items()}
        yield _row("add and norm", tokens, watch.compare(bodies, inputs), 4 * tokens * e * size)

        inputs = [(noise(tokens, 2 * f),) for _ in range(INPUT_SETS)]
        bodies = {name: lambda x, ops=ops: ops.silu_mul(x) for name, ops in steps.items()}
        yield _row("silu and product", tokens, watch.compare(bodies, inputs), 3 * tokens * f * size)

        blocks = -(-tokens // BLOCK_SIZE)
        kv_layer = KVLayer(*torch.zeros(2, blocks, BLOCK_SIZE, kv_heads, d, device=check.device, dtype=check.dtype))
        slots = torch.arange(tokens, device=check.device)
        angles = tuple(noise(tokens, 1, d).clamp(-1, 1) for _ in range(2))
        inputs = [(noise(tokens, heads + 2 * kv_heads, d),) for _ in range(INPUT_SETS)]
        bodies = {
            name: lambda x, ops=ops, where=(angles, kv_layer, slots): ops.turn_and_write(x, None, *where, NO_PARTS)
            for name, ops in steps.items()
        }
        moved = tokens * (2 * heads + 5 * kv_heads) * d * size
        yield _row("rotation and KV write", tokens, watch.compare(bodies, inputs), moved)


def _row(step: str, tokens: int, times: dict, num_bytes: int) -> dict:
    row = {"step": step, "tokens": tokens, "times": times, "work": {"bytes": num_bytes}, "against": "pytorch"}
    return with_rates(row)
