"""`minillm simulate`: one policy on one trace, or all of them beside each other.

Only this file puts the parts of the simulator together for the command line; what is measured and what is assumed
is part of the output.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from minillm.config import EngineConfig
from minillm.devices import find_device
from minillm.errors import ConfigError
from minillm.estimate import HERE, shape_of
from minillm.model_config import ModelConfig
from minillm.option_words import POLICIES_WITH, SCHEDULING_POLICIES
from minillm.scheduler import POLICIES
from minillm.simulator.records import SLO, summarize
from minillm.simulator.replay import Simulation, simulate
from minillm.simulator.setup import kv_blocks, make_simulated_scheduler
from minillm.simulator.step_time import RooflineStepTime, StepTime
from minillm.simulator.traces import TRACES, Arrival, read_trace

ENGINE_OPTIONS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "block_size",
    "num_kv_blocks",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "scheduling_policy",
    "max_queued_requests",
    *POLICIES_WITH,
)
"""Fields of EngineConfig that mean something without an engine."""
TRACE_OPTIONS = {
    "num_requests": (int, "requests of the trace; default 1000"),
    "request_rate": (float, "arrivals per second; default 10"),
    "input_median": (int, "median prompt length in tokens; default 256"),
    "output_median": (int, "median number of generated tokens; default 64"),
    "trace_seed": (int, "seed of the trace; default 0"),
}
GUESSING = "speculative_prefill"
COLUMNS = {
    "median_ttft_ms": "TTFT p50",
    "p99_ttft_ms": "p99",
    "median_tpot_ms": "TPOT p50",
    "p99_itl_ms": "ITL p99",
    "longest_decode_gap_ms": "longest gap",
    "p99_e2el_ms": "E2EL p99",
    "output_throughput": "output tok/s",
    "request_goodput": "goodput req/s",
}


def add_arguments(parser) -> None:
    """The options of the command that are not an engine's."""
    parser.add_argument("--model", default="8b", help="a shape: 7b, 70b, 8b, ... or any model that can be loaded")
    parser.add_argument(
        "--device", default="A100-80GB", help=f"a GPU of the device table, or `{HERE}` to measure this one"
    )
    parser.add_argument("--dtype", help="float16, bfloat16 or float8; default float16")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model; default 1")
    parser.add_argument("--tile-rows", type=int, default=1, help="128: products cost whole tiles of rows; default 1")
    parser.add_argument("--trace", default="poisson", help=f"{', '.join(TRACES)}, or a file of JSON lines")
    for name, (kind, help) in TRACE_OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=help)
    parser.add_argument("--goodput", nargs="+", default=[], metavar="LIMIT", help="an SLO: ttft:MS tpot:MS e2el:MS")
    parser.add_argument("--compare", action="store_true", help="all policies on the same trace")
    parser.add_argument("--events", metavar="FILE", help="write every step as JSON lines, ready to be drawn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args, options: dict) -> None:
    """`options` are the engine's, by field name. Prints a table, or JSON."""
    trace, slo, config = make_trace(args), SLO.parse(args.goodput), EngineConfig(**options)
    if args.compare and ("scheduling_policy" in options or args.events):
        raise ConfigError("--compare runs every policy; drop --scheduling-policy and --events")
    model, step_time, num_blocks = machine(args, config)
    configs = all_policies(options, config.max_model_len or model.max_position_embeddings) if args.compare else [config]

    def serve(config: EngineConfig) -> Simulation:
        scheduler = make_simulated_scheduler(model, config, num_blocks)
        return simulate(trace, scheduler, step_time, keep_events=bool(args.events))

    results = {config.scheduling_policy: serve(config) for config in configs}
    rows = {c.scheduling_policy: report(results[c.scheduling_policy], c, slo) for c in configs}
    if GUESSING in results:
        plain = results.get("chunked") or serve(without_guesses(options))
        rows[GUESSING] |= speculation(results[GUESSING], plain)
    if args.events:
        write_events(args.events, *results.values())
    if args.json:
        print(json.dumps({"assumptions": step_time.assumptions, "num_kv_blocks": num_blocks, "policies": rows}))
    else:
        print(table(rows, step_time.assumptions, num_blocks))


def make_trace(args) -> list[Arrival]:
    given = {name: getattr(args, name) for name in TRACE_OPTIONS if getattr(args, name) is not None}
    if args.trace not in TRACES:
        if given:
            raise ConfigError(f"the trace {args.trace!r} is a file and has its own lengths; drop {', '.join(given)}")
        return read_trace(args.trace)
    count, rate, seed = given.pop("num_requests", 1000), given.pop("request_rate", 10.0), given.pop("trace_seed", 0)
    return TRACES[args.trace](count, rate, seed, **given)


def machine(args, config: EngineConfig) -> tuple[ModelConfig, StepTime, int]:
    """(model, step time, KV blocks) of what is to be simulated."""
    if args.device == HERE:
        from minillm.simulator.calibrate import calibrate_here

        if args.tensor_parallel_size != 1:
            raise ConfigError(f"--device {HERE} measures one engine; drop --tensor-parallel-size")
        if args.tile_rows != 1:
            raise ConfigError(f"--device {HERE} measures what a step takes; drop --tile-rows")
        shape = shape_of(args.model)
        POLICIES[config.scheduling_policy].check_budget(config, config.max_model_len or shape.max_position_embeddings)
        return calibrate_here(args.model, args.dtype or "auto", config)
    model, device, dtype = shape_of(args.model), find_device(args.device), args.dtype or "float16"
    step_time = RooflineStepTime(model, device, dtype, args.tensor_parallel_size, tile_rows=args.tile_rows)
    return model, step_time, kv_blocks(model, config, device, dtype, args.tensor_parallel_size)


def all_policies(options: dict, max_model_len: int) -> list[EngineConfig]:
    """The same options under every policy: those that it does not know are left out, and a policy of whole prompts
    gets at least the budget that it needs."""
    configs = []
    for policy in SCHEDULING_POLICIES:
        known = {name: v for name, v in options.items() if policy in POLICIES_WITH.get(name, SCHEDULING_POLICIES)}
        config = EngineConfig(**known, scheduling_policy=policy)
        if POLICIES[policy].whole_prompts and config.max_num_batched_tokens < max_model_len:
            config = replace(config, max_num_batched_tokens=max_model_len)
        configs.append(config)
    return configs


def without_guesses(options: dict) -> EngineConfig:
    """What `speculative_prefill` is compared with."""
    known = {name: v for name, v in options.items() if "chunked" in POLICIES_WITH.get(name, SCHEDULING_POLICIES)}
    return EngineConfig(**known | {"scheduling_policy": "chunked"})


def report(result: Simulation, config: EngineConfig, slo: SLO) -> dict:
    """The summary with what only a scheduler knows."""
    names = ("num_refused", "num_steps", "num_rows", "busy_s", "longest_gap_tokens")
    counts = {name: getattr(result, name) for name in names}
    budget = {"max_num_batched_tokens": config.max_num_batched_tokens}
    return summarize(result.records, result.duration, slo) | counts | budget


def speculation(result: Simulation, plain: Simulation) -> dict:
    """What guessing cost and saved: tokens, and the TTFT of all requests against the same trace without guesses."""
    counts, pairs = result.speculation, zip(result.records, plain.records, strict=False)
    return {
        "num_warmed_tokens": counts.num_warmed_tokens,
        "num_used_tokens": counts.num_used_tokens,
        "num_wasted_tokens": counts.num_wasted_tokens,
        "ttft_saved_s": sum(b.ttft_s - a.ttft_s for a, b in pairs if a.ttft_s is not None and b.ttft_s is not None),
    }


def write_events(path: str, result: Simulation) -> None:
    """One step per line: start, end, scheduled [[request, tokens], ...], padding, preempted.

    Raises ConfigError when the file cannot be written.
    """
    lines = (json.dumps(asdict(event)) + "\n" for event in result.events)
    try:
        Path(path).write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--events {path} cannot be written: {error.strerror}") from error


def table(rows: dict[str, dict], assumptions: dict, num_blocks: int) -> str:
    """One line per policy; milliseconds, tokens and requests per second."""
    shown = [c for c in COLUMNS if any(row[c] is not None for row in rows.values())]
    head = f"{'policy':<20}" + "".join(f"{COLUMNS[c]:>15}" for c in shown)
    lines = [
        f"{policy:<20}" + "".join(f"{'-' if row[c] is None else format(row[c], ',.1f'):>15}" for c in shown)
        for policy, row in rows.items()
    ]
    if "num_warmed_tokens" in rows.get(GUESSING, {}):
        row = rows[GUESSING]
        lines.append(
            f"guesses: {row['num_warmed_tokens']:,} tokens computed, {row['num_used_tokens']:,} used, "
            f"{row['num_wasted_tokens']:,} wasted, {row['ttft_saved_s']:,.2f} s of TTFT saved in all"
        )
    what = ", ".join(f"{name} {value}" for name, value in assumptions.items() if not isinstance(value, list))
    return "\n".join([f"{num_blocks:,} KV blocks; {what}", head, *lines])
