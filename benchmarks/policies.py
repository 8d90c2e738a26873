"""What each scheduling policy buys and costs, on the simulator: the article's strategies, its knobs, two paradoxes.

    .venv/bin/python benchmarks/policies.py [--only NAME ...] [--json benchmarks/results/policies.json]

Times are those of a roofline with assumed efficiencies (written into the result), so directions and ratios mean more
than milliseconds; counts (rows, tokens, gaps) are exact. Deterministic but for the last row, which times the simulator
itself on this machine.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from minillm.config import EngineConfig
from minillm.devices import find_device
from minillm.estimate import shape_of
from minillm.model_config import ModelConfig
from minillm.simulator import (
    SLO,
    Arrival,
    RooflineStepTime,
    conversations,
    kv_blocks,
    make_simulated_scheduler,
    poisson,
    shared_prompt,
    simulate,
    summarize,
)
from minillm.simulator.command import all_policies

MISTRAL_7B = ModelConfig(32000, 4096, 14336, 32, 32, 8, 128, max_position_embeddings=32768)
A100 = find_device("A100-80GB")
TPOT_STRICT, TPOT_RELAXED = 5, 25  # Sarathi-Serve's SLOs: so many undisturbed decode steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = json.loads(args.json.read_text(encoding="utf-8")) if args.json and args.json.exists() else {}
    results["command"] = "python benchmarks/policies.py"
    results["assumptions"] = RooflineStepTime(MISTRAL_7B, A100).assumptions
    for name in args.only:
        results[name] = BENCHMARKS[name]()
        print(f"{name}: {BENCHMARKS[name].__doc__.splitlines()[0]}", flush=True)
        for row in results[name]:
            print("   ", "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if args.json:  # with --only, the other results of the file stay
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def serve(trace, config: EngineConfig, model=MISTRAL_7B, num_gpus: int = 1, num_blocks=None, slo=None):
    """(simulation, summary, step time) of one policy on a trace, on A100s."""
    step_time = RooflineStepTime(model, A100, tensor_parallel_size=num_gpus)
    blocks = num_blocks or kv_blocks(model, config, A100, tensor_parallel_size=num_gpus)
    result = simulate(trace, make_simulated_scheduler(model, config, blocks), step_time)
    return result, summarize(result.records, result.duration, slo), step_time


def row(summary: dict, *names: str, **first) -> dict:
    return first | {name: None if summary[name] is None else round(summary[name], 2) for name in names}


# ---- the ladder ----------------------------------------------------------------------------------


def ladder() -> list[dict]:
    """All policies on one trace: Poisson, input median 512, output median 128, 8 requests per second."""
    trace = poisson(800, 8.0, 0, 512, 128)
    rows = []
    for config in all_policies({"max_num_seqs": 128, "max_model_len": 8192}, 8192):
        result, summary, _ = serve(trace, config)
        names = (
            "median_ttft_ms",
            "p99_ttft_ms",
            "median_tpot_ms",
            "p99_itl_ms",
            "longest_decode_gap_ms",
            "p99_e2el_ms",
        )
        rows.append(row(summary, *names, policy=config.scheduling_policy, gap_tokens=result.longest_gap_tokens))
    return rows


# ---- the article's three strategies --------------------------------------------------------------


def similar_length() -> list[dict]:
    """Grouping by length: what it saves in a rectangle, that a ragged batch has none to save, and its tail."""
    trace = poisson(1500, 40.0, 0, 256, 16)
    rows = []
    for pad in (True, False):
        for policy in ("iteration", "similar_length"):
            config = EngineConfig(
                scheduling_policy=policy, pad_batches=pad, max_model_len=8192, max_num_batched_tokens=8192,
                max_num_seqs=256, enable_prefix_caching=False,
            )  # fmt: skip
            result, summary, _ = serve(trace, config)
            tokens = sum(r.prompt_len + r.output_len - 1 for r in result.records)
            names = ("median_ttft_ms", "p99_ttft_ms", "p99_e2el_ms", "request_throughput")
            waste = {"rows": result.num_rows, "padding_percent": round(100 * (1 - tokens / result.num_rows), 1)}
            batch = "padded" if pad else "ragged"
            rows.append(row(summary, *names, batch=batch, policy=policy, busy_s=round(result.busy_s, 2), **waste))
    return rows


def interleaved() -> list[dict]:
    """Short prompts among long ones, four of 16,000 tokens at a time: TTFT of both kinds, in order and interleaved."""
    shorts = poisson(900, 6.0, 0, 128, 32)
    longs = [Arrival(5.0 + 30.0 * (i // 4), 16_000, 32) for i in range(20)]
    trace = sorted(shorts + longs, key=lambda arrival: arrival.time)
    rows = []
    for policy, threshold in (("chunked", None), ("chunked", 512), ("interleaved", 512)):
        config = EngineConfig(scheduling_policy=policy, max_num_seqs=128, long_prefill_token_threshold=threshold)
        result, _, _ = serve(trace, config)
        for kind in ("short", "long"):
            records = [r for r in result.records if (r.prompt_len == 16_000) == (kind == "long")]
            first = {"policy": policy, "long_prefill_token_threshold": threshold, "prompts": kind}
            summary = summarize(records, result.duration)
            rows.append(row(summary, "median_ttft_ms", "p99_ttft_ms", "p99_itl_ms", **first))
    return rows


def speculative() -> list[dict]:
    """Guessing in idle steps, with a cache too small for everything, where prompts come again and where none does."""
    talks = conversations(200, 0.25, 0, 512, 64, turns=4, think_s=20)
    among_others = sorted([*talks, *poisson(200, 0.25, 0, 2048, 64)], key=lambda arrival: arrival.time)
    traces = {
        "shared system prompts": ("frequent", shared_prompt(400, 0.5, 0, 2048, 64, prefix_len=1024, num_prompts=8)),
        "conversations among other prompts": ("conversation", among_others),
        "no repeats": ("conversation", poisson(400, 0.5, 0, 2048, 64)),
    }
    rows = []
    for name, (predictor, trace) in traces.items():
        ttft = {}
        for options in ({}, {"scheduling_policy": "speculative_prefill", "speculative_predictor": predictor}):
            if options:
                options["speculative_memory_share"] = 0.5
            config = EngineConfig(max_num_seqs=32, max_model_len=32768, **options)
            result, summary, _ = serve(trace, config, num_blocks=1600)
            policy = config.scheduling_policy
            ttft[policy] = [r.ttft_s for r in result.records]
            found = row(summary, "median_ttft_ms", "p99_ttft_ms", "num_cached_tokens", trace=name, policy=policy)
            if result.speculation is not None:
                saved = sum(a - b for a, b in zip(ttft["chunked"], ttft[policy], strict=True))
                guesses = {f"num_{kind}_tokens": getattr(result.speculation, f"num_{kind}_tokens") for kind in KINDS}
                found |= guesses | {"predictor": predictor, "ttft_saved_s": round(saved, 3)}
            rows.append(found)
    return rows


KINDS = ("warmed", "used", "wasted")


# ---- Sarathi-Serve, and the second paradox -------------------------------------------------------


def sarathi() -> list[dict]:
    """Sarathi-Serve's shape: most requests per second with P99 of the token gaps within an SLO, by budget and policy.

    Mistral-7B on an A100, input median 1,730 and output median 415 (its chat trace). Strict: 5 undisturbed decode steps
    of 32 sequences at 4,096 tokens; relaxed: 25 of them. The median wait in the queue must stay under 2 seconds.
    """
    step_time = RooflineStepTime(MISTRAL_7B, A100)
    decode_ms = 1e3 * step_time([(1, 4096)] * 32, 32)
    arms = {
        "chunked, budget 512": ("chunked", 512),
        "chunked, budget 2048": ("chunked", 2048),
        "iteration": ("iteration", 32768),
        "prefill_first": ("prefill_first", 8192),
    }
    rates = [0.25 * i for i in range(1, 29)]
    rows = []
    for name, (policy, budget) in arms.items():
        config = EngineConfig(scheduling_policy=policy, max_num_batched_tokens=budget, max_num_seqs=128)
        best = {"strict": 0.0, "relaxed": 0.0}
        for rate in rates:
            result, summary, _ = serve(poisson(200, rate, 0, 1730, 415), config)
            queue = sorted(r.queue_s for r in result.records)[len(result.records) // 2]
            for slo, times in (("strict", TPOT_STRICT), ("relaxed", TPOT_RELAXED)):
                if summary["p99_itl_ms"] <= times * decode_ms and queue <= 2.0:
                    best[slo] = rate
            if queue > 2.0:
                break
        rows.append({"arm": name, "decode_step_ms": round(decode_ms, 1)} | {f"{k}_req_s": v for k, v in best.items()})
    return rows


def two_optima() -> list[dict]:
    """A20: by token budget, TTFT of one prompt of 4,096 tokens alone; tokens per second when more comes than can be
    served; requests per second within an SLO (TTFT 4 s, TPOT 60 ms) at a load that can be."""
    overload, load = poisson(400, 8.0, 0, 1730, 200), poisson(400, 2.5, 0, 1730, 200)
    rows = []
    for budget in (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        config = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=128, max_model_len=32768)
        _, alone, _ = serve([Arrival(0.0, 4096, 2)], config)
        _, full, _ = serve(overload, config)
        _, loaded, _ = serve(load, config, slo=SLO(ttft=4000, tpot=60))
        throughput = {"output_throughput_in_overload": round(full["output_throughput"], 1)}
        first = {"budget": budget, "ttft_alone_ms": round(alone["median_ttft_ms"], 1)} | throughput
        rows.append(row(loaded, "request_goodput", "p99_tpot_ms", "p99_itl_ms", **first))
    return rows


def llama_70b() -> list[dict]:
    """Llama-2-70B on 8 A100 with the article's knobs, and with each of them changed."""
    model = shape_of("70b")
    knobs = EngineConfig(block_size=16, prefill_chunk_size=512, max_num_batched_tokens=8192, max_num_seqs=256)
    trace = poisson(600, 6.0, 0, 1024, 256)
    trace = [a._replace(prompt_len=min(a.prompt_len, 3000), output_len=min(a.output_len, 1000)) for a in trace]
    changed = {
        "the article's": {},
        "prefill_chunk_size None": {"prefill_chunk_size": None},
        "max_num_batched_tokens 512": {"max_num_batched_tokens": 512},
        "max_num_batched_tokens 2048": {"max_num_batched_tokens": 2048},
        "block_size 256": {"block_size": 256},
    }
    rows = []
    for name, options in changed.items():
        result, summary, _ = serve(trace, replace(knobs, **options), model, num_gpus=8)
        names = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "output_throughput")
        rows.append(row(summary, *names, knobs=name, gap_tokens=result.longest_gap_tokens))
    return rows


def speed() -> list[dict]:
    """The simulator itself: 100,000 requests, input median 256, output median 64, at most 128 running (CPU seconds)."""
    trace = poisson(100_000, 70.0, 0)
    config = EngineConfig(max_num_seqs=128)
    start = time.process_time()
    result, _, _ = serve(trace, config, shape_of("8b"))
    seconds = time.process_time() - start
    return [{"requests": 100_000, "steps": result.num_steps, "rows": result.num_rows, "cpu_s": round(seconds, 1)}]


BENCHMARKS = {
    f.__name__: f for f in (ladder, similar_length, interleaved, speculative, sarathi, two_optima, llama_70b, speed)
}


if __name__ == "__main__":
    main()
