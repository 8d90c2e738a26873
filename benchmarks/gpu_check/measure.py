"""Times on one device: warm, interleaved, with inputs that rotate and a cache that was emptied before each call.

Bodies that are compared take turns, so that a clock that falls while they run falls for all of them. On a GPU the
time lies between two events around one call. Zeroing a buffer larger than the second-level cache comes before them:
it evicts the inputs. A kernel that only waits comes after it: meanwhile the host gets ahead, so that starting a call is
not part of its time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

LEAD_CYCLES = 800_000
"""0.4 ms at 2 GHz: what a call with several launches takes the host."""


class Stopwatch:
    """Measures bodies against each other on one device.

    repeats   timed calls of each body
    warmup    calls before them, in which kernels are compiled
    """

    def __init__(self, device: torch.device, repeats: int = 20, warmup: int = 3):
        self.device = device
        self.repeats = repeats
        self.warmup = warmup
        self._cold = None
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            self._cold = torch.empty(2**29 if total > 30e9 else 2**27, dtype=torch.uint8, device=device)

    def compare(self, bodies: dict[str, Callable], inputs: Sequence[tuple] = ((),), repeats: int | None = None) -> dict:
        """name -> summary of each body's times. A body that raises on its first call has {"error": why} instead.

        inputs  argument tuples; call i of every body takes inputs[i % len(inputs)]
        """
        results, running = {}, {}
        for name, body in bodies.items():
            try:
                for i in range(self.warmup):
                    body(*inputs[i % len(inputs)])
                self.wait()
                running[name] = body
            except Exception as error:  # of a library, a compiler or a backend that refuses: the others go on
                results[name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
                if self.device.type == "cuda":
                    torch.cuda.synchronize()  # raises where the error was one that ends all work on the device
                    torch.cuda.empty_cache()
        timers = {name: [] for name in running}
        for i in range(repeats or self.repeats):
            for name, body in running.items():
                timers[name].append(self._start_call(body, inputs[i % len(inputs)]))
        self.wait()
        for name, calls in timers.items():
            results[name] = summary([stop() for stop in calls])
        return {name: results[name] for name in bodies}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _start_call(self, body: Callable, arguments: tuple) -> Callable[[], float]:
        """Run a body once; what is returned gives its seconds once the device is done."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            body(*arguments)
            seconds = time.perf_counter() - start
            return lambda: seconds
        self._cold.zero_()
        torch.cuda._sleep(LEAD_CYCLES)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        body(*arguments)
        last.record()
        return lambda: first.elapsed_time(last) / 1e3


def summary(seconds: Sequence[float]) -> dict:
    """Median with the spread that nine tenths of the runs stay in."""
    ordered = sorted(seconds)
    low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    return {
        "median_us": _us(statistics.median(ordered)),
        "low_us": _us(low),
        "high_us": _us(high),
        "runs": len(ordered),
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
