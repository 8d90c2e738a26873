"""Every kernel compiled for GPUs that are not here: registers, spills, shared memory, matrix instructions.

Triton compiles for any target on a CPU; only running needs the GPU. What the compiler answers decides most of a
kernel's speed: a tile whose values do not fit the registers spills them to memory, one that does not fit shared
memory never starts, and a product without matrix instructions is ten times slower. Behind `minillm kernels`;
read in lesson 12. Not under TRITON_INTERPRET=1, where kernels are Python.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict, dataclass, replace

import triton
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from minillm.devices import shared_memory_limit
from minillm.errors import ConfigError
from minillm.kernels import (
    coded_linear,
    flash,
    fp8_rows,
    paged_attention,
    rms_norm,
    rope_kv_write,
    silu_mul,
    split_kv,
    sum_splits,
    widen_int4,
)
from minillm.kernels.compiler import compile_for
from minillm.kernels.launch import HALF, ROWS, SINGLE, LaunchRow, aligned, find_row

CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0))
ATTENTION = {"flash": flash, "paged_attention": paged_attention}
LINEAR = dict.fromkeys(("int8_linear", "fp8_linear", "int4_linear"), coded_linear)
POINTWISE = {
    "rms_norm": rms_norm,
    "rope_kv_write": rope_kv_write,
    "silu_mul": silu_mul,
    "sum_splits": sum_splits,
    "widen_int4": widen_int4,
    "fp8_rows": fp8_rows,
}
KERNELS = ATTENTION | {"merge_splits": split_kv} | LINEAR | POINTWISE

ASYNC_COPY = r"\bcp\.async\.(?:ca|cg|bulk)\b"


@dataclass(frozen=True)
class CompiledRow:
    """One row of the table, compiled: the report's figures and the texts they were read from."""

    figures: dict
    ttir: str
    ptx: str


def table() -> list[LaunchRow]:
    """The launches that the report covers, by GPU and kernel.

    bfloat16 stands for both half types, which compile alike; 7.5 has float16 only. float32 is for tests. Left out are
    the split rows and the widest decodes of 8-bit keys, and all but one head size of the merge: a report is at most
    160 compilations, three minutes.
    """
    return [row for capability in CAPABILITIES for name in KERNELS for row in _rows(name, capability)]


def _rows(kernel: str, capability: tuple[int, int]) -> list[LaunchRow]:
    half, other_half = ("float16", "bfloat16") if capability < (8, 0) else ("bfloat16", "float16")
    if kernel in LINEAR | POINTWISE:
        return [row for row in KERNELS[kernel].rows(capability, half) if row.kernel == kernel]
    keys = [(row.head_size, row.dtype, row.phase) for row in ROWS if row.kernel == kernel and row.dtype != other_half]
    found = []
    for head_size, dtype, phase in dict.fromkeys(keys):
        widest = dtype not in HALF and (phase == "split" or (phase == "decode" and head_size > 128))
        merge = kernel == "merge_splits" and head_size != 128
        if dtype not in SINGLE and not (widest or merge):
            with contextlib.suppress(ConfigError):  # this GPU has no such row
                row = find_row(kernel, capability, head_size, dtype, phase)
                found.append(replace(row, compute_capability=capability))
    return found


def expected_instruction(row: LaunchRow) -> str:
    """The matrix instruction that a good compilation holds: "mma", "wgmma", "tcgen05" or "none"."""
    if row.kernel not in ATTENTION | LINEAR or row.dtype in SINGLE or row.compute_capability < (8, 0):
        return "none"  # Triton 3.3 and later has no matrix instructions for 7.5
    if row.phase in ("decode", "split") or row.compute_capability < (9, 0):
        return "mma"  # a decode tile of 16 rows is too small for the newer ones
    return "wgmma" if row.compute_capability < (10, 0) else "tcgen05"


def compile_row(row: LaunchRow) -> CompiledRow:
    """Compile one row from scratch, one to three seconds. Raises ConfigError under the interpreter."""
    kernel, signature, constexprs = KERNELS[row.kernel].compile_spec(row)
    if not isinstance(kernel, triton.JITFunction):
        raise ConfigError("kernels are interpreted in this process; unset TRITON_INTERPRET to compile them")
    source = ASTSource(kernel, signature, constexprs, aligned(signature))
    options = {"num_warps": row.num_warps, "num_stages": row.num_stages}
    compiled = compile_for(source, row.compute_capability, options)
    figures = {key: value for key, value in asdict(row).items() if key != "reason"}
    figures["compute_capability"] = "{}.{}".format(*row.compute_capability)
    figures["registers"] = compiled.registers
    figures["spill_bytes"] = compiled.spill_bytes
    figures["shared_bytes"] = compiled.shared_bytes
    figures["shared_limit"] = shared_memory_limit(row.compute_capability)
    figures |= compiled.matrix_instructions
    figures["expected"] = expected_instruction(row)
    figures["async_copies"] = len(re.findall(ASYNC_COPY, compiled.ptx))
    return CompiledRow(figures, compiled.ttir, compiled.ptx)


def versions() -> dict[str, str]:
    """What compiled: Triton and its two assemblers."""
    return {
        "triton": triton.__version__,
        "ptxas": get_ptxas(80).version,
        "ptxas_blackwell": get_ptxas(100).version,
    }
