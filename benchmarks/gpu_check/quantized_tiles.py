"""Launch rows for products with codes: a few that compile without spills, beside the table's, for one row and for 64.

What `kernels/coded_linear.py` has was chosen by counting instructions, not by a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu_check.sections import Check
from benchmarks.gpu_check.tell import with_rates
from minillm.kernels.coded_linear import find_row, fp8_rows, int4_rows, int8_rows
from minillm.kernels.fp8_rows import FP8, round_rows_to_fp8
from minillm.quantize import PackedInt4, round_rows, round_to_int4

CANDIDATES = {  # block_m, block_n, num_warps, num_stages
    1: ((16, 32, 4, 5), (16, 64, 4, 6), (16, 128, 4, 4), (16, 128, 8, 4)),
    64: ((64, 32, 4, 3), (64, 128, 8, 3)),
}


def rows(check: Check) -> Iterator[dict]:
    dtype = torch.float16 if check.dry else check.dtype
    for n, k in [(48, 128)] if check.dry else [(4096, 4096), (28672, 4096)]:
        w = torch.randn(n, k, device=check.device).mul_(k**-0.5)
        int8, int4 = round_rows([w], torch.int8), PackedInt4.pack(round_to_int4([w]), dtype)
        products = {
            "int8_linear": lambda x, row, weight=int8: int8_rows(x, weight, row=row),
            "int4_linear": lambda x, row, weight=int4: int4_rows(x, weight, row=row),
        }
        if check.capability >= (8, 9):
            fp8 = round_rows([w], FP8)
            products["fp8_linear"] = lambda x, row, weight=fp8: fp8_rows(*x, weight, dtype, row=row)
        del w
        for count, candidates in CANDIDATES.items():
            x = torch.randn(count, k, device=check.device).to(dtype)
            for kernel, product in products.items():
                given = round_rows_to_fp8(x) if kernel == "fp8_linear" else x
                own = find_row(kernel, count)
                tried = {name_of(own): own} | {
                    name_of(row): row
                    for block_m, block_n, warps, stages in candidates[: 1 if check.dry else None]
                    for row in [replace(own, block_m=block_m, block_n=block_n, num_warps=warps, num_stages=stages)]
                }
                bodies = {
                    name: lambda row=row, product=product, given=given: product(given, row)
                    for name, row in tried.items()
                }
                times = check.stopwatch(repeats=10).compare(bodies)
                row = {"kernel": kernel, "rows": count, "n": n, "k": k, "times": times, "against": name_of(own)}
                yield with_rates(row)


def name_of(row) -> str:
    return f"{row.block_m}x{row.block_n} {row.num_warps}w {row.num_stages}s"
