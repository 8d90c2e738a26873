"""What this machine does, what another one would do, and what the compiler makes of the kernels."""

from __future__ import annotations

import json

from minillm.cli.options import (
    add_engine_options,
    engine_command,
    engine_config,
    engine_options,
    open_llm,
    plain_command,
)
from minillm.compare import COMPARISONS, check, compare
from minillm.errors import ConfigError
from minillm.simulator import command as simulator


def add_commands(commands) -> None:
    doctor = engine_command(
        commands, "doctor", run_doctor, "what this machine offers and what the engine chooses on it"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")

    bench = engine_command(commands, "bench", run_bench, "TTFT by prompt length, decode speed and an offline mix")
    bench.add_argument("--quick", action="store_true", help="fewer repeats and a shorter mix")
    bench.add_argument("--json", action="store_true", help="print the last line, one JSON object, alone")
    bench.add_argument("--compare", choices=COMPARISONS, help="instead: ways to do one thing, with their ledger")

    kernels = plain_command(
        commands, "kernels", run_kernels, "what the compiler makes of every GPU kernel; needs no GPU"
    )
    kernels.add_argument("--json", action="store_true", help="print one JSON object")
    only = "only such rows, e.g. compute_capability=9.0; two of one field: either"
    kernels.add_argument("--only", action="append", default=[], metavar="FIELD=VALUE", help=only)
    kernels.add_argument("--dump", metavar="FOLDER", help="also write each row's Triton IR and PTX there")

    estimate = plain_command(
        commands, "estimate", run_estimate, "what a model would cost on a device: time, memory, what fits"
    )
    estimate.add_argument("--model", default="8b", help="7b, 70b, 8b, ... or any model that can be loaded; default 8b")
    estimate.add_argument("--device", help="a GPU's name, or `here` to measure this one; default H100")
    estimate.add_argument("--context", type=int, default=2048, help="tokens of each prompt; default 2048")
    estimate.add_argument("--batch", type=int, default=1, help="requests that decode together; default 1")
    estimate.add_argument("--dtype", help="float16, bfloat16, float8 or float32; default float16")
    estimate.add_argument("--quantization", help="int8, int4 or fp8: weights in fewer bits; default: no")
    estimate.add_argument("--kv-cache-dtype", help="int8 or fp8: K and V in eight bits; default: no")
    estimate.add_argument("--block-size", type=int, help="tokens per KV block; default 16")
    estimate.add_argument("--rank-devices", action="store_true", help="all GPUs, fastest first, for prefill and decode")
    estimate.add_argument("--json", action="store_true", help="print one JSON object")

    simulate = plain_command(
        commands, "simulate", run_simulate, "the scheduler on a virtual clock: any model, any GPU, any traffic"
    )
    simulator.add_arguments(simulate)
    add_engine_options(simulate, simulator.ENGINE_OPTIONS)


def run_doctor(args) -> None:
    from minillm.doctor import report

    with open_llm(args) as llm:
        rows = report(llm)
    if args.json:
        print(json.dumps(rows))
        return
    for name, value in rows.items():
        print(f"{name:<14} {value if not isinstance(value, dict) else json.dumps(value)}")


def run_bench(args) -> None:
    from minillm.bench import run

    if args.compare:
        check(args.compare, engine_config(args))
    with open_llm(args) as llm:
        if args.compare:
            comparison = compare(args.compare, llm, quick=args.quick)
            print(json.dumps(comparison.as_dict()) if args.json else "\n".join(comparison.lines()))
            return
        result = run(llm, quick=args.quick, show=not args.json)
    print(json.dumps(result))


def run_kernels(args) -> None:
    try:
        from minillm.kernels.report import as_json, lines, report
    except ModuleNotFoundError as error:
        raise ConfigError(f"kernels are compiled by {error.name}: pip install triton (Linux)") from error

    result = report(args.only, args.dump)
    print(as_json(result) if args.json else "\n".join(lines(result)))


def run_estimate(args) -> None:
    from minillm import estimate

    config = estimate.shape_of(args.model)
    kept = {name: getattr(args, name) for name in ("block_size", "kv_cache_dtype", "quantization")}
    kept = {name: value for name, value in kept.items() if value is not None}
    if args.rank_devices:
        if args.device or kept:
            flags = ", ".join("--" + name.replace("_", "-") for name in (kept or ["device"]))
            raise ConfigError(f"--rank-devices times plain weights on every GPU; drop {flags}")
        result = estimate.rank_devices(config, args.context, args.batch, args.dtype or "float16")
        print(json.dumps(result) if args.json else estimate.rank_table(result))
        return
    device, dtype = estimate.device_and_dtype(args.device or "H100", args.dtype)
    result = estimate.estimate(config, device, args.context, args.batch, dtype, **kept)
    print(json.dumps(result) if args.json else estimate.table(result))


def run_simulate(args) -> None:
    simulator.run(args, engine_options(args))
