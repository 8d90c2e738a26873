"""Tile sizes, warps and pipeline stages of the attention kernels: one table, chosen by compiling, not by autotuning.

A row holds for one compute capability, head size, dtype of the keys and phase. `triton.autotune` is not used: it
runs every candidate on live buffers and needs a GPU to choose. The rows are those that compile without register
spills in float16 and bfloat16, with the largest tiles that fit a GPU's shared memory; `minillm kernels` shows the
compiler's figures for each. Built in lesson 12.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from minillm.errors import ConfigError


@dataclass(frozen=True)
class LaunchRow:
    """How one kernel is launched.

    kernel              "flash" or "paged_attention"
    compute_capability  the lowest one that the row is for
    head_size           the largest one that the row is for; smaller ones are padded to it or to a smaller row
    dtype               of the keys and values, as PyTorch spells it: "float16", "float8_e4m3fn", ...
    phase               "prefill"; "decode"; "split": decode with the keys of a request shared out to programs
    block_m, block_n    rows (queries x query heads of one K/V head) and keys of a tile
    num_warps           warps of 32 threads per program
    num_stages          tiles of keys in flight
    reason              why not the neighbouring choice
    """

    kernel: str
    compute_capability: tuple[int, int]
    head_size: int
    dtype: str
    phase: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    reason: str


HALF = ("float16", "bfloat16")
BYTE = ("float8_e4m3fn", "int8")
SINGLE = ("float32",)
# The last version of mma.sync; GPUs of 100 KB of shared memory (8.6, 8.9, 12.0) take the tiles of the A100 (8.0).
MMA = ((8, 0), (8, 6), (8, 9), (12, 0))
HOPPER, BLACKWELL = (9, 0), (10, 0)
EVERY = (*MMA, HOPPER, BLACKWELL)

# kernels, compute capabilities, head sizes, dtypes, phases, then block_m, block_n, num_warps, num_stages, reason
_TABLE = (
    (("flash",), MMA, (64,), HALF, ("prefill",), 128, 64, 8, 3, "4 warps spill 104 bytes"),
    (("flash",), MMA, (128,), HALF, ("prefill",), 128, 64, 8, 3, "4 warps spill 1,960 bytes; 128 keys spill 328"),
    (("flash",), MMA, (256,), HALF, ("prefill",), 64, 32, 8, 2, "64 keys need 106,496 bytes, an L4 has 101,376"),
    (("flash",), (HOPPER, BLACKWELL), (64,), HALF, ("prefill",), 128, 128, 8, 3, "128 keys feed wgmma and tcgen05"),
    (("flash",), (HOPPER, BLACKWELL), (128,), HALF, ("prefill",), 128, 128, 8, 2, "3 stages need 229,376 bytes"),
    (("flash",), (HOPPER,), (256,), HALF, ("prefill",), 64, 64, 8, 2, "128 rows spill 212 bytes"),
    (("flash",), (BLACKWELL,), (256,), HALF, ("prefill",), 128, 64, 8, 2, "o stays in tensor memory"),
    (("flash",), EVERY, (64,), SINGLE, ("prefill",), 64, 32, 8, 2, "IEEE products run without Tensor Cores"),
    (("flash",), EVERY, (128,), SINGLE, ("prefill",), 32, 32, 8, 2, "64 rows do not fit the registers"),
    (("flash",), EVERY, (256,), SINGLE, ("prefill",), 16, 32, 8, 2, "32 rows do not fit the registers"),
)

ROWS = tuple(
    LaunchRow(*key, *sizes)
    for kernels, capabilities, heads, dtypes, phases, *sizes in _TABLE
    for key in product(kernels, capabilities, heads, dtypes, phases)
)


def find_row(
    kernel: str, compute_capability: tuple[int, int], head_size: int, dtype: str, phase: str = "prefill"
) -> LaunchRow:
    """The row for a GPU: that of the newest compute capability not above it and the smallest head size that fits.

    Raises ConfigError naming what has no row.
    """
    rows = [row for row in ROWS if (row.kernel, row.dtype, row.phase) == (kernel, dtype, phase)]
    rows = [row for row in rows if row.compute_capability <= compute_capability and row.head_size >= head_size]
    if not rows:
        major, minor = compute_capability
        raise ConfigError(
            f"kernel {kernel!r} has no launch row for {phase} with head size {head_size} and {dtype} keys at compute "
            f"capability {major}.{minor}; use attention='sdpa'"
        )
    newest = max(row.compute_capability for row in rows)
    return min((row for row in rows if row.compute_capability == newest), key=lambda row: row.head_size)


def aligned(signature: dict[str, str]) -> dict[tuple[int, ...], list]:
    """The `attrs` of an ASTSource: what a launch would find out about its arguments.

    Pointers and every `*_stride` are multiples of 16, as they are with PyTorch's allocator and head sizes that are
    multiples of 16. Without it loads are narrow and nothing is copied asynchronously.
    """
    return {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith("_stride")
    }
