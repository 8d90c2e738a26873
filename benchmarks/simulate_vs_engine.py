"""Is the simulator right about this machine? The same traces through the engine and through the fitted model.

    .venv/bin/python benchmarks/simulate_vs_engine.py [--json benchmarks/results/simulate_vs_engine.json]

Calibrates for 30 seconds, then serves each trace on the real engine as it would arrive (open loop, on the clock of
this machine), several times, and once in the simulator. What is compared are medians of TTFT and TPOT. Then every
scheduling policy serves the bursts once, with the tail and the longest gap between two tokens beside the simulator's.
How this could mislead: other work on the machine slows the engine and not the model, and a median hides the tail.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from minillm import LLM, SamplingParams
from minillm.option_words import SCHEDULING_POLICIES
from minillm.simulator import (
    Arrival,
    FittedStepTime,
    RequestRecord,
    bursts,
    make_simulated_scheduler,
    poisson,
    simulate,
    summarize,
)
from minillm.simulator.calibrate import calibrate
from minillm.simulator.records import record

ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_kv_blocks": 1500}
WHOLE_PROMPTS = {**ENGINE, "max_num_batched_tokens": 1024, "max_model_len": 1024}  # some policies cut none
SIZES = {"input_median": 96, "output_median": 24}
LOAD = 0.6  # share of the time in which the simulated engine is busy under a Poisson trace
MEASURES = ("median_ttft_ms", "median_tpot_ms")
OF_POLICIES = (*MEASURES, "p99_ttft_ms", "longest_decode_gap_ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--calibrate-s", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with LLM(**ENGINE) as llm:
        step_time = calibrate(llm, args.calibrate_s)
        print(f"fitted: {step_time}", flush=True)
        rate = rate_for(llm, step_time, args.requests)
        traces = {
            "poisson": poisson(args.requests, rate, 1, **SIZES),
            "bursts": bursts(args.requests, rate, 2, size=8, **SIZES),
        }
        rows = [compare(llm, step_time, name, trace, args.repeats) for name, trace in traces.items()]
        result = {
            "command": "python benchmarks/simulate_vs_engine.py",
            "model": llm.model_name,
            "dtype": str(llm.engine.model.dtype),
            "engine": ENGINE,
            "request_rate": rate,
            "step_time": step_time.assumptions,
            "rows": rows,
        }
    result |= {"engine_of_policies": WHOLE_PROMPTS, "policies": []}
    for policy in SCHEDULING_POLICIES:
        with LLM(**WHOLE_PROMPTS, scheduling_policy=policy) as llm:
            result["policies"].append(compare(llm, step_time, policy, traces["bursts"], 1, OF_POLICIES))
    if args.json:  # earlier runs stay: the spread between them is part of the answer
        runs = json.loads(args.json.read_text(encoding="utf-8"))["runs"] if args.json.exists() else []
        args.json.write_text(json.dumps({"runs": [*runs, result]}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rows + result["policies"]))


def rate_for(llm: LLM, step_time: FittedStepTime, num_requests: int) -> float:
    """Arrivals per second at which the simulated engine is busy for the wanted share of the time."""
    rate = 32.0
    while rate > 0.1:
        result = simulated(llm, step_time, poisson(num_requests, rate, 1, **SIZES))
        if result.busy_s / result.duration <= LOAD:
            break
        rate /= 1.1
    return round(rate, 2)


def compare(
    llm: LLM,
    step_time: FittedStepTime,
    name: str,
    trace: list[Arrival],
    repeats: int,
    measures: tuple[str, ...] = MEASURES,
) -> dict:
    """One trace: what the simulator says, what each real run gave, and the simulator's error against their median."""
    result = simulated(llm, step_time, trace)
    model = summarize(result.records, result.duration)
    runs = [summarize(served(llm, trace, seed), 1.0) for seed in range(repeats)]
    row = {"name": name, "requests": len(trace)}
    for measure in measures:
        real = [run[measure] for run in runs]
        middle = statistics.median(real)
        row[measure] = {
            "simulated": round(model[measure], 2),
            "engine": [round(value, 2) for value in real],
            "error_percent": round(100 * (model[measure] / middle - 1), 1),
        }
        measured = " ".join(f"{value:.1f}" for value in real)
        print(f"{name:<20} {measure:<22} simulated {model[measure]:8.1f}  engine {measured}", flush=True)
    return row


def simulated(llm: LLM, step_time: FittedStepTime, trace: list[Arrival]):
    scheduler = make_simulated_scheduler(llm.engine.model.config, llm.config, ENGINE["num_kv_blocks"])
    return simulate(trace, scheduler, step_time)


def served(llm: LLM, trace: list[Arrival], seed: int) -> list[RequestRecord]:
    """The trace on the real engine: every prompt is handed over when its time has come, or right after the step."""
    engine, rng, requests = llm.engine, random.Random(seed), []
    size = engine.model.config.vocab_size
    llm.reset_prefix_cache()
    start, waiting = time.perf_counter(), list(reversed(trace))
    while waiting or engine.has_work:
        while waiting and start + waiting[-1].time <= time.perf_counter():
            arrival = waiting.pop()
            ids = [rng.randrange(1, size) for _ in range(arrival.prompt_len)]
            params = SamplingParams(temperature=0.0, max_tokens=arrival.output_len, ignore_eos=True)
            request = engine.make_request(ids, params)
            request.arrival_time = start + arrival.time
            engine.add(request)
            requests.append(request)
        if engine.has_work or engine.scheduler.has_idle_work:
            engine.step()
        else:
            time.sleep(max(0.0, start + waiting[-1].time - time.perf_counter()))
    return [record(request) for request in requests]


if __name__ == "__main__":
    main()
