"""Runs the sections in processes of their own, writes one JSON file as they come, and prints a line per row.

A process that dies, hangs or breaks the GPU loses its section; the next sections go on in a new one. Exit status 0:
every section ended, 1: one of them failed, 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.gpu_check.tell import line, with_shares

TOTAL_SECONDS = 345  # so that all is written within six minutes
GRACE = 40  # seconds over its limit, in one row, after which a section's process is ended


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.child is not None:
        from benchmarks.gpu_check.sections import run_sections, say_as_json

        return run_sections(args.child.split(","), args.dry_run, say_as_json)
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from benchmarks.gpu_check.sections import SECTIONS

    if not args.dry_run and not torch.cuda.is_available():
        print(
            f"gpu-check: PyTorch {torch.__version__} sees no NVIDIA GPU on this machine, so nothing was measured. "
            "Run it where there is one; --dry-run tries the code here without measuring.",
            file=sys.stderr,
        )
        return 2
    names = [section.name for section in SECTIONS if not args.only or section.name in args.only]
    unknown = set(args.only or ()) - {section.name for section in SECTIONS}
    if unknown:
        print(f"gpu-check: no section {', '.join(unknown)}; there are: {', '.join(s.name for s in SECTIONS)}")
        return 2
    limits = {section.name: section.seconds for section in SECTIONS}
    result = {"dry_run": args.dry_run, "environment": environment(args.dry_run), "sections": {}}
    if args.dry_run:
        result["note"] = "a dry run on a CPU: its times are those of an interpreter and say nothing about any GPU"
    for name, record in run(names, limits, args.dry_run, args.seconds):
        result["sections"][name] = record
        result["sections"] = with_shares(result["sections"], result["environment"])
        write(args.out, result)
    failed = [name for name, record in result["sections"].items() if is_failure(record)]
    cut = [name for name, record in result["sections"].items() if record["cut"]]
    print(f"gpu-check: {len(names) - len(failed)} of {len(names)} sections ended without an error; {args.out} written")
    for what, which in (("failed", failed), ("cut short by its time limit", cut)):
        if which:
            print(f"  {what}: {', '.join(which)}")
    return 1 if failed else 0


def is_failure(record: dict) -> bool:
    """An error, or a row that says of itself that it is not ok."""
    return bool(record["error"]) or any(row.get("ok") is False for row in record["rows"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--out", default="gpu_check.json", help="the JSON file; default gpu_check.json")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, tiny, interpreted: tries the code")
    parser.add_argument("--only", action="append", metavar="SECTION", help="only this section; may be repeated")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help=f"for all; default {TOTAL_SECONDS}")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(names: list[str], limits: dict[str, float], dry: bool, seconds: float) -> Iterator[tuple[str, dict]]:
    """(section, record) as each one ends. record: rows, seconds, cut, error."""
    end_of_all = time.perf_counter() + seconds
    left = list(names)
    while left:
        for name, record in _one_process(list(left), limits, dry, end_of_all):
            left.remove(name)
            yield name, record


def _one_process(names: list[str], limits: dict[str, float], dry: bool, end_of_all: float):
    """Run sections in one process until it has ended; at least the first of them gets its record."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--child", ",".join(names)] + ["--dry-run"] * dry
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    lines: queue.Queue = queue.Queue()
    threading.Thread(target=lambda: [*map(lines.put, child.stdout), lines.put(None)], daemon=True).start()
    name: str | None = names[0]  # the section that runs; None between two of them
    waiting, rows, begun = list(names), [], time.perf_counter()
    try:
        while True:
            limit = min(begun + limits.get(name, 0) + GRACE, end_of_all)
            try:
                text = lines.get(timeout=max(0.0, limit - time.perf_counter()))
            except queue.Empty:
                if limit < end_of_all:
                    if name is not None:
                        yield name, _record(rows, begun, error="its process did not answer and was ended", cut=True)
                    return
                for other in waiting:
                    yield other, _record(rows if other == name else [], begun, cut=True, note="no time was left")
                return
            if text is None:
                if name is not None:
                    yield name, _record(rows, begun, error=f"its process ended with status {child.wait()}")
                return
            message = _parse_line(text)
            if "begin" in message:
                name, rows, begun = message["begin"], [], time.perf_counter()
            elif "row" in message:
                rows.append(message["row"])
                print(line(name, message["row"]), flush=True)
            elif "end" in message:
                if message["error"]:
                    print(f"{name}: failed\n{message['error']}", flush=True)
                yield name, _record(rows, begun, message["error"], message["cut"])
                waiting.remove(name)
                if not waiting:
                    return
                name, begun = None, time.perf_counter()
    finally:
        child.kill()
        child.wait()


def _record(rows: list[dict], begun: float, error: str | None = None, cut: bool = False, note: str = "") -> dict:
    seconds = round(time.perf_counter() - begun, 1)
    return {"rows": rows, "seconds": seconds, "cut": cut, "error": error} | ({"note": note} if note else {})


def _parse_line(text: str) -> dict:
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    if isinstance(message, dict):
        return message
    print(text, end="", flush=True)  # something that a library printed
    return {}


def environment(dry: bool) -> dict:
    """Versions and the GPU, with its datasheet row where the course has one."""
    import torch

    from minillm.devices import by_gpu_name

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "numpy", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    if dry:
        return found | {"gpu": None}
    gpu = torch.cuda.get_device_properties(0)
    found |= {"gpu": gpu.name, "compute_capability": f"{gpu.major}.{gpu.minor}", "memory": gpu.total_memory}
    found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    row = by_gpu_name(gpu.name)
    if row is not None:
        rates = {"tflops": row.peak("float16") / 1e12, "tb_per_s": row.bandwidth / 1e12}
        found["datasheet"] = {"name": row.name, "source": row.source} | rates
    return found


def write(path: str, result: dict) -> None:
    """The whole file anew, put in place at once: whoever reads it meets valid JSON."""
    temporary = Path(f"{path}.part")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
