"""Steps of whole tiles beside others: is there a staircase on this machine, and what does stopping at its edges give?

First the products of one layer, and then a whole step of the engine, over 96 to 288 tokens: where products work in
tiles of rows, time stands still within a tile and jumps behind it. Then an engine with and without
`align_prefill_tokens`, with long prompts coming in while others decode. A CPU may have small tiles or none; the notes
say what was found (A15). Lesson 10 reads the table.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import ceil

import torch

from minillm.compare import Comparison, Ledger, check_left_out, in_turns, ratio
from minillm.compare_attention import clocked, ttft_clock
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.sampling_params import SamplingParams
from minillm.scheduler import ChunkedScheduler, Step
from minillm.staircase import LENGTHS, PUBLISHED_MS, jumps, layer_products, unexplained

TILE = 128  # rows; what the article asks for
STEP_LENGTHS = (96, 127, 128, 129, 192, 193, 255, 256, 257, 288)
QUICK_STEP_LENGTHS = (128, 256, 257)
LONGEST_STEP = max(QUICK_STEP_LENGTHS)  # that every model must be able to take
ONE_RANK = "alignment is compared on one rank, whose layers can be timed alone; open the model on one"
CHOSEN = (
    "scheduling_policy",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "align_prefill_tokens",
    "long_prefill_token_threshold",
    "prefill_chunk_size",
)
DECODING, PROMPTS = 8, 6  # requests
PROMPT_LEN, CHUNK, NEW_TOKENS = 700, 256, 64  # tokens
BUDGET = 1024
SIDES = {"as planned": None, f"multiples of {TILE}": TILE}
COLUMNS = {
    "tiles": ("", f"of {TILE} rows, filled or begun: by so many tokens, or in all steps of an engine's run"),
    "predicted x": (".2f", f"tiles as a multiple of those of {TILE} tokens, or of the engine as planned"),
    "layer ms": (".3f", "the four products of one layer"),
    "layer x": (".2f", f"the same as a multiple of its time at {TILE} tokens, median over rounds"),
    "step ms": (".1f", "first token of a prompt of so many tokens through the engine"),
    "step x": (".2f", f"the same as a multiple of its time at {TILE} tokens, median over rounds"),
    "TTFT ms": (".0f", "of the long prompts, which come while others decode"),
    "gap ms": (".0f", "longest time between two tokens of those that decode"),
    "tok/s": (".0f", "prompt and new tokens of the whole run"),
}
LEDGER = Ledger(
    invariant="every token is computed once and every decode gets its token in every step on both sides; what chunks a "
    "prompt is cut into changes its numbers by rounding only",
    wins="products cost whole tiles and arithmetic is the limit, as may be on a GPU with more rows than its ridge (150 "
    "to 300): there the decodes beside a chunk would begin a tile of their own",
    loses="time grows with every row, or reading the weights is the limit; and a chunk a little shorter than two tiles "
    "is cut to one, so that a prompt takes up to twice the steps",
    misleads="libraries choose tiles by shape and processor, so 128 is not the tile everywhere; a step also holds "
    "attention, norms and Python, which have no such tiles; a GPU's times here include starting each call",
)


@torch.inference_mode()
def compare(llm, quick: bool = False) -> Comparison:
    """The staircase and the two engines, for the engine's model and device. Raises ConfigError as `check` does."""
    model = llm.engine.model
    if not hasattr(model, "layers"):
        raise ConfigError(ONE_RANK)
    check_length(llm.max_model_len)
    repeats, step_repeats, engine_repeats = (5, 3, 2) if quick else (15, 7, 3)
    layer = in_turns({n: products_clock(model, n) for n in LENGTHS}, repeats)
    lengths = [n for n in (QUICK_STEP_LENGTHS if quick else STEP_LENGTHS) if n < llm.max_model_len]
    ids = random_ids(llm, max(lengths), random.Random(0))
    step = in_turns({n: ttft_clock(llm, ids[:n], llm.engine.attend) for n in lengths}, step_repeats)
    served = in_turns({name: lambda m=multiple: serve(llm, m) for name, multiple in SIDES.items()}, engine_repeats)

    rows = [staircase_row(n, layer, step) for n in lengths]
    rows += [engine_row(name, runs, served["as planned"]) for name, runs in served.items()]
    setting = {
        "model": llm.model_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "decoding": DECODING,
        "long prompts": f"{PROMPTS} of {prompt_len(llm)}",
        "chunk": CHUNK,
        "repeats": repeats,
        "repeats of the engines": engine_repeats,
    }
    medians = {n: statistics.median(seconds) for n, seconds in layer.items()}
    notes = [fit_note(unexplained(medians)), jump_note(layer), published_note(layer, step), engine_note(served)]
    return Comparison("alignment", setting, COLUMNS, rows, notes, LEDGER)


def check(config: EngineConfig) -> None:
    """Raises ConfigError for several ranks, whose layers cannot be timed alone, for a model of shorter sequences than
    the staircase has, and for what the two engines choose themselves."""
    if config.num_ranks > 1:
        raise ConfigError(ONE_RANK)
    if config.max_model_len is not None:
        check_length(config.max_model_len)
    check_left_out("alignment", config, CHOSEN, "serves its requests in chunks of its own choice")


def check_length(max_model_len: int) -> None:
    if max_model_len <= LONGEST_STEP:
        raise ConfigError(
            f"max_model_len={max_model_len} leaves no room for steps of {LONGEST_STEP} tokens, where the third tile "
            f"begins; use a model with longer sequences or raise max_model_len"
        )


# ---- the staircase -------------------------------------------------------------------------------


def products_clock(model, num_tokens: int) -> Callable[[], float]:
    """Seconds of one layer's products."""
    run = layer_products(model, num_tokens)
    return lambda: clocked(run, model.device)


def staircase_row(n: int, layer: Mapping[int, list[float]], step: Mapping[int, list[float]]) -> dict:
    row = dict.fromkeys(COLUMNS) | {"name": f"{n} tokens", "tiles": ceil(n / TILE)}
    row["predicted x"] = float(ceil(n / TILE))
    for name, times in (("layer", layer), ("step", step)):
        if n in times:
            row[f"{name} ms"] = 1e3 * statistics.median(times[n])
            row[f"{name} x"] = ratio(times[n], times[TILE])
    return row


def fit_note(left: Mapping[int, float]) -> str:
    """Which tiles show in the times of a layer, by what each leaves unexplained."""
    best = min(left, key=left.get)
    found = f"tiles of {best} rows show" if best > 1 and left[best] < left[1] / 2 else "no staircase shows"
    shares = ", ".join(f"{share:.1%} by tiles of {tile}" for tile, share in left.items() if tile > 1)
    return (
        f"{found} in a layer's products: a straight line over the rows leaves {left[1]:.1%} of the variance "
        f"unexplained, against {shares}"
    )


def jump_note(layer: Mapping[int, list[float]]) -> str:
    """What one row more costs at the edges of each tile."""
    found = jumps(lambda n, m: ratio(layer[n], layer[m]))
    said = ", ".join(f"x{jump:.2f} behind multiples of {tile}" for tile, jump in sorted(found.items(), reverse=True))
    return f"one row more costs a layer {said}; tiles of {TILE} would make it x1.75 behind multiples of {TILE}, else x1"


def published_note(layer: Mapping[int, list[float]], step: Mapping[int, list[float]]) -> str:
    """SARATHI's three lengths beside ours."""
    at_128, at_256, at_257 = PUBLISHED_MS.values()
    ours = " and ".join(
        f"a {name} x{ratio(times[256], times[128]):.2f} and x{ratio(times[257], times[256]):.2f}"
        for name, times in (("layer", layer), ("step", step))
        if 257 in times
    )
    return (
        f"SARATHI (arXiv 2308.16369, figure 7) measured {at_128}, {at_256} and {at_257} ms at 128, 256 and 257 tokens "
        f"on a GPU: x{at_256 / at_128:.2f} for twice the tokens, x{at_257 / at_256:.2f} for one more; here {ours}"
    )


# ---- the two engines -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """One run of an engine.

    tiles         of TILE rows that its steps filled or began
    ttft_s        median over the long prompts
    gap_s         longest time between two tokens of a request that decodes
    tokens_per_s  prompt and new tokens
    """

    tiles: int
    ttft_s: float
    gap_s: float
    tokens_per_s: float


class CountingScheduler(ChunkedScheduler):
    """`chunked`, which counts the tiles of its steps."""

    tiles = 0

    def schedule(self, now: float) -> Step:
        step = super().schedule(now)
        self.tiles += ceil(step.num_tokens / TILE)
        return step


def serve(llm, multiple: int | None) -> Served:
    """Eight requests decode; six long prompts come one after another, each when the one before has its first token.

    The engine gets a scheduler of its own for this run.
    """
    engine, rng = llm.engine, random.Random(0)
    own, pool = engine.scheduler, engine.scheduler.block_pool
    config = EngineConfig(
        max_num_batched_tokens=BUDGET,
        prefill_chunk_size=CHUNK,
        align_prefill_tokens=multiple,
        block_size=pool.block_size,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    decoding = [engine.make_request(random_ids(llm, 16, rng), params) for _ in range(DECODING)]
    coming = [random_ids(llm, prompt_len(llm), rng) for _ in range(PROMPTS)]
    prompts = []
    pool.reset_prefix_cache()
    engine.scheduler = scheduler = CountingScheduler(config, pool, llm.max_model_len)
    try:
        start = time.perf_counter()
        for request in decoding:
            engine.add(request)
        while engine.has_work or coming:
            if coming and (prompts or decoding)[-1].token_times:
                prompts.append(engine.make_request(coming.pop(), params.updated(max_tokens=1)))
                engine.add(prompts[-1])
            engine.step()
        seconds = time.perf_counter() - start
    finally:
        for request in (*decoding, *prompts):
            engine.abort(request.request_id)
        engine.scheduler = own
    return Served(
        scheduler.tiles,
        statistics.median(request.metrics().ttft_s for request in prompts),
        max(gap for request in decoding for gap in request.metrics().itl_s),
        sum(request.num_tokens for request in (*decoding, *prompts)) / seconds,
    )


def engine_row(name: str, runs: list[Served], planned: list[Served]) -> dict:
    tiles, ttft, gap, rate = (
        statistics.median(values) for values in zip(*(asdict(r).values() for r in runs), strict=True)
    )
    row = dict.fromkeys(COLUMNS) | {"name": name, "tiles": int(tiles), "predicted x": tiles / planned[0].tiles}
    return row | {"TTFT ms": 1e3 * ttft, "gap ms": 1e3 * gap, "tok/s": rate}


def engine_note(served: Mapping[str, list[Served]]) -> str:
    """What stopping at the edges did to the engine, as ratios of the rounds."""
    planned, aligned = served.values()
    pairs = list(zip(aligned, planned, strict=True))
    said = []
    for name, key in (("TTFT", "ttft_s"), ("longest gap", "gap_s"), ("throughput", "tokens_per_s")):
        by_round = [getattr(a, key) / getattr(p, key) for a, p in pairs]
        said.append(f"{name} x{statistics.median(by_round):.2f} ({min(by_round):.2f} to {max(by_round):.2f})")
    return (
        f"with steps in multiples of {TILE} the engine began {aligned[0].tiles} tiles instead of {planned[0].tiles}, "
        f"and here had {', '.join(said)}"
    )


def prompt_len(llm) -> int:
    return min(PROMPT_LEN, llm.max_model_len - 1)


def random_ids(llm, n: int, rng: random.Random) -> list[int]:
    return [rng.randrange(llm.engine.model.config.vocab_size) for _ in range(n)]
