"""Where the time of a prefill and of a decode step goes: the kernels that take most of it, and the host's share.

`busy_ms` is what all kernels of a step take together. `wall_ms` was measured without the profiler, which slows the
host down; what it has beyond `busy_ms` is time in which the GPU waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check.attention import bodies
from benchmarks.gpu_check.models import generate, make_engine, random_model, random_prompts, replays
from benchmarks.gpu_check.sections import Check
from minillm.engine import Engine
from minillm.sampling_params import SamplingParams

SHOWN = 6
DECODED = 8  # steps in a row


def rows(check: Check) -> Iterator[dict]:
    found = bodies(check, ("sdpa", "triton"))
    attend = list(found.values())[-1]
    for name in ("1b", "8b"):
        model = random_model(check, name)
        for n in (20,) if check.dry else (512, 2048):
            for graphs in (False, True):
                engine = make_engine(model, attend, n + 1, with_graphs=graphs)
                if graphs and not replays(engine, n):
                    continue
                what = f"prefill of {n}, " + ("graph" if graphs else "eager")
                yield {"model": name, "what": what} | _measure(check, prefills(engine, n))
        for batch in (2,) if check.dry else (1, 8):
            n = 20 if check.dry else 2048
            engine = make_engine(model, attend, n + DECODED + 2, batch, with_graphs=True)
            row = _measure(check, decodes(engine, batch, n), DECODED)
            yield {"model": name, "what": f"decode of {batch} at {n}"} | row
        del model, engine


def prefills(engine: Engine, n: int) -> Callable:
    """What makes a prompt, and returns what computes it."""

    def prepare() -> Callable:
        prompts = random_prompts(engine.model.config, 1, n)
        return lambda: generate(engine, prompts, 1)

    return prepare


def decodes(engine: Engine, batch: int, n: int) -> Callable:
    """What computes the prompts of a batch, and returns what decodes DECODED tokens of each."""
    params = SamplingParams(temperature=0.0, max_tokens=DECODED + 1, ignore_eos=True)

    def prepare() -> Callable:
        for prompt in random_prompts(engine.model.config, batch, n):
            engine.add(engine.make_request(prompt, params))
        engine.step()
        return lambda: [engine.step() for _ in range(DECODED)]

    return prepare


def _measure(check: Check, prepare: Callable, steps: int = 1) -> dict:
    """Milliseconds of one step: wall, busy, and of the kernels that take most."""
    for _ in range(2):  # compiles, and records graphs
        prepare()()
    run = prepare()
    check.wait()
    start = time.perf_counter()
    run()
    check.wait()
    wall = time.perf_counter() - start

    run = prepare()
    check.wait()
    with profile(activities=[ProfilerActivity.CPU, *([] if check.dry else [ProfilerActivity.CUDA])]) as profiler:
        run()
        check.wait()
    micros = "self_cpu_time_total" if check.dry else "self_device_time_total"
    device = DeviceType.CPU if check.dry else DeviceType.CUDA  # an operator on the CPU repeats its kernels' time
    kernels = [event for event in profiler.key_averages() if event.device_type == device]
    kernels.sort(key=lambda event: -getattr(event, micros))

    def per_step(amount: float) -> float:
        return round(amount / 1e3 / steps, 3)

    return {
        "wall_ms": per_step(wall * 1e6),
        "busy_ms": per_step(sum(getattr(event, micros) for event in kernels)),
        "top": {
            event.key[:70]: {"ms": per_step(getattr(event, micros)), "calls": event.count // steps}
            for event in kernels[:SHOWN]
        },
    }
