"""Launch rows measured on the GPU that is here: every candidate of a grid, timed in turns, best first.

    python -m benchmarks.tune --out benchmarks/results/tune.json [--only flash ...] [--dry-run]

The table in `minillm/kernels/launch.py` was found by compiling. This says which of the rows that compile is the
fastest one, and how far the table's row is behind it. Candidates are compiled by several processes at once, because a
GPU waits for compilers longer than it computes; a candidate that does not fit the GPU is listed with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

TOKENS, WIDTH = 16384, 2048
GRIDS = {
    # block_m, block_n, num_warps, num_stages
    "flash": ((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)),
    "paged prefill": ((64, 128), (32, 64, 128), (4, 8), (3, 4, 5)),
    "paged decode": ((16,), (16, 32, 64, 128), (1, 2, 4, 8), (3, 5, 7)),
}
SPLITS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Problem:
    """One thing to be fast at: (kernel of GRIDS, head size, sizes of the step)."""

    kernel: str
    head_size: int
    sizes: tuple[int, ...]


PROBLEMS = (
    *(Problem("flash", d, (n,)) for d in (128, 64) for n in (2048, 8192)),
    *(Problem("paged prefill", d, (n,)) for d in (128, 64) for n in (512, 2048, 8192)),
    *(Problem("paged decode", d, size) for d in (128, 64) for size in ((1, 4096), (8, 4096), (64, 4096), (8, 65536))),
)
DRY = (Problem("flash", 16, (32,)), Problem("paged prefill", 16, (32,)), Problem("paged decode", 16, (2, 40)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--out", default="tune.json")
    parser.add_argument("--only", action="append", choices=GRIDS, help="only this kernel; may be repeated")
    parser.add_argument("--seconds", type=float, default=150, help="for all of it; default 150")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, tiny, interpreted: tries the code")
    args = parser.parse_args(argv)
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    end = time.perf_counter() + args.seconds
    problems = [p for p in (DRY if args.dry_run else PROBLEMS) if not args.only or p.kernel in args.only]
    if not args.dry_run:
        compile_all(problems, end)
    results = []
    for problem in problems:
        if time.perf_counter() > end:
            print("tune: no time was left")
            break
        results.append(measure(problem, args.dry_run))
        tell(results[-1])
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"dry_run": args.dry_run, "gpu": gpu_name(args.dry_run), "problems": results}, file, indent=1)
            file.write("\n")
    return 0


def gpu_name(dry: bool) -> str | None:
    import torch

    return None if dry else torch.cuda.get_device_name()


def compile_all(problems: list[Problem], end: float) -> None:
    """Fill Triton's cache: every candidate runs once, in as many processes as there are processors."""
    keys = dict.fromkeys((p.kernel, p.head_size) for p in problems)
    jobs = [(kernel, d, sizes) for kernel, d in keys for sizes in product(*GRIDS[kernel])]
    workers = max(1, (os.cpu_count() or 2) - 1)
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        done = pool.imap_unordered(_compile, jobs)
        for _ in jobs:
            with contextlib.suppress(multiprocessing.TimeoutError):
                done.next(timeout=max(1.0, end - time.perf_counter()))
    print(f"tune: {len(jobs)} candidates compiled in {time.perf_counter() - start:.1f} s by {workers} processes")


def _compile(job: tuple) -> None:
    kernel, head_size, sizes = job
    small = {"flash": (256,), "paged prefill": (256,), "paged decode": (2, 600)}[kernel]
    for _, body in bodies(Problem(kernel, head_size, small), [sizes], splits=(1, 2), dry=False):
        with contextlib.suppress(Exception):  # told again, with its reason, when it is measured
            body()


def bodies(problem: Problem, grid, splits: tuple[int, ...], dry: bool) -> Iterator[tuple[tuple, Callable]]:
    """(candidate, what runs it) for one problem; a decode's candidate ends with its number of splits."""
    import torch

    from benchmarks.gpu_check.attention import Ragged, head_counts, name_of
    from benchmarks.gpu_check.sections import Check
    from minillm.attention.triton import TritonAttention
    from minillm.kernels.flash import flash_attention
    from minillm.kernels.launch import LaunchRow

    check = Check.here(dry)
    dtype, d = name_of(check.dtype), problem.head_size

    def row(kernel: str, phase: str, sizes: tuple) -> LaunchRow:
        return LaunchRow(kernel, check.capability, d, dtype, phase, *sizes, reason="a candidate")

    if problem.kernel == "flash":
        (n,) = problem.sizes
        shape = (max(1, TOKENS // n), n, WIDTH // d, d) if not dry else (1, n, 2, d)
        q, k, v = (torch.randn(shape, device=check.device).to(check.dtype) for _ in "qkv")
        for sizes in grid:
            chosen = row("flash", "prefill", sizes)
            yield sizes, lambda chosen=chosen: flash_attention(q, k, v, chosen)
        return
    heads, kv_heads = head_counts(check)
    if problem.kernel == "paged prefill":
        (n,) = problem.sizes
        step = Ragged(check, [(n, n)] * max(1, 8192 // n) if not dry else [(n, n)], heads, kv_heads, d)
        for sizes in grid:
            attend = TritonAttention(check.dtype, check.device, {"prefill": row("paged_attention", "prefill", sizes)})
            yield sizes, lambda attend=attend: step.attend(attend)
        return
    batch, context = problem.sizes
    step = Ragged(check, [(1, context)] * batch, heads, kv_heads, d)
    for sizes in grid:
        rows = {phase: row("paged_attention", phase, sizes) for phase in ("decode", "split")}
        for num_splits in splits:
            if num_splits > 1 and context < 64 * num_splits:
                continue
            attend = TritonAttention(check.dtype, check.device, rows, num_splits=num_splits)
            yield (*sizes, num_splits), lambda attend=attend: step.attend(attend)


def measure(problem: Problem, dry: bool) -> dict:
    """Every candidate's time, best first, with the table's own choice among them."""
    from benchmarks.gpu_check.attention import name_of
    from benchmarks.gpu_check.sections import Check
    from minillm.kernels.launch import find_row

    check = Check.here(dry)
    grid = list(product(*GRIDS[problem.kernel]))[: 2 if dry else None]
    kernel, _, phase = problem.kernel.partition(" ")
    kernel = "paged_attention" if kernel == "paged" else kernel
    table = find_row(kernel, check.capability, problem.head_size, name_of(check.dtype), phase or "prefill")
    own = (table.block_m, table.block_n, table.num_warps, table.num_stages)
    splits = (1, 2) if dry else SPLITS
    tried = dict(bodies(problem, [own, *(sizes for sizes in grid if sizes != own)], splits, dry))
    times = check.stopwatch(repeats=7, warmup=2).compare({str(key): body for key, body in tried.items()})
    found = [{"candidate": list(key), **times[str(key)]} for key in tried]
    found.sort(key=lambda one: one.get("median_us", float("inf")))
    return {
        "kernel": problem.kernel,
        "head_size": problem.head_size,
        "sizes": list(problem.sizes),
        "columns": ["block_m", "block_n", "num_warps", "num_stages"] + ["num_splits"] * (phase == "decode"),
        "table": list(own),
        "candidates": found,
    }


def tell(result: dict) -> None:
    """The five best and the best form of the table's row."""
    best = result["candidates"]
    own = next(one for one in best if one["candidate"][:4] == result["table"] and "median_us" in one)
    print(f"{result['kernel']} D={result['head_size']} sizes={result['sizes']}")
    for one in best[:5] + ([own] if own not in best[:5] else []):
        mark = " <- table" if one["candidate"][:4] == result["table"] else ""
        print(f"  {one['candidate']} {one.get('median_us', float('nan')):,.1f} us{mark}")
    failed = [one for one in best if "error" in one]
    if failed:
        print(f"  {len(failed)} of {len(best)} do not run here, for example {failed[0]['error'][:100]}")


if __name__ == "__main__":
    sys.exit(main())
