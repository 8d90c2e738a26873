"""What this GPU reaches in the two plainest operations, and the staircase of tile quantisation.

A kernel's share of these ceilings says more than its share of a datasheet: clocks, power and cooling are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_check.sections import Check
from benchmarks.gpu_check.tell import with_rates


def rows(check: Check) -> Iterator[dict]:
    """The copy of one tensor over another (bytes read and written), and a square product of random matrices."""
    watch = check.stopwatch()
    num_bytes, side = (2**20, 64) if check.dry else (2**30, 8192)
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    copied = {"copy": lambda: target.copy_(source)}
    row = with_rates({"bytes": num_bytes, "times": watch.compare(copied), "work": {"bytes": 2 * num_bytes}})
    yield row | {"ceiling": "tb_per_s", "value": row["times"]["copy"]["tb_per_s"]}

    a, b = (torch.randn(side, side, device=check.device).to(check.dtype) for _ in range(2))
    product = watch.compare({"product": lambda: a @ b})
    row = with_rates({"side": side, "dtype": str(check.dtype), "times": product, "work": {"flops": 2 * side**3}})
    yield row | {"ceiling": "tflops", "value": row["times"]["product"]["tflops"]}


def staircase(check: Check) -> Iterator[dict]:
    """A product of T rows for T around multiples of a tile: time stands still within a tile and jumps at its edge."""
    watch = check.stopwatch(repeats=10)
    width = 64 if check.dry else 4096
    weight = torch.randn(width, width, device=check.device).to(check.dtype)
    for tokens in range(64, 129, 64) if check.dry else range(64, 1089, 32):
        x = torch.randn(tokens, width, device=check.device).to(check.dtype)
        times = watch.compare({"product": lambda x=x: x @ weight.T})
        yield with_rates({"tokens": tokens, "width": width, "times": times, "work": {"flops": 2 * tokens * width**2}})
