"""What the kernels without a matrix product share: the rows with which the compile report launches them."""

from __future__ import annotations

from minillm.kernels.launch import LaunchRow


def pointwise_row(
    kernel: str,
    compute_capability: tuple[int, int],
    dtype: str,
    block: tuple[int, int],
    num_warps: int,
    head_size: int = 0,
) -> LaunchRow:
    """One launch of a kernel that reads every value once; head size 0 where it knows no heads."""
    reason = "each thread reads 16 bytes at a time"
    return LaunchRow(kernel, compute_capability, head_size, dtype, "pointwise", *block, num_warps, 1, reason)
