"""Tile sizes, warps and pipeline stages of the attention kernels: one table in place of autotuning.

A row holds for one compute capability, head size, dtype of the keys and phase. `triton.autotune` is not used: it
runs every candidate on live buffers and needs a GPU to choose. The rows are those that compile without register
spills in float16 and bfloat16, with the largest tiles that fit a GPU's shared memory; `minillm kernels` shows the
compiler's figures for each. Those of 9.0 were also timed, on one H200 by `benchmarks/tune.py`. Built in lesson 12.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

from minillm.errors import ConfigError


@dataclass(frozen=True)
class LaunchRow:
    """How one kernel is launched.

    kernel              "flash", "paged_attention" or "merge_splits"
    compute_capability  the lowest one that the row is for
    head_size           the largest one that the row is for; smaller ones are padded to it or to a smaller row
    dtype               of the keys and values, as PyTorch spells it; 8-bit ones meet queries of 16 bits
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
FP8, INT8, SINGLE = ("float8_e4m3fn",), ("int8",), ("float32",)
# GPUs of 100 KB of shared memory (8.6, 8.9, 12.0) take the tiles of the A100 (8.0): all of them multiply by mma.sync.
FP8_MMA = ((8, 9), (12, 0))
MMA = ((8, 0), (8, 6), *FP8_MMA)
TURING, HOPPER, BLACKWELL = (7, 5), (9, 0), (10, 0)
NEW = (HOPPER, BLACKWELL)
EVERY = (*MMA, *NEW)
FLASH, PAGED = ("flash",), ("paged_attention",)
BOTH = FLASH + PAGED
PREFILL, DECODES = ("prefill",), ("decode", "split")

# Of 5 stages in the paged kernel two are K and V tiles in flight: the block table is read ahead of them.
# kernel, compute capabilities, head sizes, dtypes, phases, then block_m, block_n, num_warps, num_stages, reason
_TABLE = (
    (BOTH, (TURING,), (64,), HALF[:1], PREFILL, 64, 32, 8, 1, "no Tensor Cores since Triton 3.3: sdpa is the default"),
    (BOTH, (TURING,), (128,), HALF[:1], PREFILL, 32, 32, 8, 1, "64 rows spill 840 bytes; to be read, not to be run"),
    (PAGED, (TURING,), (64, 128), HALF[:1], ("decode",), 16, 16, 4, 1, "148 registers at most"),
    (FLASH, MMA, (64,), HALF, PREFILL, 128, 64, 8, 3, "4 warps spill 104 bytes"),
    (FLASH, MMA, (128,), HALF, PREFILL, 128, 64, 8, 3, "4 warps spill 1,960 bytes; 128 keys spill 328"),
    (FLASH, MMA, (256,), HALF, PREFILL, 64, 32, 8, 2, "64 keys need 106,496 bytes, an L4 has 101,376"),
    (FLASH, (HOPPER,), (64,), HALF, PREFILL, 128, 64, 8, 3, "128 keys take 1.2 times as long"),
    (FLASH, (HOPPER,), (128,), HALF, PREFILL, 128, 128, 8, 3, "2 stages take 1.15 times as long"),
    (FLASH, (BLACKWELL,), (64,), HALF, PREFILL, 128, 128, 8, 3, "128 keys feed tcgen05"),
    (FLASH, (BLACKWELL,), (128,), HALF, PREFILL, 128, 128, 8, 2, "a third stage takes all of the shared memory"),
    (FLASH, NEW, (256,), HALF, PREFILL, 64, 64, 8, 2, "128 rows spill 212 bytes on 9.0 and 44 on 10.0"),
    (FLASH, EVERY, (64,), SINGLE, PREFILL, 64, 32, 8, 2, "IEEE products run without Tensor Cores"),
    (FLASH, EVERY, (128,), SINGLE, PREFILL, 32, 32, 8, 2, "larger tiles do not fit the registers"),
    (FLASH, EVERY, (256,), SINGLE, PREFILL, 16, 32, 8, 2, "larger tiles do not fit the registers"),
    (PAGED, MMA, (64, 128), HALF, PREFILL, 128, 64, 8, 5, "4 warps spill; 3 stages hold one tile in flight"),
    (PAGED, MMA, (256,), HALF, PREFILL, 64, 32, 8, 3, "5 stages need 102,656 bytes, an L4 has 101,376"),
    (PAGED, (HOPPER,), (64,), HALF, PREFILL, 128, 64, 8, 5, "128 keys take 1.2 to 1.5 times as long"),
    (PAGED, (HOPPER,), (128,), HALF, PREFILL, 128, 128, 8, 3, "32 keys and 4 warps win below 2,048 tokens only"),
    (PAGED, (BLACKWELL,), (64,), HALF, PREFILL, 128, 128, 8, 5, "128 keys feed tcgen05"),
    (PAGED, (BLACKWELL,), (128,), HALF, PREFILL, 128, 64, 8, 5, "128 keys spill 8 bytes with Triton 3.6"),
    (PAGED, NEW, (256,), HALF, PREFILL, 64, 64, 8, 3, "128 rows spill 128 bytes on 10.0"),
    (PAGED, EVERY, (64,), HALF, DECODES, 16, 64, 4, 5, "16 rows are one mma tile; more would be padding"),
    (PAGED, EVERY, (128, 256), HALF, DECODES, 16, 32, 4, 5, "64 keys spill 8 to 16 bytes, by GPU and Triton version"),
    (PAGED, EVERY, (64, 128), INT8, PREFILL, 64, 64, 8, 5, "converting K and V takes registers: 64 rows"),
    (PAGED, EVERY, (256,), INT8, PREFILL, 64, 32, 8, 5, "254 of 255 registers on 8.0"),
    (PAGED, EVERY, (64, 128), INT8, DECODES, 16, 64, 4, 5, "as with 16-bit keys, in half the shared memory"),
    (PAGED, EVERY, (256,), INT8, DECODES, 16, 32, 4, 5, "as with 16-bit keys, in half the shared memory"),
    (PAGED, (*FP8_MMA, *NEW), (64, 128), FP8, PREFILL, 64, 64, 8, 5, "converting K and V takes registers: 64 rows"),
    (PAGED, (*FP8_MMA, *NEW), (256,), FP8, PREFILL, 64, 32, 8, 5, "253 of 255 registers on 9.0"),
    (PAGED, (*FP8_MMA, *NEW), (64, 128), FP8, DECODES, 16, 64, 4, 5, "as with 16-bit keys, in half the memory"),
    (PAGED, (*FP8_MMA, *NEW), (256,), FP8, DECODES, 16, 32, 4, 5, "as with 16-bit keys, in half the memory"),
    (PAGED, EVERY, (64,), SINGLE, PREFILL, 64, 32, 8, 3, "IEEE products run without Tensor Cores"),
    (PAGED, EVERY, (128,), SINGLE, PREFILL, 32, 32, 8, 3, "larger tiles do not fit the registers"),
    (PAGED, EVERY, (256,), SINGLE, PREFILL, 16, 32, 8, 3, "larger tiles do not fit the registers"),
    (PAGED, EVERY, (64, 128), SINGLE, DECODES, 16, 32, 4, 3, "for tests and comparisons, not tuned"),
    (PAGED, EVERY, (256,), SINGLE, DECODES, 16, 16, 4, 3, "for tests and comparisons, not tuned"),
    (("merge_splits",), EVERY, (64, 128, 256), (*HALF, *SINGLE), ("split",), 1, 64, 4, 1, "64 parts of a row at most"),
)

POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float8_e4m3fn": "*fp8e4nv", "int8": "*i8"}
"""How the compiler calls a pointer to each dtype."""

ROWS = tuple(
    LaunchRow(*key, *sizes)
    for kernels, capabilities, heads, dtypes, phases, *sizes in _TABLE
    for key in product(kernels, capabilities, heads, dtypes, phases)
)


@cache  # asked for in every layer of every step
def find_row(
    kernel: str, compute_capability: tuple[int, int], head_size: int, dtype: str, phase: str = "prefill"
) -> LaunchRow:
    """The row for a GPU: that of the newest compute capability not above it and the smallest head size that fits.

    Raises ConfigError naming what has no row.
    """
    if dtype.startswith("float8") and compute_capability < (8, 9):
        major, minor = compute_capability
        raise ConfigError(
            f"{dtype} keys and values need compute capability 8.9 (L4, RTX 40, H100), this GPU has {major}.{minor}; "
            "keep them in int8 or in 16 bits"
        )
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
