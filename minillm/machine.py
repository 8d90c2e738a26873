"""The peaks of the machine that this runs on, measured in about three seconds.

A GPU of `devices.py` has a datasheet; everything else is timed: a large matrix product for arithmetic, a large
copy for memory. Such a peak is what a plain program reaches here and now, so a busy machine has a lower one, and
a kernel that beats both the library's product and its copy would lie above the roof. Lesson 04.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import psutil
import torch

from minillm.devices import Device, by_gpu_name
from minillm.option_words import DTYPES

SIDE = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrices
COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}  # bytes; far more than any cache holds
SECONDS = 1.0  # for each of the two measurements
MEASURED = "measured here"


def this_device(dtype: str = "float32") -> Device:
    """The datasheet row of the GPU in this machine, else what `measure` finds."""
    known = by_gpu_name(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return known or measure(dtype)


def measure(dtype: str = "float32", kind: str | None = None, seconds: float = SECONDS) -> Device:
    """A Device with this machine's own rates, labelled as measured: the best of as many tries as fit into `seconds`.

    kind  "cpu" or "cuda"; None takes the GPU where there is one
    """
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    flops = {dtype: gemm_rate(dtype, kind, seconds)}
    bandwidth = copy_rate(kind, seconds)
    if kind == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        shared = getattr(gpu, "shared_memory_per_block_optin", 0)
        cc, name, memory, units = (gpu.major, gpu.minor), gpu.name, gpu.total_memory, gpu.multi_processor_count
    else:
        cc, shared, memory, units = (0, 0), 0, psutil.virtual_memory().total, torch.get_num_threads()
        name = f"this CPU ({platform.machine()}, {units} thread{'s' * (units > 1)})"
    return Device(name, cc, flops, bandwidth, memory, units, shared, MEASURED)


def gemm_rate(dtype: str, kind: str, seconds: float = SECONDS) -> float:
    """FLOP/s of a square product of random matrices. (Zeros would do: on a GPU they draw less power and run faster.)"""
    side = SIDE[kind]
    a, b = (torch.randn(side, side, device=kind).to(DTYPES[dtype]) for _ in range(2))
    return 2 * side**3 / best_time(lambda: a @ b, kind, seconds)


def copy_rate(kind: str, seconds: float = SECONDS) -> float:
    """Bytes per second, read and written ones together, of copying one tensor over another."""
    source = torch.ones(COPIED[kind] // 4, device=kind)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_time(lambda: target.copy_(source), kind, seconds)


def best_time(run: Callable[[], object], kind: str, seconds: float) -> float:
    """The shortest of the runs that fit into `seconds`, at least three, after two that are not counted."""
    wait = torch.cuda.synchronize if kind == "cuda" else lambda: None
    end, times = time.perf_counter() + seconds, []
    while len(times) < 5 or time.perf_counter() < end:
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[2:])
