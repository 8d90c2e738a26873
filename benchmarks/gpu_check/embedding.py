"""The embedding table in CPU memory against beside the layers: are rows and logits equal, what does it save and cost?

Two 8B models with the same random weights. Rows are asked for step after step while their way is blocked, so that
several copies are due at once; logits are those of a prompt in chunks and of decodes in graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu_check.attention import bodies
from benchmarks.gpu_check.end_to_end import NEW_TOKENS, compare
from benchmarks.gpu_check.models import config_of, generate, make_engine, random_model, random_prompts
from benchmarks.gpu_check.sections import Check
from minillm.batch import Batch
from minillm.model import Transformer

BESIDE, HOST = "beside the layers", "in CPU memory"
BUSY_SIDE = 4096


def rows(check: Check) -> Iterator[dict]:
    config = config_of(check, "8b")
    needed = 2.5 * config.num_parameters * check.dtype.itemsize
    if needed > check.free_bytes:
        yield {"note": f"does not fit: two 8B models take {needed:,.0f} bytes, {check.free_bytes:,} are free"}
        return
    attend = list(bodies(check, ("sdpa", "triton")).values())[-1]
    models, taken = {}, {}
    for name in (BESIDE, HOST):
        before = _allocated(check)
        torch.manual_seed(1)  # the same weights for both
        models[name] = random_model(check, "8b", host_table=name == HOST)
        taken[name] = _allocated(check) - before
    saved = taken[BESIDE] - taken[HOST]
    table = models[HOST].num_table_bytes
    yield {"what": "memory", "table_bytes": table, "saved_bytes": saved, "ok": check.dry or saved >= table}
    yield {"what": "rows of 24 steps in a row", "ok": _rows_are_equal(check, models)}
    yield {"what": "logits of chunks and of decodes in graphs"} | _logits_are_equal(check, models, attend)

    watch = check.stopwatch()
    for n in (1, 40) if check.dry else (1, 64, 2048):
        batch = _batch(check, models[HOST], n)
        lookups = {name: lambda model=model, batch=batch: model.embed(batch) for name, model in models.items()}
        yield {"what": "rows alone", "tokens": n, "times": watch.compare(lookups), "against": BESIDE}
    for n in (20,) if check.dry else (512, 2048):
        engines = {name: make_engine(model, attend, n + 1) for name, model in models.items()}
        yield compare(check, "8b", "ttft", n, 1, engines, repeats=5, against=BESIDE)
    for requests in (2,) if check.dry else (1, 8):
        n = 20 if check.dry else 512
        engines = {
            name: make_engine(model, attend, n + NEW_TOKENS, requests, with_graphs=True)
            for name, model in models.items()
        }
        yield compare(check, "8b", "tpot", n, requests, engines, repeats=3, against=BESIDE)


def _allocated(check: Check) -> int:
    return 0 if check.dry else torch.cuda.memory_allocated()


def _batch(check: Check, model: Transformer, n: int) -> Batch:
    return Batch.build(random_prompts(model.config, 1, n), [n], [list(range(-(-n // 16)))], 16, device=check.device)


def _rows_are_equal(check: Check, models: dict[str, Transformer]) -> bool:
    """The copies wait for a long computation, the host does not: a buffer that is filled too early shows."""
    lengths = (33, 1, 8) if check.dry else (2048, 1, 700)
    batches = [_batch(check, models[HOST], n) for n in lengths * 8]
    found = []
    for number, batch in enumerate(batches):
        if number % 6 == 0 and not check.dry:
            busy = torch.ones(BUSY_SIDE, BUSY_SIDE, device=check.device)
            for _ in range(20):
                busy = busy @ busy * 1e-4
            models[HOST].embed.link.stream.wait_stream(torch.cuda.current_stream())
        found.append(models[HOST].embed(batch))
    return all(torch.equal(x, models[BESIDE].embed(batch)) for x, batch in zip(found, batches, strict=True))


def _logits_are_equal(check: Check, models: dict[str, Transformer], attend: Callable) -> dict:
    n, new_tokens = (40, 3) if check.dry else (700, 9)
    prompts = random_prompts(models[HOST].config, 2, n)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    for name, model in models.items():
        chunk = 16 if check.dry else 64
        engine = make_engine(model, attend, n + new_tokens, 2, with_graphs=not check.dry, prefill_chunk_size=chunk)
        sampler = engine.sampler
        engine.sampler = lambda logits, requests, name=name, sampler=sampler: (
            seen[name].append(logits.clone()) or sampler(logits, requests)
        )
        generate(engine, prompts, new_tokens)
    pairs = list(zip(*seen.values(), strict=True))
    return {"steps": len(pairs), "ok": all(torch.equal(a, b) for a, b in pairs)}
