"""Putting split contexts together: the second kernel of Flash-Decoding.

With few requests and long contexts, one program per request and K/V head leaves most of a GPU idle. So the keys of
a request are shared out to several programs (`paged_attention.py` with num_splits > 1); each leaves its own softmax
over its part, and here the parts are averaged, weighted by exp(LSE). An empty part has LSE -inf and weight 0.
Built in lesson 12, after Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minillm.kernels.launch import POINTERS, LaunchRow

KEYS_PER_SPLIT = 256
"""A part with fewer keys is not worth its own softmax and the merge."""

PROGRAMS_PER_SM = 2
"""One per multiprocessor leaves its memory pipeline half empty: 8 requests of 65,536 tokens took 1.24 times as long."""


@triton.jit(do_not_specialize=["num_requests", "queries_per_part"])
def merge_splits_kernel(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, query_start_loc_ptr, num_requests, queries_per_part,
    H: tl.constexpr, D: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    request, query = tl.program_id(0) // queries_per_part, tl.program_id(0) % queries_per_part
    head = tl.program_id(1)
    first_row = tl.load(query_start_loc_ptr + request)
    num_queries = tl.load(query_start_loc_ptr + request + 1) - first_row
    if (query >= num_queries) | (num_queries > queries_per_part):  # a chunk of a prompt is not split
        return

    splits, d = tl.arange(0, BLOCK_S).to(tl.int64), tl.arange(0, BLOCK_D)
    part = ((splits * num_requests + request) * queries_per_part + query) * H + head
    lse = tl.load(part_lse_ptr + part, mask=splits < NUM_SPLITS, other=-float("inf"))  # [splits]
    mask = (splits < NUM_SPLITS)[:, None] & (d < D)[None, :]
    out = tl.load(part_out_ptr + part[:, None] * D + d[None, :], mask=mask, other=0.0)  # [splits, D]

    highest = tl.max(lse, 0)  # exp of an LSE itself would overflow
    base = tl.where(highest == -float("inf"), 0.0, highest)
    weight = tl.exp(lse - base)
    total = tl.sum(weight, 0)
    out = tl.sum(out * weight[:, None], 0) / tl.where(total == 0, 1.0, total)

    row = (first_row + query).to(tl.int64) * H + head
    tl.store(out_ptr + row * D + d, out, mask=d < D)
    tl.store(lse_ptr + row, base + tl.log(total))


def merge_splits(
    out: torch.Tensor,
    lse: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    query_start_loc: torch.Tensor,
    row: LaunchRow,
) -> None:
    """Fill the rows of out [T, H, D] and lse [T, H] of the requests that were split.

    part_out [splits, B, queries, H, D] and part_lse [splits, B, queries, H] are float32 and contiguous; a request of
    more than `queries` queries was not split. At most row.block_n splits.
    """
    num_splits, num_requests, queries, heads, head_size = part_out.shape
    merge_splits_kernel[(num_requests * queries, heads)](
        part_out, part_lse, out, lse, query_start_loc, num_requests, queries,
        H=heads, D=head_size, NUM_SPLITS=num_splits,
        BLOCK_S=triton.next_power_of_2(num_splits), BLOCK_D=triton.next_power_of_2(head_size),
        num_warps=row.num_warps,
    )  # fmt: skip


def choose_num_splits(programs: int, longest_context: int, num_sms: int, most: int = 64) -> int:
    """Into how many parts the keys of a decode are split: a power of two, 1 when the GPU is busy without it.

    `programs` run anyway (requests times K/V heads); splitting ends where every multiprocessor has PROGRAMS_PER_SM, or
    where a part would have fewer than KEYS_PER_SPLIT keys.
    """
    splits, wanted = 1, PROGRAMS_PER_SM * num_sms
    while splits < most and programs * splits < wanted and longest_context >= 2 * splits * KEYS_PER_SPLIT:
        splits *= 2
    return splits


def compile_spec(row: LaunchRow):
    """(kernel, signature, constexprs) of the merge that follows a row of phase "split": 32 heads."""
    constexprs = {"H": 32, "D": row.head_size, "BLOCK_D": row.head_size}
    constexprs |= {"NUM_SPLITS": row.block_n, "BLOCK_S": row.block_n}
    kinds = {"part_out_ptr": "*fp32", "part_lse_ptr": "*fp32", "out_ptr": POINTERS[row.dtype], "lse_ptr": "*fp32"}
    kinds |= {"query_start_loc_ptr": "*i32"} | dict.fromkeys(constexprs, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in merge_splits_kernel.arg_names}
    return merge_splits_kernel, signature, constexprs
