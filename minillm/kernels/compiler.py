"""One kernel compiled for a GPU that need not be here, and what the compiler says about it.

Knows no kernel: what is compiled comes from compile.py for the report, and from a learner's launcher while a task is
graded. Not under TRITON_INTERPRET=1, where kernels are Python.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MATRIX_INSTRUCTIONS = {"mma": r"\bmma\.sync", "wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma"}


@dataclass(frozen=True)
class Compiled:
    """A compilation: figures of the assembler, and the texts it came by.

    registers            per thread
    spill_bytes          of registers that did not fit, per thread
    shared_bytes         of shared memory, per thread block
    matrix_instructions  "mma", "wgmma" and "tcgen05" -> how often each stands in the PTX
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix_instructions: dict[str, int]
    ttir: str
    ptx: str


def compile_for(source: ASTSource, capability: tuple[int, int], options: dict) -> Compiled:
    """Compile from scratch, one to three seconds. Raises what Triton raises for a kernel that does not compile.

    capability  of the GPU, (9, 0) for an H100
    options     num_warps, num_stages and other options of a launch
    """
    major, minor = capability
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = True  # a cached result would not tell what ptxas said
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    ptx = compiled.asm["ptx"]
    return Compiled(
        registers=max(int(n) for n in re.findall(r"Used (\d+) registers", log.getvalue())),
        spill_bytes=max(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())),
        shared_bytes=compiled.metadata.shared,
        matrix_instructions={name: len(re.findall(text, ptx)) for name, text in MATRIX_INSTRUCTIONS.items()},
        ttir=compiled.asm["ttir"],
        ptx=ptx,
    )
