"""The staircase in the engine itself: a layer's products and a whole step over 96 to 288 tokens, an 8B model's shape.

SARATHI published 55, 69.8 and 92.3 ms at 128, 256 and 257 tokens (arXiv 2308.16369, figure 7); the row "fit" has this
GPU's ratios, and which tiles show in the times. Then an engine with and without `align_prefill_tokens`: six prompts of
700 tokens come one after another while eight requests decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

from benchmarks.gpu_check.attention import bodies
from benchmarks.gpu_check.measure import Stopwatch, summary
from benchmarks.gpu_check.models import BLOCK_SIZE, config_of, generate, make_engine, random_model, random_prompts
from benchmarks.gpu_check.sections import Check
from minillm.batch import Batch
from minillm.compare import in_turns
from minillm.compare_alignment import DECODING, NEW_TOKENS, PROMPT_LEN, PROMPTS, SIDES, Served, serve
from minillm.kv_cache import KVCache
from minillm.model import Transformer
from minillm.staircase import EDGES, LENGTHS, PUBLISHED_MS, jumps, layer_products, unexplained

ERROR = (
    0.1  # of the largest logit: rounding in half precision through a random model, far below what a wrong chunk does
)


def rows(check: Check) -> Iterator[dict]:
    config = config_of(check, "8b")
    needed = 1.3 * config.num_parameters * check.dtype.itemsize
    if needed > check.free_bytes:
        yield {"note": f"does not fit: an 8B model takes {needed:,.0f} bytes, {check.free_bytes:,} are free"}
        return
    model = random_model(check, "8b")
    attend = list(bodies(check, ("triton", "sdpa") if check.dry else ("sdpa", "triton")).values())[-1]
    yield _chunks_are_right(check, model, attend)

    watch = check.stopwatch(repeats=7, warmup=1)
    cache = KVCache(model.config, -(-LENGTHS[-1] // BLOCK_SIZE), BLOCK_SIZE, model.dtype, model.device)
    medians: dict[str, dict[int, float]] = {"products": {}, "step": {}}
    for n in (96, 97, 112, 128) if check.dry else LENGTHS:
        times = _staircase(watch, model, cache, attend, n)
        yield {"tokens": n, "layers": len(model.layers), "times": times}
        for name, time in times.items():
            if "median_us" in time:
                medians[name][n] = time["median_us"]
    for name, found in medians.items():
        yield {"fit": name} | _fit(found)
    yield from _engines(check, model, attend)


def _staircase(watch: Stopwatch, model: Transformer, cache: KVCache, attend: Callable, n: int) -> dict:
    """Times of one layer's products, and of a step that computes a prompt of n tokens."""
    blocks = list(range(-(-n // BLOCK_SIZE)))
    batch = Batch.build(random_prompts(model.config, 1, n), [n], [blocks], BLOCK_SIZE, device=model.device)
    return watch.compare({"products": layer_products(model, n), "step": lambda: model.forward(batch, cache, attend)})


def _fit(found: dict[int, float]) -> dict:
    """What tiles leave unexplained, what one row more costs, and the three published lengths as ratios."""
    edges = tuple(edge for edge in EDGES if edge in found and edge + 1 in found)
    row = {
        "unexplained": {tile: round(share, 4) for tile, share in unexplained(found).items()},
        "one_row_more": {tile: round(x, 3) for tile, x in jumps(lambda n, m: found[n] / found[m], edges).items()},
    }
    for n, m in ((256, 128), (257, 256)):
        if n in found and m in found:
            row[f"{n}/{m}"] = round(found[n] / found[m], 3)
            row[f"{n}/{m} published"] = round(PUBLISHED_MS[n] / PUBLISHED_MS[m], 3)
    return row


def _chunks_are_right(check: Check, model: Transformer, attend: Callable) -> dict:
    """The first logits behind a prompt in one piece and in chunks that end on a multiple."""
    n, multiple, chunk = (61, 16, 20) if check.dry else (700, 128, 300)
    (prompt,) = random_prompts(model.config, 1, n)
    seen = []
    for options in ({}, {"prefill_chunk_size": chunk, "align_prefill_tokens": multiple}):
        engine = make_engine(model, attend, n + 1, **options)
        sampler = engine.sampler
        engine.sampler = lambda logits, requests, s=sampler: seen.append(logits.clone()) or s(logits, requests)
        generate(engine, [prompt], 1)
    whole, pieces = seen
    error = float((pieces - whole).abs().max() / whole.abs().max())
    return {"what": f"logits of chunks that end on multiples of {multiple}", "error": error, "ok": error < ERROR}


def _engines(check: Check, model: Transformer, attend: Callable) -> Iterator[dict]:
    max_len = 120 if check.dry else PROMPT_LEN + NEW_TOKENS
    engine = make_engine(model, attend, max_len, DECODING + 1, with_graphs=not check.dry)
    llm = SimpleNamespace(engine=engine, max_model_len=max_len)
    turns = {name: lambda multiple=multiple: serve(llm, multiple) for name, multiple in SIDES.items()}
    served: dict[str, list[Served]] = in_turns(turns, 1 if check.dry else 5)
    facts = {"decoding": DECODING, "prompts": PROMPTS} | {
        f"tiles {name}": runs[0].tiles for name, runs in served.items()
    }
    for metric in ("ttft_s", "gap_s"):
        times = {name: summary([getattr(run, metric) for run in runs]) for name, runs in served.items()}
        yield facts | {"metric": metric, "times": times, "against": "as planned"}
    rates = {name: round(sorted(run.tokens_per_s for run in runs)[len(runs) // 2]) for name, runs in served.items()}
    yield facts | {"metric": "tokens_per_s"} | rates
