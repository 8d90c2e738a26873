"""Sparse attention against its definition: the kept keys by loops, then float64 attention over exactly those."""

import math
from dataclasses import replace

import pytest
import torch

from minillm.attention import choose_attention, cpu_plan, cpu_prefill, sparse
from minillm.attention.sparse.blocks import DynamicBlockAttention, aligned_edges, kept_blocks
from minillm.attention.sparse.lsh import LSHAttention
from minillm.errors import ShapeError
from minillm.sparse_options import LSH, DynamicBlocks, SlidingWindow, parse
from tests.unit.attention_cases import (
    NAN,
    Ragged,
    assert_close,
    deep,
    equal,
    inside_nan,
    oracle,
    random_sequence,
    rising,
    transposed,
)

WINDOWS = ["sliding_window(1)", "sliding_window(5, sinks=3)", "sliding_window(20, sinks=40)", "sliding_window(33)"]
BLOCKS = ["dynamic_blocks(mass=0.6, block=16)", "dynamic_blocks(top=3, block=16)", "dynamic_blocks(mass=0.3, block=32)"]
HASHES = [
    "lsh(rounds=3, bucket=8, buckets=4)",
    "lsh(rounds=1, bucket=500, buckets=2)",
    "lsh(bucket=3, sinks=5, seed=5)",
]
SPARSE = [*WINDOWS, *BLOCKS, *HASHES]
WHOLE = ["sliding_window(10000)", "sliding_window(10000, sinks=4)", "dynamic_blocks(mass=1, block=16)"]
WHOLE += ["dynamic_blocks(top=1000, block=16)", "lsh(rounds=1, bucket=10000, buckets=1)"]
MIXED = [(1, 1), (1, 40), (2, 2), (3, 35), (40, 40), (1, 70), (17, 60), (20, 133)]


def attention_over(q, k, v, seen):
    """(out [n, H, D], lse [n, H]) in float64, row by row, where query i of head h sees the keys seen [H, n, S]."""
    q, k, v = q.double(), k.double(), v.double()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for row in range(len(q)):
        for head in range(q.shape[1]):
            keys = seen[head, row].nonzero().flatten()
            if len(keys):
                scores = (k[keys, head // group] @ q[row, head]) / q.shape[2] ** 0.5
                out[row, head] = scores.softmax(0) @ v[keys, head // group]
                lse[row, head] = scores.logsumexp(0)
    assert out.isfinite().all(), "the reference itself must be finite"
    return out, lse


def seen_by_window(options, q, k, window):
    seen = torch.zeros(q.shape[1], len(q), len(k), dtype=torch.bool)
    widths = [width for width in (options.window, window) if width is not None]
    for row in range(len(q)):
        position = len(k) - len(q) + row
        for key in range(position + 1):
            near = not widths or position - key < min(widths)
            seen[:, row, key] = near or key < options.sinks
    return seen


def seen_by_blocks(options, q, k, window):
    """The choice written out: blocks counted from the first token, one list per block of queries and K/V head."""
    n, num_keys, block = len(q), len(k), options.block
    group = q.shape[1] // k.shape[1]
    seen = torch.zeros(q.shape[1], n, num_keys, dtype=torch.bool)
    positions = list(range(num_keys - n, num_keys))
    for number in sorted({p // block for p in positions}):
        rows = [row for row, p in enumerate(positions) if p // block == number]
        for kv_head in range(k.shape[1]):
            legal = list(range(number + 1))
            if window is not None:
                oldest = positions[rows[0]] - window + 1
                legal = [b for b in legal if (b + 1) * block > oldest]
            total = torch.zeros(len(legal), dtype=torch.float64)
            for head in range(kv_head * group, (kv_head + 1) * group):
                pooled = q[rows, head].double().mean(0)
                scores = []
                for b in legal:
                    keys = k[b * block : (b + 1) * block, kv_head].double()
                    scores.append(float(keys.mean(0) @ pooled) / q.shape[2] ** 0.5 + math.log(len(keys)))
                total += torch.tensor(scores, dtype=torch.float64).softmax(0) / group
            forced = [i for i, b in enumerate(legal) if b in (0, number)]
            rest = sorted((i for i in range(len(legal)) if i not in forced), key=lambda i: -total[i])
            kept, mass = [], 0.0
            for i in sorted(forced, key=lambda i: -total[i]) + rest:
                enough = len(kept) >= options.top if options.top else options.mass < 1 and mass >= options.mass
                if i in forced or not enough:
                    kept.append(i)
                mass += float(total[i])
            for row in rows:
                for key in range(positions[row] + 1):
                    near = window is None or positions[row] - key < window
                    heads = slice(kv_head * group, (kv_head + 1) * group)
                    seen[heads, row, key] = near and any(legal[i] == key // block for i in kept)
    return seen


def seen_by_hash(options, q, k, window):
    """Of every round the latest `bucket` keys that point most along the same direction as the query; and itself."""
    group = q.shape[1] // k.shape[1]
    seen = torch.zeros(q.shape[1], len(q), len(k), dtype=torch.bool)
    directions = LSHAttention(options).directions(q.shape[2])

    def bucket(x, turn):
        if options.buckets == 1:
            return 0
        along = [float(x.double() @ d.double()) for d in directions[turn].T]
        both = along + [-a for a in along]
        return both.index(max(both))

    for turn in range(options.rounds):
        key_buckets = [[bucket(k[key, j], turn) for key in range(len(k))] for j in range(k.shape[1])]
        for row in range(len(q)):
            position = len(k) - len(q) + row
            for head in range(q.shape[1]):
                own = bucket(q[row, head], turn)
                same = [key for key in range(position + 1) if key_buckets[head // group][key] == own]
                seen[head, row, same[-options.bucket :]] = True
                seen[head, row, position] = True
                seen[head, row, : min(options.sinks, position + 1)] = True
    if window is not None:
        seen &= seen_by_window(SlidingWindow(window), q, k, None)
    return seen


DEFINITIONS = {SlidingWindow: seen_by_window, DynamicBlocks: seen_by_blocks, LSH: seen_by_hash}


def expected_of(text, problem, ties=False):
    """Decode rows are dense under the methods that are for prefill. Where scores tie, rounding chooses the blocks."""
    options = parse(text)
    outs, lses = [], []
    for q, k, v in problem.sequences:
        if len(q) == 1 and not isinstance(options, SlidingWindow):
            out, lse = oracle(q, k, v, problem.window)
        else:
            seen = sparse.seen_keys(options, q, k, problem.window)
            assert ties or torch.equal(seen, DEFINITIONS[type(options)](options, q, k, problem.window))
            out, lse = attention_over(q, k, v, seen)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def check(text, problem, dtype=torch.float32, ties=False):
    attend, _ = choose_attention("cpu", dtype, text)
    out, lse = attend.attend_with_lse(*problem.inputs)
    expected, expected_lse = expected_of(text, problem, ties)
    assert out.dtype == dtype
    assert_close(out, expected, dtype)
    assert_close(lse, expected_lse, dtype)
    torch.testing.assert_close(attend(*problem.inputs), out, rtol=0, atol=0)


def mixed_sequences(**shape):
    return [random_sequence(*MIXED[i], **shape) for i in torch.randperm(len(MIXED)).tolist()]


# -- equal to the definition


@pytest.mark.parametrize("text", SPARSE)
def test_a_shuffled_ragged_batch_equals_attention_over_the_kept_keys(text):
    check(text, Ragged(mixed_sequences()))


@pytest.mark.parametrize("text", [WINDOWS[1], *BLOCKS[:2], HASHES[0]])
@pytest.mark.parametrize("window", [3, 20, 64])
def test_a_window_of_the_model_s_own_narrows_every_method(text, window):
    check(text, Ragged([random_sequence(n, context) for n, context in [(1, 100), (3, 40), (17, 80), (40, 40)]], window))


def test_a_window_of_the_model_s_own_gets_sinks_and_other_layers_stay_dense():
    sequences = mixed_sequences()
    check("sliding_window(sinks=3)", Ragged(sequences, 6))
    problem = Ragged(sequences)
    attend, _ = choose_attention("cpu", torch.float32, "sliding_window(sinks=3)")
    assert_close(attend(*problem.inputs), problem.expected()[0], torch.float32)


@pytest.mark.parametrize("text", [WINDOWS[1], BLOCKS[0], HASHES[0]])
@pytest.mark.parametrize("n", [1, 7, 8, 15, 16, 17, 63, 65])
def test_lengths_around_the_blocks(text, n):
    check(text, Ragged([random_sequence(n, n, heads=2, kv_heads=1), random_sequence(n, n + 33, heads=2, kv_heads=1)]))


@pytest.mark.parametrize("text", [WINDOWS[1], BLOCKS[0], HASHES[0]])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_groups_of_query_heads_with_distinct_kv_heads(text, group):
    check(text, Ragged([random_sequence(n, 50, heads=3 * group, kv_heads=3) for n in (1, 2, 20)]))


@pytest.mark.parametrize("text", [WINDOWS[1], BLOCKS[0], HASHES[0]])
@pytest.mark.parametrize("kind", [rising, deep, equal])
def test_hard_values(text, kind):
    check(text, Ragged([kind(*random_sequence(n, 70, head_size=32)) for n in (1, 3, 50)]), ties="blocks" in text)


@pytest.mark.parametrize("text", [WINDOWS[1], BLOCKS[1], HASHES[0]])
@pytest.mark.parametrize("block_size", [1, 4, 48])
def test_block_sizes_of_the_cache(text, block_size):
    check(text, Ragged(mixed_sequences(), block_size=block_size))


@pytest.mark.parametrize("text", [WINDOWS[1], BLOCKS[0], HASHES[0]])
@pytest.mark.parametrize("layout", [inside_nan, transposed])
def test_strided_inputs(text, layout):
    problem = Ragged(mixed_sequences())
    problem.q, problem.k, problem.v = (layout(x) for x in (problem.q, problem.k, problem.v))
    if layout is inside_nan:
        problem.kv_layer.k, problem.kv_layer.v = (inside_nan(x) for x in (problem.kv_layer.k, problem.kv_layer.v))
    check(text, problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", WINDOWS[:3])
def test_half_types_within_their_tolerance(text, dtype):
    check(text, Ragged(mixed_sequences(dtype=dtype)), dtype)


@pytest.mark.parametrize("text", WHOLE)
@pytest.mark.parametrize("window", [None, 9])
def test_a_whole_budget_is_dense_attention(text, window):
    problem = Ragged(mixed_sequences(), window)
    attend, _ = choose_attention("cpu", torch.float32, text)
    expected, expected_lse = problem.expected()
    if "sinks" in text and window is not None:
        return check(text, problem)  # the sinks are more than the model's own window shows
    out, lse = attend.attend_with_lse(*problem.inputs)
    assert_close(out, expected, torch.float32)
    assert_close(lse, expected_lse, torch.float32)


def test_sinks_that_the_window_sees_anyway_are_counted_once_by_hand():
    """All scores 0, value = position: a row at 3 with W = 3 and two sinks sees 0 | 1 2 3, the mean is 1.5."""
    q, k = torch.zeros(5, 1, 8), torch.zeros(5, 1, 8)
    v = torch.arange(5.0)[:, None, None].expand(5, 1, 8).contiguous()
    attend, _ = choose_attention("cpu", torch.float32, "sliding_window(3, sinks=2)")
    out, lse = attend.attend_with_lse(*Ragged([(q, k, v)]).inputs)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0]))
    torch.testing.assert_close(lse[:, 0].exp(), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))


def test_a_window_of_four_by_hand():
    q, k = torch.zeros(6, 1, 8), torch.zeros(6, 1, 8)
    v = torch.arange(6.0)[:, None, None].expand(6, 1, 8).contiguous()
    attend, _ = choose_attention("cpu", torch.float32, "sliding_window(2, sinks=1)")
    out = attend(*Ragged([(q, k, v)]).inputs)[:, 0, 0]
    torch.testing.assert_close(out, torch.tensor([0.0, 0.5, 1.0, 5 / 3, 7 / 3, 3.0]))


# -- what is chosen


def test_blocks_that_look_like_the_query_are_kept_with_the_sink_and_the_diagonal():
    """Keys of block 3 point along the queries, all others away from them: 0, 3 and the diagonal are what counts."""
    q, k, _ = random_sequence(16, 128, heads=1, kv_heads=1)
    q, k = 0.01 * q + 1.0, 0.01 * k - 1.0
    k[48:64] += 2.0
    for options in (DynamicBlocks(top=3, block=16), DynamicBlocks(mass=0.5, block=16)):
        (kept,) = kept_blocks(options, q, k, [0, 16])[:, 0]
        assert kept.nonzero().flatten().tolist() == [0, 3, 7]


def test_more_mass_keeps_the_same_blocks_and_more():
    q, k, _ = random_sequence(100, 200)
    edges = aligned_edges(100, 100, 16)
    before = torch.zeros(1, dtype=torch.bool)
    for mass in (0.1, 0.4, 0.7, 0.9, 1.0):
        kept = kept_blocks(DynamicBlocks(mass=mass, block=16), q, k, edges)
        assert (kept | ~before).all()
        before = kept
    assert kept.sum() == sum(kept.shape[1] * ((100 + edge - 1) // 16 + 1) for edge in edges[1:])


@pytest.mark.parametrize("first, n", [(0, 40), (5, 40), (16, 16), (31, 1), (15, 2)])
def test_blocks_of_queries_begin_at_multiples_of_the_block(first, n):
    edges = aligned_edges(n, first, 16)
    owner = [sum(row >= edge for edge in edges) for row in range(n)]
    same = [(first + a) // 16 == (first + a + 1) // 16 for a in range(n - 1)]
    assert [owner[a] == owner[a + 1] for a in range(n - 1)] == same
    assert edges[0] == 0 and edges[-1] == n


def test_vectors_of_one_direction_share_their_bucket_whatever_their_length():
    method = LSHAttention(LSH(rounds=8, buckets=16))
    x = torch.randn(10, 2, 16)
    assert torch.equal(method.buckets(x), method.buckets(3.7 * x))
    half = 8
    assert torch.equal((method.buckets(x) + half) % 16, method.buckets(-x))


# -- what is read


@pytest.mark.parametrize("text, first, last", [("sliding_window(20, sinks=4)", 4, 109), ("sliding_window(20)", 0, 109)])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_no_key_between_the_sinks_and_the_window_reaches_the_output(text, first, last, n):
    q, k, v = random_sequence(n, 128 + n)
    expected = expected_of(text, Ragged([(q, k, v)]))
    k[first:last], v[first:last] = NAN, NAN
    attend, _ = choose_attention("cpu", torch.float32, text)
    assert_close(attend(*Ragged([(q, k, v)]).inputs), expected[0], torch.float32)


def test_blocks_that_are_not_kept_are_not_read():
    q, k, v = random_sequence(16, 128, heads=2, kv_heads=1)
    attend = DynamicBlockAttention(DynamicBlocks(top=3, block=16))
    kept = kept_blocks(attend.options, q, k, [0, 16])[0, 0]
    expected = attention_over(q, k, v, attend.seen_keys(q, k))[0]
    v = torch.where(kept.repeat_interleave(16)[:, None, None], v, NAN)
    assert_close(attend(q, k, v)[0], expected, torch.float32)


@pytest.mark.parametrize("text", [BLOCKS[0], HASHES[0]])
def test_nan_after_a_query_does_not_reach_it(text):
    q, k, v = random_sequence(64, 64)
    attend, _ = choose_attention("cpu", torch.float32, text)
    expected = attend(*Ragged([(q, k, v)]).inputs)
    v[32:] = NAN
    out = attend(*Ragged([(q, k, v)]).inputs)
    assert_close(out[:32], expected[:32].double(), torch.float32)
    assert out[32:].isnan().any()


def keys_read(monkeypatch, text, n):
    """Query x key pairs that a prefill of n tokens computes in library calls, in tiles of 64 queries."""
    monkeypatch.setattr(cpu_prefill, "LIBRARY_TILE", 64)
    pairs = []
    real = cpu_prefill.library_attention

    def counted(q, k, v, mask=None, causal=False, **options):
        pairs.append(len(q) * len(k))
        return real(q, k, v, mask, causal, **options)

    monkeypatch.setattr(cpu_prefill, "library_attention", counted)
    attend, _ = choose_attention("cpu", torch.float32, text)
    attend(*Ragged([random_sequence(n, n, heads=1, kv_heads=1, head_size=8)]).inputs)
    return sum(pairs)


def test_the_work_of_a_window_grows_as_n_times_w(monkeypatch):
    """A tile of 64 queries reads 64 + W - 1 keys, the first ones fewer; dense reads n x n of them, a mask apart."""

    def counted(n, window):
        return keys_read(monkeypatch, f"sliding_window({window}, sinks=4)", n)

    for n, window in [(512, 64), (1024, 64), (1024, 128), (2048, 128)]:
        full = 64 * (64 + window - 1)  # of a tile whose window does not reach the first key
        first = sum(64 * (64 * (tile + 1)) for tile in range(window // 64))
        assert counted(n, window) == first + full * (n // 64 - window // 64)
    grown = [counted(n, 64) for n in (512, 1024, 1536)]
    assert grown[2] - grown[1] == grown[1] - grown[0]  # a straight line in n
    assert keys_read(monkeypatch, "auto", 2048) == 2048**2


def test_a_decode_under_a_window_reads_the_window(monkeypatch):
    """Both decode paths take their keys from these reads."""
    problem = Ragged([random_sequence(1, context) for context in (10, 200)], 32)
    reads, _ = cpu_plan.split_batch(problem.batch, 32, 1)
    assert [read.stop - read.start for read in reads] == [10, 32]


def test_nothing_but_the_output_is_written():
    for text in (WINDOWS[1], BLOCKS[0], HASHES[0]):
        problem = Ragged(mixed_sequences())
        tensors = [problem.q, problem.k, problem.v, problem.kv_layer.k, problem.kv_layer.v, problem.batch.block_tables]
        before = [tensor.clone() for tensor in tensors]
        choose_attention("cpu", torch.float32, text)[0](*problem.inputs)
        for tensor, copy in zip(tensors, before, strict=True):
            torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)
        assert problem.kv_layer.window is None


# -- edges


@pytest.mark.parametrize("text", [WINDOWS[1], BLOCKS[0], HASHES[0]])
def test_padding_rows_of_nobody_do_not_disturb_a_request(text):
    sequence = random_sequence(20, 40)
    attend, _ = choose_attention("cpu", torch.float32, text)
    alone = attend(*Ragged([sequence]).inputs)
    problem = Ragged([sequence, random_sequence(7, 7)])
    problem.batch.slot_mapping[20:] = -1
    assert_close(attend(*problem.inputs)[:20], alone.double(), torch.float32)


def test_more_queries_than_keys_are_refused_by_blocks_and_blind_rows_are_zero_under_lsh():
    q, k, v = random_sequence(8, 5)
    with pytest.raises(ShapeError, match="8 queries cannot end a context of 5"):
        DynamicBlockAttention(DynamicBlocks(mass=1))(q, k, v)
    out, lse = LSHAttention(LSH())(q, k, v)
    assert (out[:3] == 0).all() and (lse[:3] == -torch.inf).all() and lse[3:].isfinite().all()


@pytest.mark.parametrize("text", [WINDOWS[1], BLOCKS[0], HASHES[0]])
def test_an_empty_batch_is_legal(text):
    problem = Ragged([random_sequence(1, 3)])
    attend, _ = choose_attention("cpu", torch.float32, text)
    q, k, v, layer, _ = problem.inputs
    empty = type(problem.batch).build([], [], [], 16)
    out, lse = attend.attend_with_lse(q[:0], k[:0], v[:0], replace(layer), empty)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)
