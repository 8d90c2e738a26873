"""Time to first token and time per output token of the engine, for random models of 1B and 8B parameters.

The bodies take turns, each in an engine of its own around one model. `work` is absent: what a step costs beside its
arithmetic (Python, launches) is part of these times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from benchmarks.gpu_check.attention import bodies
from benchmarks.gpu_check.measure import summary
from benchmarks.gpu_check.models import config_of, generate, make_engine, random_model, random_prompts, replays
from benchmarks.gpu_check.sections import Check
from minillm.engine import Engine

NEW_TOKENS = 33
NAIVE_UP_TO = 2048  # tokens of a prompt: the n x n matrix of 32 heads in float32


def rows(check: Check) -> Iterator[dict]:
    found = bodies(check, ("triton", "sdpa", "naive"))
    lengths = (20, 40) if check.dry else (512, 2048, 8192)
    for name in ("1b", "8b"):
        config = config_of(check, name)
        needed = 2 * config.num_parameters * check.dtype.itemsize
        if needed > check.free_bytes:
            yield {"model": name, "note": f"does not fit: it takes {needed:,} bytes, {check.free_bytes:,} are free"}
            continue
        model = random_model(check, name)
        for n in lengths:
            tried = {x: attend for x, attend in found.items() if x != "naive" or n <= NAIVE_UP_TO}
            engines = {x: make_engine(model, attend, n + NEW_TOKENS) for x, attend in tried.items()}
            if "triton" in found:
                graphs = make_engine(model, found["triton"], n + NEW_TOKENS, with_graphs=True)
                engines = ({"triton with graphs": graphs} if replays(graphs, n) else {}) | engines
            yield compare(check, name, "ttft", n, 1, engines, repeats=5 if n < 8192 else 3)
        for batch in (1, 2) if check.dry else (1, 8):
            n = lengths[1]
            engines = {x: make_engine(model, attend, n + NEW_TOKENS, batch) for x, attend in found.items()}
            if "triton" in found:
                graphs = make_engine(model, found["triton"], n + NEW_TOKENS, batch, with_graphs=True)
                engines = {"triton with graphs": graphs} | engines
            yield compare(check, name, "tpot", n, batch, engines, repeats=2)
        del model, engines


def compare(
    check: Check,
    model: str,
    metric: str,
    n: int,
    batch: int,
    engines: dict[str, Engine],
    repeats: int,
    against: str = "sdpa",
) -> dict:
    """A row with "ttft" or "tpot" of engines that take turns, each with `batch` new random prompts of n tokens."""
    new_tokens = 1 if metric == "ttft" else 3 if check.dry else NEW_TOKENS
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    failures = {}
    for repeat in range(-1, repeats):  # the first one compiles and warms up
        for name, engine in engines.items():
            if name in failures:
                continue
            prompts = random_prompts(engine.model.config, batch, n)
            start = time.perf_counter()
            try:
                outputs = generate(engine, prompts, new_tokens)
            except Exception as error:
                failures[name] = {"error": f"{type(error).__name__}: {error.__cause__ or error}"[:300]}
                continue
            whole = time.perf_counter() - start
            if repeat >= 0:
                per_token = [output.metrics.tpot_s for output in outputs]
                seconds[name].append(whole if metric == "ttft" else statistics.mean(per_token))
    times = {name: failures.get(name) or summary(values) for name, values in seconds.items()}
    return {"model": model, "metric": metric, "prompt": n, "batch": batch, "times": times, "against": against}
