"""float16 against float32, as on a T4, which has no bfloat16: the same tokens, and nothing infinite on the way.

float16 ends at 65,504. The residual stream grows from layer to layer, so it is watched where each layer reads it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_check.attention import bodies, body
from benchmarks.gpu_check.models import generate, make_engine, random_prompts
from benchmarks.gpu_check.sections import Check
from minillm.batch import Batch
from minillm.checkpoint.random_weights import random_weights
from minillm.kernels.fused_ops import FusedOps
from minillm.kv_cache import KVCache
from minillm.model import Transformer

CLOSE = 0.02
"""Share of the logits' standard deviation below which two tokens count as tied: rounding may swap them."""


class Watched(FusedOps):
    """Fused steps that remember the largest value of the residual stream."""

    def __init__(self):
        self.largest = torch.tensor(0.0)

    def add_norm(self, x, update, norm):
        x, normed = super().add_norm(x, update, norm)
        self.largest = torch.maximum(self.largest.to(x.device), x.abs().max().float())
        return x, normed


def rows(check: Check) -> Iterator[dict]:
    """The embedded model's shape with random weights; bodies as on a T4 and ours."""
    config, weights = random_weights("tiny" if check.dry else "135m")
    watched = Watched()
    models = {
        torch.float32: Transformer(config, weights, torch.float32, check.device),
        torch.float16: Transformer(config, weights, torch.float16, check.device, ops=watched),
    }
    (prompt,) = random_prompts(config, 1, 32 if check.dry else 512)
    for name in bodies(check, ("sdpa", "triton")):
        logits, generated = {}, {}
        for dtype, model in models.items():
            attend = body(check, name, dtype)
            logits[dtype] = _logits(check, model, attend, prompt).float()
            engine = make_engine(model, attend, len(prompt) + 48)
            generated[dtype] = generate(engine, [prompt[:32]], 8 if check.dry else 32)[0].outputs[0].token_ids
        exact, half = logits[torch.float32], logits[torch.float16]
        best = exact.argmax(-1, keepdim=True)
        behind = (exact.max(-1).values - exact.gather(1, half.argmax(-1, keepdim=True))[:, 0]) / exact.std()
        same = [a == b for a, b in zip(*generated.values(), strict=True)]
        yield {
            "attention": name,
            "tokens": len(prompt),
            "same_argmax": int((best == half.argmax(-1, keepdim=True)).sum()),
            "largest_gap_of_a_swapped_token": float(behind.max()),
            "generated": len(same),
            "generated_equal": same.index(False) if False in same else len(same),
            "largest_residual": float(watched.largest),
            "ok": bool(watched.largest.isfinite()) and bool(half.isfinite().all()) and float(behind.max()) < CLOSE,
        }


def _logits(check: Check, model: Transformer, attend, prompt: list[int]) -> torch.Tensor:
    cache = KVCache(model.config, -(-len(prompt) // 16), 16, model.dtype, check.device)
    batch = Batch.build([prompt], [len(prompt)], [list(range(cache.num_blocks))], 16, device=check.device)
    return model.lm_head(model.hidden(batch, cache, attend))
