"""Six gauges of an engine, read before and after each change: also the ones that did not move, or got worse.

    TTFT of one request      one prompt on an idle engine, until its first token
    TPOT                     the mean gap between its later tokens
    longest decode gap       under load, the longest wait between two tokens of one request
    p99 TTFT under load      the TTFT that 99 of 100 requests stay below; with few requests, the longest
    requests that fit        whose K and V the cache holds at once, in the memory of six longest sequences; counted
    bytes moved              by the least traffic of one request of 512 tokens that is answered with 64; counted

The load is one trace for all stages: short prompts, and a long one that comes while the first is being answered.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from minillm.config import EngineConfig
from minillm.costs import operations
from minillm.course.engine_so_far import SoFar, Stage, boot, stages_until
from minillm.course.figures.engine_so_far import Reading
from minillm.course.timing import report, show_time
from minillm.model_config import ModelConfig
from minillm.request import Request
from minillm.sampling_params import SamplingParams
from minillm.scheduler import ChunkedScheduler

SOLO = (64, 6)  # prompt and new tokens of the request that runs alone
SHORT, LONG = (16, 6), (128, 3)  # the same under load
NUM_SHORT = 3
LONG_COMES_AFTER = 3  # tokens of the first request
FIT_LONGEST, FIT_SEQUENCES, FIT_RULES, FIT_TEXTS = 2048, 6, 256, (32, 512)
BYTES_REQUEST = (512, 64)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
SAME = 1.1  # a measured gauge within this factor has not moved


@dataclass(frozen=True)
class Gauges:
    """Seconds, a count, and bytes."""

    ttft_s: float
    tpot_s: float
    longest_gap_s: float
    p99_ttft_s: float
    requests_that_fit: int
    bytes_moved: int


NAMES = {
    "ttft_s": "TTFT of one request",
    "tpot_s": "TPOT",
    "longest_gap_s": "longest decode gap",
    "p99_ttft_s": "p99 TTFT under load",
    "requests_that_fit": "requests that fit",
    "bytes_moved": "bytes moved",
}
COUNTED = ("requests_that_fit", "bytes_moved")
MORE_IS_BETTER = ("requests_that_fit",)


def measure(so_far: SoFar, config: ModelConfig, bytes_per_value: int = 4) -> Gauges:
    """All six. The engine is used once before, so that no first call is measured.

    config  of the model that `so_far` runs; bytes_per_value  of its weights and its cache
    """
    rng = random.Random(0)
    so_far.generate(_ids(rng, 4, config), 2)
    ttft, tpot = solo(so_far, config)
    trace = [_ids(rng, SHORT[0], config) for _ in range(NUM_SHORT)] + [_ids(rng, LONG[0], config)]
    lengths = [SHORT[1]] * NUM_SHORT + [LONG[1]]
    served = serve(so_far.machine, trace, lengths, [0] * NUM_SHORT + [LONG_COMES_AFTER])
    gaps = [b - a for arrival, times in served for a, b in zip(times, times[1:], strict=False)]
    return Gauges(
        ttft_s=ttft,
        tpot_s=tpot,
        longest_gap_s=max(gaps),
        p99_ttft_s=percentile([times[0] - arrival for arrival, times in served], 99),
        requests_that_fit=requests_that_fit(so_far.stage),
        bytes_moved=bytes_moved(so_far.stage, config, bytes_per_value),
    )


def solo(so_far: SoFar, config: ModelConfig, repeats: int = 2) -> tuple[float, float]:
    """(TTFT, TPOT) in seconds of one request on an idle engine: the median of some runs, each with new tokens."""
    rng = random.Random(1)
    ttfts, tpots = [], []
    for _ in range(repeats):
        prompt, new = _ids(rng, SOLO[0], config), SOLO[1]
        ((arrival, times),) = serve(so_far.machine, [prompt], [new], [0])
        ttfts.append(times[0] - arrival)
        tpots.append((times[-1] - times[0]) / (new - 1))
    return statistics.median(ttfts), statistics.median(tpots)


def readings(llm, until: str, own: Mapping[str, Callable] | None = None):
    """(reference, yours) for figure F15: {stage: (TTFT, TPOT, requests that fit)} of the stages up to `until`.

    own  as for `boot`; a stage without a part of yours is missing in the second
    """
    config = llm.engine.model.config
    reference, yours = {}, {}
    for stage in stages_until(until):
        for found, functions in ((reference, {}), (yours, own)):
            so_far = boot(llm, stage.key, functions)
            if found is reference or so_far.stamp == "yours":
                so_far.generate(_ids(random.Random(0), 4, config), 2)
                found[stage.key] = Reading(*solo(so_far, config), requests_that_fit(stage))
    return reference, yours


def serve(
    machine,
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    after: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, list[float]]]:
    """Run every prompt to its end: for each (time of arrival, times of its tokens).

    machine  add(ids, max_tokens) -> name, step() -> [(name, token)], has_work
    after    prompt i arrives when the first one has got after[i] tokens; ascending, the first is 0
    """
    served: dict[object, tuple[float, list[float]]] = {}
    coming = list(zip(prompts, lengths, after, strict=True))
    first: list[float] = []
    while coming or machine.has_work:
        while coming and len(first) >= coming[0][2]:
            prompt, length, _ = coming.pop(0)
            arrival = clock()
            served[machine.add(prompt, length)] = (arrival, first if not served else [])
        for name, _ in machine.step():
            served[name][1].append(clock())
    return list(served.values())


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least `percent` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def requests_that_fit(stage: Stage) -> int:
    """Requests with common rules and texts of mixed lengths, admitted one after another until the cache is full.

    Scheduler and block pool do this without a tensor. Without a cache nothing is kept between two tokens: none fits.
    """
    if stage.kv == "none":
        return 0
    rng = random.Random(2)
    rules = [rng.randrange(1000) for _ in range(FIT_RULES)]
    pool = stage.pool(FIT_SEQUENCES * FIT_LONGEST, FIT_LONGEST)
    config = EngineConfig(block_size=pool.block_size, max_num_seqs=FIT_LONGEST, max_num_batched_tokens=FIT_LONGEST)
    scheduler = ChunkedScheduler(config, pool, FIT_LONGEST)
    while not scheduler.waiting:
        text = [rng.randrange(1000) for _ in range(rng.randint(*FIT_TEXTS))]
        scheduler.add(Request(f"{len(scheduler.running)}", rules + text, params=ONE_TOKEN))
        scheduler.commit(scheduler.schedule(0.0))
    return len(scheduler.running)


def bytes_moved(stage: Stage, config: ModelConfig, bytes_per_value: int = 4) -> int:
    """Weights, cache and scores of every pass of one request. Naive attention sends its scores through memory."""
    (prompt, new), naive = BYTES_REQUEST, stage.attention == "naive"
    if stage.kv == "none":
        passes = [(n, n) for n in range(prompt, prompt + new)]
    else:
        chunk = stage.budget or prompt
        ends = [*range(chunk, prompt, chunk), prompt]
        passes = [(end - start, end) for start, end in zip([0, *ends], ends, strict=False)]
        passes += [(1, context) for context in range(prompt + 1, prompt + new)]
    total = 0.0
    for n, context in passes:  # a chunk that is not the last one of its prompt needs no LM head
        work = operations(config, [(n, context)], bytes_per_value, num_sampled=int(context >= prompt), naive=naive)
        total += sum(op.bytes for op in work)
    return round(total)


# ---- printing --------------------------------------------------------------------------------------


def show(after: Gauges, before: Gauges | None = None, moves: str = "") -> None:
    """Print the six, one line each; `moves` names the field that this lesson is about."""
    for field, name in NAMES.items():
        new, old = getattr(after, field), None if before is None else getattr(before, field)
        value = _show(field, new) if old is None else f"{_show(field, old):>10} -> {_show(field, new):>10}  "
        change = "" if old is None else _change(field, old, new)
        mark = "  <- this lesson" if field == moves else ""
        line = f"{name:<20}  {value}{change}{mark}".rstrip()
        print(line) if field in COUNTED else report(line)


def _show(field: str, value: float) -> str:
    if field == "bytes_moved":
        return f"{value / 1e9:,.1f} GB"
    return f"{value}" if field in COUNTED else show_time(value)


def _change(field: str, old: float, new: float) -> str:
    same = 1.0 if field in COUNTED else SAME
    if old == new or (old > 0 and 1 / same <= new / old <= same):
        return "same"
    better = (new > old) == (field in MORE_IS_BETTER)
    factor = "" if not old or not new else f" {max(new / old, old / new):.3g}x"
    return ("better" if better else "worse") + factor


def _ids(rng: random.Random, n: int, config: ModelConfig) -> list[int]:
    return [rng.randrange(config.vocab_size) for _ in range(n)]
