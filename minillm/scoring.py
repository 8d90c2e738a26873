"""The logits from which each token of a text would be drawn, given those before it: what scores are made of.

Nothing is sampled, so no step is scheduled: blocks are borrowed from the pool, filled by plain forward passes and
given back. The LM head runs a few rows at a time, so that no [n, V] matrix ever exists. `LLM.logits` and `LLM.score`
call it, and with them perplexity.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from minillm.batch import Batch
from minillm.engine import Engine
from minillm.errors import PromptError

SCORE_ROWS = 128  # LM-head rows at a time: 128 x 49,152 logits in fp32 are 25 MB


def token_logits(
    engine: Engine, ids: list[int], budget: int, start: int, step: int | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (logits [n, V] in float32, ids [n]) as `LLM.logits` describes them, at most SCORE_ROWS at a time.

    budget  most tokens of a forward pass

    Raises PromptError at once for a `start` or `step` that cannot be, and at the first pair when blocks are short.
    """
    if isinstance(start, bool) or not isinstance(start, int) or not 1 <= start <= len(ids):
        raise PromptError(f"start={start!r} must be from 1, the first token with one before it, to {len(ids)}")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 1):
        raise PromptError(f"step={step!r} must be an integer of at least 1, or None for the token budget")
    stepwise = 0 if step is None else start - 1
    begins = [*range(0, stepwise, budget), *range(stepwise, len(ids), step or budget)]
    return _rows(engine, ids, start, [*begins, len(ids)])


@torch.inference_mode()
def _rows(engine: Engine, ids: list[int], start: int, bounds: list[int]) -> Iterator[tuple[torch.Tensor, ...]]:
    pool = engine.scheduler.block_pool
    needed = pool.blocks_for(len(ids))
    if needed > pool.num_free:
        raise PromptError(f"scoring needs {needed} blocks and {pool.num_free} are free; let running requests end")
    table = pool.allocate(needed)
    try:
        for begin, end in pairwise(bounds):
            batch = Batch.build([ids[begin:end]], [end], [table], pool.block_size, device=engine.model.device)
            hidden = engine.model.hidden(batch, engine.kv_cache, engine.attend)  # row i: token begin + i + 1
            first = max(begin, start - 1)
            targets = torch.tensor(ids[first + 1 : end + 1], device=hidden.device)
            rows = hidden[first - begin :][: len(targets)]
            for some, wanted in zip(rows.split(SCORE_ROWS), targets.split(SCORE_ROWS), strict=True):
                if len(wanted):
                    yield engine.model.lm_head(some), wanted
    finally:
        pool.free(table)
