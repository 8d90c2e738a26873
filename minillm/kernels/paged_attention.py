"""The engine's attention kernel: a ragged batch of prefill chunks and decodes over the paged KV cache.

To the algorithm of `flash.py` it adds what serving needs. A request is found from `query_start_loc`. The rows of a
tile are queries times the query heads of one K/V head, so that K and V are read once for all of them. Keys are found
through the block table. Compile-time switches add a sliding window with sinks, a list of key tiles to visit, and
8-bit K/V. The length of a prompt is never one of them. Splits over the keys are merged by `split_kv.py`.
Built in lesson 12, after PagedAttention (Kwon et al. 2023, arXiv 2309.06180).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from minillm.kernels.flash import LOG2_E, online_softmax
from minillm.kernels.launch import POINTERS, LaunchRow


@triton.jit(
    do_not_specialize=["table_width", "list_width", "num_requests", "fewest_queries", "queries_per_part"],
)
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    block_tables_ptr, query_start_loc_ptr, seq_lens_ptr, list_ptr, count_ptr,
    q_row_stride, q_head_stride,
    k_block_stride, k_slot_stride, k_head_stride,
    v_block_stride, v_slot_stride, v_head_stride,
    table_width, list_width, num_requests, fewest_queries, queries_per_part, scale,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, DECODE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # 1. Which queries of which request: BLOCK_M rows are QUERIES queries times the G heads that share a K/V head.
    QUERIES: tl.constexpr = BLOCK_M // G
    kv_head = tl.program_id(1).to(tl.int64)
    if DECODE:  # a request has one tile
        tile = tl.program_id(0)
        request = tile
        first_query = 0
    else:  # the last tiles of a prompt see most keys, so they start first
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        request = find_request(query_start_loc_ptr, tile, num_requests, QUERIES)
        first_query = (tile - tl.load(query_start_loc_ptr + request) // QUERIES - request) * QUERIES
    first_row = tl.load(query_start_loc_ptr + request)
    num_queries = tl.load(query_start_loc_ptr + request + 1) - first_row
    served = first_query < num_queries
    served = served & (num_queries <= QUERIES) if DECODE else served & (num_queries >= fewest_queries)
    if not served:  # another launch does it, or the tile is one more than the request needs
        return

    rows, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = first_query + rows // G
    head = kv_head * G + rows % G
    exists = (rows < QUERIES * G) & (query < num_queries)
    q_rows = (first_row + query).to(tl.int64) * q_row_stride + head * q_head_stride
    q = tl.load(q_ptr + q_rows[:, None] + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0)

    # 2. Which tiles of keys, counted in steps. Positions are bottom-right: the last query sees every key.
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - num_queries + first_query
    positions = seq_len - num_queries + query
    end = tl.minimum(first_position + QUERIES, seq_len)  # keys from here on are seen by no row
    oldest = 0  # keys before this one are seen by no row, but for the sinks
    skipped = 0  # steps between the sinks and the window
    sink_steps = 0
    if WINDOW:
        oldest = tl.maximum(first_position - WINDOW + 1, 0)
        sink_steps = tl.minimum(tl.cdiv(SINKS, BLOCK_N), oldest // BLOCK_N)
        skipped = oldest // BLOCK_N - sink_steps
    if list_ptr is not None:
        list_ptr += (tile * HKV + kv_head) * list_width
        num_steps = tl.load(count_ptr + tile * HKV + kv_head)
    else:
        num_steps = tl.cdiv(tl.maximum(end, 0), BLOCK_N) - skipped
    full_steps = 0  # of the first tiles every row sees every key; in the special modes none is taken for such
    if WINDOW == 0 and list_ptr is None:
        full_steps = tl.maximum(first_position + 1, 0) // BLOCK_N
    first_step = 0
    if SPLIT:  # every program takes its share of the steps; there may be none left for the last ones
        share = tl.cdiv(num_steps, tl.num_programs(2))
        first_step = tl.program_id(2) * share
        num_steps = tl.minimum(first_step + share, num_steps)

    # 3. FlashAttention over them: full tiles without a mask, then those that need one.
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_width
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    o_i = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for step in range(first_step, tl.minimum(full_steps, num_steps)):
        o_i, l_i, m_i = attend_tile(
            o_i, l_i, m_i, q, step * BLOCK_N, positions, end, oldest, kv_head, table_ptr,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride, scale,
            HKV, D, BLOCK_SIZE, WINDOW, SINKS, BLOCK_N, BLOCK_D, False,
        )  # fmt: skip
    # 2 stages: with more, the masks of this loop no longer fit the registers.
    for step in tl.range(tl.maximum(first_step, full_steps), num_steps, num_stages=2):
        if list_ptr is not None:
            start = tl.load(list_ptr + step) * BLOCK_N
        else:
            start = tl.where(step < sink_steps, step, step + skipped) * BLOCK_N
        o_i, l_i, m_i = attend_tile(
            o_i, l_i, m_i, q, start, positions, end, oldest, kv_head, table_ptr,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride, scale,
            HKV, D, BLOCK_SIZE, WINDOW, SINKS, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip

    # 4. A row that has seen no key gives 0, and -inf for its logarithm.
    o_i = o_i / tl.where(l_i == 0, 1.0, l_i)[:, None]
    lse = (m_i + tl.log2(l_i)) / LOG2_E
    if SPLIT:  # [splits, requests, queries_per_part]
        part = tl.program_id(2).to(tl.int64) * num_requests + request
        out_row = part * queries_per_part + query
    else:
        out_row = (first_row + query).to(tl.int64)
    out_row = out_row * (HKV * G) + head
    tl.store(out_ptr + out_row[:, None] * D + d[None, :], o_i, mask=exists[:, None] & (d < D)[None, :])
    tl.store(lse_ptr + out_row, lse, mask=exists)


@triton.jit
def find_request(query_start_loc_ptr, tile, num_requests, QUERIES: tl.constexpr):
    """The request that owns a tile: the tiles of request r begin at query_start_loc[r] // QUERIES + r.

    That leaves room for one tile that is not full per request, and nobody has to count the tiles beforehand.
    """
    low = tile * 0
    high = low + num_requests
    while high - low > 1:  # tiles of `low` begin at or before `tile`, those of `high` after it
        middle = (low + high) // 2
        begins = tl.load(query_start_loc_ptr + middle) // QUERIES + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    return low


@triton.jit
def attend_tile(
    o_i, l_i, m_i, q, start, positions, end, oldest, kv_head, table_ptr,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride, scale,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One more tile: the keys start .. start + BLOCK_N, some of which may not exist or not be seen if MASKED."""
    keys, d = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    readable = keys < end
    if WINDOW:
        readable = readable & ((keys >= oldest) | (keys < SINKS))
    columns = (d < D)[None, :]
    # A tile may lie over several blocks or within one.
    block = load(table_ptr + keys // BLOCK_SIZE, readable, MASKED).to(tl.int64)
    slot = (keys % BLOCK_SIZE).to(tl.int64)

    k_rows = (block * k_block_stride + slot * k_slot_stride)[:, None]
    v_rows = (block * v_block_stride + slot * v_slot_stride)[:, None]
    k = load_rows(k_ptr + k_rows + d[None, :], readable, columns, MASKED, D < BLOCK_D)  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    v = load_rows(v_ptr + v_rows + d[None, :], readable, columns, MASKED, D < BLOCK_D)
    if k_scale_ptr is not None:
        scale_rows = (block * BLOCK_SIZE + slot) * HKV + kv_head
        s *= load(k_scale_ptr + scale_rows, readable, MASKED)[None, :]
        v = v.to(tl.float32) * load(v_scale_ptr + scale_rows, readable, MASKED)[:, None]
    if MASKED:
        distance = positions[:, None] - keys[None, :]
        seen = distance >= 0
        if WINDOW:
            seen = seen & ((distance < WINDOW) | (keys < SINKS)[None, :])
        s = tl.where(seen, s, -float("inf"))
    return online_softmax(o_i, l_i, m_i, s, v.to(q.dtype), scale)


@triton.jit
def load(ptrs, mask, MASKED: tl.constexpr):
    return tl.load(ptrs, mask=mask, other=0) if MASKED else tl.load(ptrs)


@triton.jit
def load_rows(ptrs, rows, columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A tile [BLOCK_N, BLOCK_D], 0 in rows and columns that are not to be read."""
    if MASK_ROWS and MASK_COLUMNS:
        return tl.load(ptrs, mask=rows[:, None] & columns, other=0.0)
    elif MASK_ROWS:
        return tl.load(ptrs, mask=rows[:, None], other=0.0)
    elif MASK_COLUMNS:
        return tl.load(ptrs, mask=columns, other=0.0)
    else:
        return tl.load(ptrs)


def paged_attention(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    row: LaunchRow,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    block_list: torch.Tensor | None = None,
    block_count: torch.Tensor | None = None,
    fewest_queries: int = 1,
    num_splits: int = 1,
    queries_per_part: int = 1,
) -> None:
    """Fill out [T, H, D] and lse [T, H] float32 for the requests that this launch serves.

    q                [T, H, D] float32, float16 or bfloat16, D values of a row side by side
    k_pages, v_pages [P, block_size, Hkv, D], of q's dtype, or 8-bit with k_scale, v_scale [P, block_size, Hkv]
                     float32, contiguous, each the value of one step
    block_tables     [B, max_blocks] int32;  query_start_loc [B+1], seq_lens [B] int32
    row              tile sizes and phase. "decode" and "split" serve requests of at most `queries_per_tile` queries,
                     "prefill" those of at least `fewest_queries`
    window, sinks    a query sees its last `window` keys and the first `sinks` ones
    block_list       [tiles, Hkv, width] int32 with block_count [tiles, Hkv]: the key tiles (of row.block_n keys) that
                     a tile of queries visits, in any order; causality is kept. Tiles count as in `find_request`
    num_splits       more than 1, in a decode: out is [num_splits, B, queries_per_part, H, D] and lse likewise, for
                     `split_kv.merge_splits`

    Shapes are the caller's business: `attention/triton.py` checks them.
    """
    num_requests, heads = len(seq_lens), q.shape[1]
    kv_heads, head_size = k_pages.shape[2:]
    group = heads // kv_heads
    block_m = tile_rows(row, group)
    decode = row.phase != "prefill"
    # Enough for any way of sharing T tokens out to B requests, so that nobody has to read query_start_loc here.
    tiles = num_requests if decode else q.shape[0] // queries_per_tile(row, group) + num_requests
    paged_attention_kernel[(tiles, kv_heads, num_splits)](
        q, k_pages, v_pages, k_scale, v_scale, out, lse,
        block_tables, query_start_loc, seq_lens, block_list, block_count,
        *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
        block_tables.stride(0), 0 if block_list is None else block_list.shape[2],
        num_requests, fewest_queries, queries_per_part, LOG2_E.value / math.sqrt(head_size),
        HKV=kv_heads, G=group, D=head_size, BLOCK_SIZE=k_pages.shape[1],
        WINDOW=window or 0, SINKS=sinks, DECODE=decode, SPLIT=num_splits > 1,
        BLOCK_M=block_m, BLOCK_N=row.block_n, BLOCK_D=padded(head_size),
        num_warps=row.num_warps, num_stages=row.num_stages,
    )  # fmt: skip


def tile_rows(row: LaunchRow, group: int) -> int:
    """BLOCK_M: a tile holds at least one query with all heads of its group."""
    return max(row.block_m, triton.next_power_of_2(group))


def queries_per_tile(row: LaunchRow, group: int) -> int:
    """Queries in a tile whose rows are queries times `group` heads; a decode row serves requests of up to so many."""
    return tile_rows(row, group) // group


def padded(head_size: int) -> int:
    """BLOCK_D: tiles have powers of two on each side, and a product needs at least 16."""
    return max(16, triton.next_power_of_2(head_size))


def compile_spec(row: LaunchRow, window: int | None = None, sinks: int = 0, sparse: bool = False):
    """(kernel, signature, constexprs) with which a row is compiled ahead of time: 32 query heads on 8 K/V heads."""
    quantized = row.dtype in ("float8_e4m3fn", "int8")
    pages, queries = POINTERS[row.dtype], "*bf16" if quantized else POINTERS[row.dtype]
    constexprs = {
        "HKV": 8, "G": 4, "D": row.head_size, "BLOCK_SIZE": 16,
        "WINDOW": window or 0, "SINKS": sinks, "DECODE": row.phase != "prefill", "SPLIT": row.phase == "split",
        "BLOCK_M": tile_rows(row, 4), "BLOCK_N": row.block_n, "BLOCK_D": padded(row.head_size),
    }  # fmt: skip
    constexprs |= {} if quantized else {"k_scale_ptr": None, "v_scale_ptr": None}
    constexprs |= {} if sparse else {"list_ptr": None, "count_ptr": None}
    kinds = {"q_ptr": queries, "k_ptr": pages, "v_ptr": pages, "lse_ptr": "*fp32", "scale": "fp32"}
    kinds |= {"out_ptr": "*fp32" if row.phase == "split" else queries}
    kinds |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32") | dict.fromkeys(constexprs, "constexpr")
    signature = {
        name: kinds.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in paged_attention_kernel.arg_names
    }
    return paged_attention_kernel, signature, constexprs
