"""The engine's kernel against the float64 oracle: alone, split over the keys, and through attention='triton'."""

import math

import pytest
import torch

from minillm.attention.triton import TritonAttention
from minillm.batch import Batch
from minillm.errors import ConfigError, ShapeError
from minillm.kernels import paged_attention as kernels
from minillm.kernels.launch import find_row
from minillm.kernels.paged_attention import queries_per_tile
from minillm.kernels.split_kv import choose_num_splits
from minillm.kv_cache import KVLayer
from tests.kernels.kernel_cases import (
    SMALL,
    Stretched,
    assert_close_to,
    masked_oracle,
    quantized,
    run_kernel,
    seen_with_sinks,
    small,
    small_body,
)
from tests.kernels.memory import MemoryGuard
from tests.unit.attention_cases import (
    NAN,
    Ragged,
    assert_close,
    check,
    deep,
    equal,
    inside_nan,
    oracle,
    random_sequence,
    rising,
    transposed,
)

B = 16  # block size
DECODE_QUERIES = 8  # of a small decode tile with two query heads per K/V head
MIXED = [(1, 1), (1, 40), (2, 2), (3, 35), (9, 9), (1, 70), (17, 60), (20, 33)]


def mixed_sequences(**shape):
    return [random_sequence(*MIXED[i], **shape) for i in torch.randperm(len(MIXED)).tolist()]


@pytest.fixture(params=[1, 3], ids=["whole", "split"])
def body(request):
    return small_body(num_splits=request.param)


# -- lengths and shapes


@pytest.mark.parametrize("n", range(1, 18))  # 16 queries are a prefill tile of 32 rows
def test_every_number_of_queries_up_to_one_more_than_a_tile(n):
    check(small_body(), Ragged([random_sequence(n, 40)]))


@pytest.mark.parametrize("n", [1, 7, 8, 15, 16, 17, 63, 65, 127, 129])
@pytest.mark.parametrize("cached", [0, 33])
def test_a_fresh_prompt_and_the_same_prompt_behind_others(n, cached):
    check(small_body(), Ragged([random_sequence(n, n + cached, heads=2, kv_heads=1)]))


@pytest.mark.parametrize("context", [1, 7, 8, 15, 16, 17, 63, 65, 127, 129])
def test_a_decode_in_any_context(body, context):
    check(body, Ragged([random_sequence(1, context)]))


@pytest.mark.parametrize("head_size", [8, 16, 24, 32, 64, 80, 96, 128, 192, 256])
def test_head_sizes(body, head_size):
    check(body, Ragged([random_sequence(n, 37, head_size=head_size) for n in (1, 3, 17)]))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 20])
def test_groups_of_query_heads_with_distinct_kv_heads(body, group):
    check(body, Ragged([random_sequence(n, 40, heads=2 * group, kv_heads=2) for n in (1, 2, 19)]))


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 48, 128])
def test_block_sizes_below_and_above_the_tile(body, block_size):
    check(body, Ragged([random_sequence(n, 70) for n in (1, 19)], block_size=block_size))


@pytest.mark.parametrize("block_m, block_n", [(16, 16), (16, 64), (64, 16), (128, 64)])
def test_tile_sizes(block_m, block_n):
    rows = {phase: small(phase, block_m, block_n) for phase in SMALL}
    sequences = [rising(*random_sequence(n, 70)) for n in (1, 33)]
    check(small_body(**rows), Ragged(sequences))


def test_the_rows_of_the_table(body):
    """With tiles as large as on a GPU, several requests are smaller than one."""
    check(TritonAttention(torch.float32, "cpu"), Ragged(mixed_sequences(head_size=64)))


# -- values


@pytest.mark.parametrize("kind", [rising, deep, equal])
@pytest.mark.parametrize("n, context", [(1, 129), (3, 100), (17, 120), (65, 65)])
def test_hard_values(body, kind, n, context):
    check(body, Ragged([kind(*random_sequence(n, context, heads=6, head_size=32))]))


def test_two_queries_at_the_end_of_five_keys_by_hand(body):
    """The last query sees all five keys (bottom-right); top-left alignment would show it two."""
    q, k = torch.zeros(2, 1, 8), torch.zeros(5, 1, 8)  # all scores are 0: the output is a mean
    v = torch.arange(5.0)[:, None, None].expand(5, 1, 8).contiguous()
    out, lse = body.attend_with_lse(*Ragged([(q, k, v)]).inputs)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1.5, 2.0]))
    torch.testing.assert_close(lse[:, 0], torch.tensor([4.0, 5.0]).log())


@pytest.mark.parametrize("window", [None, 20])
def test_float16_within_its_tolerance(window):
    shape = {"heads": 6, "head_size": 64, "dtype": torch.float16}
    sequences = [random_sequence(n, context, **shape) for n, context in [(1, 1), (1, 129), (3, 40), (40, 70)]]
    check(small_body(2, torch.float16), Ragged(sequences, window), torch.float16)


# -- windows and sinks


@pytest.mark.parametrize("window", [1, 2, 5, 15, 16, 17, 31, 33, 64, 10_000])
def test_a_window_over_decodes_chunks_and_fresh_prompts(body, window):
    check(body, Ragged([random_sequence(n, context) for n, context in [(1, 100), (3, 40), (17, 80), (40, 40)]], window))


@pytest.mark.parametrize("chunk", [3, 16, 17])
@pytest.mark.parametrize("window", [5, 40])
def test_chunks_under_a_window_equal_one_prefill_under_it(window, chunk):
    q, k, v = random_sequence(50, 50)
    parts = []
    for start in range(0, 50, chunk):
        end = min(start + chunk, 50)
        parts.append(small_body()(*Ragged([(q[start:end], k[:end], v[:end])], window).inputs))
    assert_close(torch.cat(parts), oracle(q, k, v, window)[0], torch.float32)


@pytest.mark.parametrize("sinks", [1, 4, 33])
@pytest.mark.parametrize("window", [1, 5, 20, 40])
@pytest.mark.parametrize("n, num_keys", [(1, 129), (17, 90), (40, 40), (3, 7)])
def test_a_window_with_sinks(window, sinks, n, num_keys):
    sequence = random_sequence(n, num_keys)
    seen = seen_with_sinks(n, num_keys, window, sinks)[:, None]
    actual = run_kernel(Ragged([sequence], window), small(), sinks=sinks)
    assert_close_to(actual, masked_oracle(*sequence, seen))


def test_keys_between_the_sinks_and_the_window_are_not_read():
    q, k, v = random_sequence(1, 129)
    expected = masked_oracle(q, k, v, seen_with_sinks(1, 129, 20, 4)[:, None])
    k[4:109], v[4:109] = NAN, NAN
    assert_close_to(run_kernel(Ragged([(q, k, v)], 20), SMALL["decode"], sinks=4), expected)


# -- block lists


def random_block_list(sequence, row, share, width):
    """(list, count, seen [n, H, S]): for each tile of queries and K/V head a random choice of key tiles."""
    q, k, _ = sequence
    n, heads, num_keys, kv_heads = len(q), q.shape[1], len(k), k.shape[1]
    queries = queries_per_tile(row, heads // kv_heads)
    tiles = n // queries + 1
    block_list = torch.full((tiles, kv_heads, width), 2**20, dtype=torch.int32)  # read past the count, it leads nowhere
    block_count = torch.zeros(tiles, kv_heads, dtype=torch.int32)
    seen = torch.zeros(n, heads, num_keys, dtype=torch.bool)
    causal = seen_with_sinks(n, num_keys, None, 0)
    for tile in range(math.ceil(n / queries)):
        for kv_head in range(kv_heads):
            chosen = (torch.rand(math.ceil(num_keys / row.block_n)) < share).nonzero().flatten()
            chosen = chosen[torch.randperm(len(chosen))]
            block_list[tile, kv_head, : len(chosen)] = chosen
            block_count[tile, kv_head] = len(chosen)
            keys = (torch.arange(num_keys)[:, None] // row.block_n == chosen).any(1)
            rows = slice(tile * queries, (tile + 1) * queries)
            group = heads // kv_heads
            seen[rows, kv_head * group : (kv_head + 1) * group] = (causal[rows] & keys)[:, None]
    return block_list, block_count, seen


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n, num_keys", [(1, 129), (17, 90), (40, 40)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_list_of_key_tiles(share, n, num_keys, kv_heads):
    sequence = random_sequence(n, num_keys, kv_heads=kv_heads)
    row = small(block_n=16)
    block_list, block_count, seen = random_block_list(sequence, row, share, width=12)
    problem = Ragged([sequence])
    actual = run_kernel(problem, row, block_list=block_list, block_count=block_count)
    assert_close_to(actual, masked_oracle(*sequence, seen))
    if share == 1.0:
        assert_close_to(actual, problem.expected())  # the whole budget is dense attention


def test_tiles_outside_the_list_are_not_read():
    q, k, v = random_sequence(1, 100)
    keys = torch.arange(100) // 16
    expected = masked_oracle(q, k, v, ((keys == 0) | (keys == 6))[None, None])
    k[16:96], v[16:96] = NAN, NAN
    lists = torch.tensor([[[0, 6, 3]]], dtype=torch.int32).expand(1, 2, 3).contiguous()
    counts = torch.full((1, 2), 2, dtype=torch.int32)
    row = small("decode", block_n=16)
    assert_close_to(run_kernel(Ragged([(q, k, v)]), row, block_list=lists, block_count=counts), expected)


# -- 8-bit keys and values


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("phase, n, window", [("prefill", 20, None), ("prefill", 20, 9), ("decode", 1, None)])
def test_8_bit_keys_and_values_with_their_scales(dtype, query_dtype, phase, n, window):
    problem = Ragged([random_sequence(n, context, head_size=24) for context in (33, 70)], window)
    options = quantized(problem, dtype)
    problem.q = problem.q.to(query_dtype)
    problem.sequences = [(q.to(query_dtype), k, v) for q, k, v in problem.sequences]
    assert_close_to(run_kernel(problem, SMALL[phase], **options), problem.expected(), query_dtype)


# -- batches


@pytest.mark.parametrize("window", [None, 9])
def test_a_shuffled_ragged_batch_equals_the_oracle(body, window):
    check(body, Ragged(mixed_sequences(), window))


def test_where_the_blocks_lie_does_not_matter(body):
    sequences = mixed_sequences()
    first, second = Ragged(sequences), Ragged(sequences)
    assert first.tables != second.tables
    torch.testing.assert_close(body(*first.inputs), body(*second.inputs), rtol=0, atol=0)


def test_each_launch_leaves_the_rows_of_the_other_alone():
    problem = Ragged([random_sequence(n, 40) for n in (DECODE_QUERIES + 1, 1, DECODE_QUERIES)])
    expected = problem.expected()
    chunk = slice(0, DECODE_QUERIES + 1)
    out, lse = run_kernel(problem, SMALL["decode"])
    assert out[chunk].isnan().all() and lse[chunk].isnan().all()
    assert_close(out[chunk.stop :], expected[0][chunk.stop :], torch.float32)
    out, _ = run_kernel(problem, SMALL["prefill"], fewest_queries=DECODE_QUERIES + 1)
    assert out[chunk.stop :].isnan().all()
    assert_close(out[chunk], expected[0][chunk], torch.float32)


def test_prefill_in_chunks_equals_prefill_in_one(body):
    q, k, v = random_sequence(40, 40)
    for chunk in (3, B - 1, B, B + 1):
        parts = []
        for start in range(0, 40, chunk):
            end = min(start + chunk, 40)
            parts.append(body(*Ragged([(q[start:end], k[:end], v[:end])]).inputs))
        assert_close(torch.cat(parts), oracle(q, k, v)[0], torch.float32)


def test_a_broken_request_does_not_touch_its_neighbours(body):
    healthy = mixed_sequences()
    q, k, v = random_sequence(1, 30)
    out = body(*Ragged([(q, k * NAN, v * NAN), *healthy, (q, k * torch.inf, v * torch.inf)]).inputs)
    assert_close(out[1:-1], torch.cat([oracle(*sequence)[0] for sequence in healthy]), torch.float32)
    assert out[0].isnan().all()


@pytest.mark.parametrize("n", [1, 3, 19])
def test_nan_that_a_query_sees_is_not_hidden(body, n):
    for broken in (1, 2):  # k, v
        sequence = list(random_sequence(n, 30))
        sequence[broken][0, 1, 3] = NAN
        out = body(*Ragged([tuple(sequence)]).inputs)
        heads = out[:, 2:] if broken == 1 else out[:, 2:, 3]  # those of K/V head 1
        assert heads.isnan().all()
        assert not out[:, :2].isnan().any()


def test_nan_in_tiles_wholly_above_the_diagonal_does_not_reach_the_output():
    """A chunk's pages hold what a longer prompt left there."""
    q, k, v = random_sequence(64, 64)
    expected = oracle(q, k, v)[0]
    k[32:], v[32:] = NAN, NAN
    out = small_body()(*Ragged([(q, k, v)]).inputs)
    assert_close(out[:32], expected[:32], torch.float32)
    assert out[32:].isnan().all()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_padded_row_gives_zero_and_minus_infinity(num_splits):
    """A captured step has more rows than requests: those that are too many have no context at all."""
    problem = Ragged([random_sequence(1, 20), random_sequence(1, 1), random_sequence(1, 50)])
    problem.batch.seq_lens[1] = problem.batch.context_lens[1] = 0
    problem.kv_layer.k[problem.tables[1]], problem.kv_layer.v[problem.tables[1]] = NAN, NAN
    out, lse = small_body(num_splits).attend_with_lse(*problem.inputs)
    expected, _ = problem.expected()
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    assert_close(out[[0, 2]], expected[[0, 2]], torch.float32)


def test_an_empty_batch_is_legal(body):
    pages = torch.full((2, B, 2, 16), NAN)
    out, lse = body.attend_with_lse(
        torch.empty(0, 4, 16),
        torch.empty(0, 2, 16),
        torch.empty(0, 2, 16),
        KVLayer(pages, pages),
        Batch.build([], [], [], B),
    )
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


# -- splits


@pytest.mark.parametrize("num_splits", [2, 3, 7, 16])
@pytest.mark.parametrize("kind", [rising, deep])
@pytest.mark.parametrize("window", [None, 40])
def test_any_number_of_splits_gives_the_same(num_splits, kind, window):
    """16 splits of five tiles: most are empty."""
    sequences = [kind(*random_sequence(n, context)) for n, context in [(1, 129), (2, 33), (1, 1)]]
    check(small_body(num_splits), Ragged(sequences, window))


def test_a_split_is_for_few_requests_with_long_contexts():
    assert choose_num_splits(programs=2, longest_context=65_536, num_sms=108) == 64
    assert choose_num_splits(programs=2, longest_context=100, num_sms=108) == 1
    assert choose_num_splits(programs=256, longest_context=65_536, num_sms=108) == 1
    assert choose_num_splits(programs=16, longest_context=2048, num_sms=132) == 8, "parts of 256 keys"
    assert choose_num_splits(programs=64, longest_context=65_536, num_sms=132) == 8, "two programs per multiprocessor"


# -- memory


@pytest.mark.parametrize("layout", [inside_nan, transposed])
def test_strided_queries_and_pages(body, layout):
    problem = Ragged(mixed_sequences())
    problem.q, problem.k, problem.v = (layout(x) for x in (problem.q, problem.k, problem.v))
    if layout is inside_nan:
        problem.kv_layer.k, problem.kv_layer.v = (inside_nan(x) for x in (problem.kv_layer.k, problem.kv_layer.v))
    check(body, problem)


def test_slices_of_a_fused_projection(body):
    problem = Ragged(mixed_sequences())
    fused = torch.cat([problem.q, problem.k, problem.v], dim=1)  # [T, H + 2 Hkv, D]
    problem.q, problem.k, problem.v = fused.split([4, 2, 2], dim=1)
    check(body, problem)


def test_one_row_with_odd_strides(body):
    problem = Ragged([random_sequence(1, 20, heads=1, kv_heads=1)])
    problem.q = torch.full((100,), NAN)[:16].copy_(problem.q.flatten()).as_strided((1, 1, 16), (77, 55, 1))
    check(body, problem)


@pytest.mark.parametrize("window", [None, 20])
def test_nothing_is_read_or_written_outside_the_tensors(body, monkeypatch, window):
    """The block table too ends with the last block that a context needs: here it is as wide as the last request's."""
    guard = MemoryGuard(monkeypatch)
    for shape in ([(1, 17), (1, 33)], [(17, 20), (20, 33)], [(1, 5), (19, 50), (2, 65)]):
        problem = Ragged([random_sequence(*lengths, head_size=24) for lengths in shape], window)
        guard.watch(*problem.inputs[:3], problem.kv_layer.k, problem.kv_layer.v)
        guard.watch(problem.batch.block_tables, problem.batch.query_start_loc, problem.batch.seq_lens)
        check(body, problem)
    assert not guard.outside


@pytest.mark.parametrize("n, phase", [(17, "prefill"), (1, "decode")])
def test_offsets_into_the_pages_are_64_bit(monkeypatch, n, phase):
    """Block 5 of pages that lie 2^29 values apart is beyond 2^31: where does the kernel go to read it?"""
    far = 2**29
    stretched = Stretched(kernels.paged_attention_kernel, k_block_stride=far, v_block_stride=far)
    monkeypatch.setattr(kernels, "paged_attention_kernel", stretched)
    problem = Ragged([random_sequence(n, B + 1, heads=1, kv_heads=1)])
    q, _, _, layer, batch = problem.inputs
    batch.block_tables[:] = torch.tensor([0, 5])
    guard = MemoryGuard(monkeypatch)
    guard.watch(q, layer.k[0], layer.v[0], batch.block_tables, batch.query_start_loc, batch.seq_lens)
    out, lse = torch.empty(n, 1, 16), torch.empty(n, 1)
    tables = (batch.block_tables, batch.query_start_loc, batch.seq_lens)
    kernels.paged_attention(out, lse, q, layer.k, layer.v, *tables, SMALL[phase])
    starts = [pages.data_ptr() + 5 * far * 4 for pages in (layer.k, layer.v)]
    assert set(guard.outside) == {start + 4 * d for start in starts for d in range(16)}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_offsets_into_the_queries_are_64_bit(monkeypatch, phase):
    stretched = Stretched(kernels.paged_attention_kernel, q_row_stride=2**29)
    monkeypatch.setattr(kernels, "paged_attention_kernel", stretched)
    problem = Ragged([random_sequence(7, 20, heads=1, kv_heads=1)])
    q, _, _, layer, batch = problem.inputs
    guard = MemoryGuard(monkeypatch)
    guard.watch(q[0], layer.k, layer.v, batch.block_tables, batch.query_start_loc, batch.seq_lens)
    out, lse = torch.empty(7, 1, 16), torch.empty(7, 1)
    tables = (batch.block_tables, batch.query_start_loc, batch.seq_lens)
    kernels.paged_attention(out, lse, q, layer.k, layer.v, *tables, SMALL[phase])
    assert set(guard.outside) == {q.data_ptr() + 4 * (row * 2**29 + d) for row in range(1, 7) for d in range(16)}


# -- refusals


def test_heads_that_do_not_divide_are_refused(body):
    problem = Ragged([random_sequence(2, 9)])
    with pytest.raises(ShapeError, match="5 query heads are not a multiple of 2"):
        body(torch.zeros(2, 5, 16), problem.k, problem.v, problem.kv_layer, problem.batch)


def test_pages_with_a_strided_last_axis_are_refused(body):
    problem = Ragged([random_sequence(2, 9)])
    problem.kv_layer.k = transposed(problem.kv_layer.k.flatten(0, 1)).unflatten(0, problem.kv_layer.k.shape[:2])
    with pytest.raises(ShapeError, match="the pages' last axis must be contiguous"):
        body(*problem.inputs)


def test_a_gpu_without_fp8_refuses_fp8_keys():
    with pytest.raises(ConfigError, match=r"need compute capability 8\.9 .*, this GPU has 8\.0; keep them in int8"):
        find_row("paged_attention", (8, 0), 128, "float8_e4m3fn", "decode")
    assert find_row("paged_attention", (8, 9), 128, "float8_e4m3fn", "decode").dtype == "float8_e4m3fn"


def test_a_launch_without_a_row_is_refused():
    with pytest.raises(ConfigError, match="no launch row for prefill with head size 264"):
        find_row("paged_attention", (9, 0), 264, "float16")
    with pytest.raises(ConfigError, match=r"compute capability 7\.5"):
        find_row("paged_attention", (7, 5), 128, "bfloat16")


def test_a_row_is_that_of_the_newest_gpu_not_above_and_of_the_smallest_head_that_fits():
    assert find_row("paged_attention", (8, 7), 80, "float16").compute_capability == (8, 6)
    assert find_row("paged_attention", (8, 7), 80, "float16").head_size == 128
    assert find_row("flash", (12, 1), 8, "bfloat16").head_size == 64
