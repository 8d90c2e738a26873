"""Measuring without fooling yourself: warm up, wait for the device, take turns, keep the spread.

    seconds_of = clocked(lambda n: work(n))
    runs = rounds(seconds_of, [64, 512])        # 64, 512, 64, 512, ...: a slow moment hits both
    runs[512].median, ratio(runs[512], runs[64])

What was measured on this machine goes through `report`, which starts its lines with "~ ". A test that runs a
notebook again compares every other line and passes over these.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

Case = TypeVar("Case", bound=Hashable)

MEASURED = "~ "
UNITS = ((1, "s"), (1e-3, "ms"), (1e-6, "us"))
TIMING_MODELS = ((76, "random:8b"), (22, "random:3b"), (0, "random:1b"))
"""(least GPU memory in GB, model): on a GPU of 80, 24 or 16 GB the longest point then takes 0.5-3 s. A small model on
a large GPU shows the time of kernel launches and nothing else."""


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs, in the order in which they were made."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        return min(self.samples)

    @property
    def high(self) -> float:
        return max(self.samples)

    def __str__(self) -> str:
        return f"{show_time(self.median)} ({show_time(self.low)} to {show_time(self.high)})"


def rounds(
    seconds_of: Callable[[Case], float], cases: Iterable[Case], repeats: int = 5, warmup: int = 1
) -> dict[Case, Timing]:
    """Measure every case `repeats` times, one round over all cases after the other.

    seconds_of  runs one case and says how long it took; see `clocked`
    warmup      rounds whose times are thrown away: first calls compile, allocate and fill caches
    """
    cases = list(cases)
    if repeats < 1 or warmup < 0 or not cases:
        raise ValueError(f"{repeats} repeats, {warmup} warm-up rounds, {len(cases)} cases: nothing to measure")
    samples: dict[Case, list[float]] = {case: [] for case in cases}
    for turn in range(warmup + repeats):
        for case in cases:
            seconds = seconds_of(case)
            if turn >= warmup:
                samples[case].append(seconds)
    return {case: Timing(tuple(values)) for case, values in samples.items()}


def clocked(
    run: Callable[[Case], object],
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[Case], float]:
    """`run` as a function that returns its seconds. `synchronize` waits for the device, before and after."""

    def seconds_of(case: Case) -> float:
        synchronize()
        start = clock()
        run(case)
        synchronize()
        return clock() - start

    return seconds_of


def synchronizer(device: torch.device | str) -> Callable[[], None]:
    """What waits for this device: a GPU runs behind the program that feeds it, a processor does not."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


def ratio(a: Timing, b: Timing) -> float:
    """How many times longer a takes than b: the median over rounds, so a slow moment counts in both or in neither."""
    return statistics.median(x / y for x, y in zip(a.samples, b.samples, strict=True))


def timing_model(gpu_gigabytes: float) -> str:
    """The model whose timings mean something on a GPU with this much memory."""
    return next(model for least, model in TIMING_MODELS if gpu_gigabytes >= least)


def timed_llm(llm):
    """The engine to measure with: `llm` itself on a processor, on a GPU one with a model of the right size."""
    device = llm.engine.model.device
    if device.type != "cuda":
        return llm
    return type(llm)(timing_model(torch.cuda.get_device_properties(device).total_memory / 1e9))


def report(*lines: object) -> None:
    """Print what was measured on this machine, each line marked."""
    for line in lines:
        for piece in str(line).splitlines():
            print(f"{MEASURED}{piece}")


def show_time(seconds: float) -> str:
    """Three digits and a unit: 1.93 s, 56.2 ms, 870 us."""
    scale, unit = next(((scale, unit) for scale, unit in UNITS if seconds >= scale), UNITS[-1])
    value = seconds / scale
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"
