"""What is checked, in this order, and how many seconds each section may take; and how one process runs them.

A section is a generator of rows. Every row and every end of a section is one line of JSON on stdout, so that nothing
measured is lost when the process dies: `__main__` reads the lines and starts a new process for what is left.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

import torch

from benchmarks.gpu_check.measure import Stopwatch
from minillm.attention.triton import compute_capability

BROKEN = 3
"""Exit status of a process whose GPU no longer answers after an error."""


@dataclass(frozen=True)
class Section:
    name: str
    module: str  # of this package; its function `rows` is the generator
    seconds: float
    function: str = "rows"

    def rows(self, check: Check) -> Iterator[dict]:
        return getattr(import_module(f"benchmarks.gpu_check.{self.module}"), self.function)(check)


SECTIONS = (
    Section("correctness", "correctness", 75),
    Section("ceilings", "ceilings", 10),
    Section("flash prefill", "prefill", 45),
    Section("paged prefill", "prefill", 25, "paged"),
    Section("decode", "decode", 40),
    Section("8-bit KV", "eight_bit", 35),
    Section("end to end", "end_to_end", 75),
    Section("where time goes", "breakdown", 25),
    Section("fused steps", "fused", 15),
    Section("quantized products", "quantized", 25),
    Section("quantized decode", "quantized", 30, "decode"),
    Section("quantized tiles", "quantized_tiles", 25),
    Section("tile staircase", "ceilings", 10, "staircase"),
    Section("steps of whole tiles", "alignment", 15),
    Section("embedding in CPU memory", "embedding", 15),
    Section("pipeline", "pipeline", 15),
    Section("float16 against float32", "half", 15),
    Section("transformers", "peers", 25),
    Section("lessons", "lessons", 90),
)


@dataclass(frozen=True)
class Check:
    """What a section needs to know.

    device     where to run
    dtype      the engine's dtype on that device; float32 in a dry run
    dry        a dry run: tiny shapes, every code path
    """

    device: torch.device
    dtype: torch.dtype
    dry: bool

    @classmethod
    def here(cls, dry: bool) -> Check:
        if dry:
            return cls(torch.device("cpu"), torch.float32, True)
        modern = torch.cuda.get_device_capability() >= (8, 0)
        return cls(torch.device("cuda"), torch.bfloat16 if modern else torch.float16, False)

    @property
    def capability(self) -> tuple[int, int]:
        return compute_capability(self.device)

    @property
    def free_bytes(self) -> int:
        """Memory that a section may plan with."""
        if self.dry:
            return 2**28
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by PyTorch, for its next tensors
        return torch.cuda.mem_get_info()[0] + kept

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if not self.dry:
            torch.cuda.synchronize()

    def stopwatch(self, **options) -> Stopwatch:
        return Stopwatch(self.device, **({"repeats": 2, "warmup": 1} if self.dry else options))


def run_sections(names: list[str], dry: bool, say: Callable[[dict], None]) -> int:
    """Run sections one after another in this process; returns the exit status."""
    check = Check.here(dry)
    for section in (s for s in SECTIONS if s.name in names):
        say({"begin": section.name})
        start, error, cut = time.perf_counter(), None, False
        torch.manual_seed(0)
        try:
            with torch.inference_mode():
                for row in section.rows(check):
                    say({"row": row})
                    if time.perf_counter() - start > section.seconds:
                        cut = True
                        break
        except Exception:
            error = traceback.format_exc(limit=-6)
        say({"end": section.name, "seconds": round(time.perf_counter() - start, 1), "cut": cut, "error": error})
        if not dry:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:
                return BROKEN
    return 0


def say_as_json(message: dict) -> None:
    print(json.dumps(message), flush=True)
