"""Checks a benchmark on virtual devices with one trap each, so that a benchmark that falls into one loses one item.

The truth is known: 5% is how near the centre has to come. Task 3 of exercise 04.
"""

from __future__ import annotations

import random

from minillm.course.checks.answers import number, plain
from minillm.course.fake_device import FakeDevice
from minillm.course.grader.task import Case, Record, Verdicts

CLOSE = 0.05  # of the truth
BENCHMARK_ITEMS = ("finished work", "first call", "fresh inputs", "idle device", "centre", "spread")
LEAST_RUNS = 50
WOBBLE = 0.05  # jitter of the noisy devices
IQR = 1.349  # of a normal distribution, in standard deviations
TRAITS = {
    "finished work": {"asynchronous": True},
    "first call": {"compile_s": 1.0},
    "fresh inputs": {"caching": True},
    "idle device": {},
    "centre": {"jitter": WOBBLE, "outliers": 0.1},
    "spread": {"jitter": WOBBLE, "outliers": 0.1},
}
INPUT = 4  # runs: what making an input takes where it takes time
DEVICES = {"centre": 5, "spread": 5}  # random devices for an item; one for the others


def benchmark_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    cases = []
    for item, traits in TRAITS.items():
        for _ in range(DEVICES.get(item, 1)):
            truth = r.uniform(1, 9) / 1e3
            made = {"input_s": INPUT * truth} if item == "idle device" else {}
            traits = {"asynchronous": False, **traits, **made}
            cases.append({"items": [item], "traits": traits, "seed": r.randrange(2**31), "truth": truth})
    return cases


def benchmark_drive(benchmark, case: Case) -> Record:
    device = FakeDevice(case["seed"], **case["traits"])
    answer = plain(benchmark(device.kernel(case["truth"]), device))
    return {"answer": answer, "launches": device.launches}


def benchmark_judge(case: Case, record: Record) -> Verdicts:
    (item,) = case["items"]
    answer, launches = record.get("answer"), record.get("launches")
    triple = isinstance(answer, list) and len(answer) == 3 and isinstance(answer[2], list) and answer[2]
    values = [*answer[:2], *answer[2]] if triple else [None]
    if any(number({"": value}, "") is None for value in values):
        return {item: "benchmark has to return (centre, spread, samples): two numbers and a list of numbers, seconds"}
    return {item: _benchmark_diagnosis(item, *answer, launches, case["truth"])}


def _benchmark_diagnosis(item: str, centre: float, spread: float, samples: list, launches: object, truth: float) -> str:
    off = f"centre {centre * 1e3:.4g} ms, the truth is {truth * 1e3:.4g} ms"
    wrong = abs(centre - truth) > CLOSE * truth
    if item == "first call" and max(samples) > 5 * truth:
        return f"a sample of {max(samples):.2g} s holds the compilation: call the kernel before you start to measure"
    if item == "spread":
        if len(samples) < LEAST_RUNS:
            return f"{len(samples)} samples say little about their spread: take at least {LEAST_RUNS}"
        if not isinstance(launches, int) or launches < len(samples):
            return f"{len(samples)} samples of {launches} runs: each sample is a run of its own"
        span = IQR * WOBBLE * truth
        told = f"spread {spread * 1e3:.4g} ms, but the middle half of the runs spans about {span * 1e3:.3g} ms"
        return "" if span / 2 <= spread <= 2 * span else f"{told}: a few outliers must not decide it"
    sentences = {
        "finished work": "the clock was read before the device had finished: synchronize before you read it",
        "fresh inputs": "the same inputs come again while a cache still holds them: give each run a fresh one",
        "idle device": "the device was still making the input when the clock started: synchronize before that, too",
        "centre": "one run in ten takes ten times as long: the centre has to stay where most runs are",
    }
    return f"{off}: {sentences.get(item, 'the median of runs on fresh inputs is wanted')}" if wrong else ""
