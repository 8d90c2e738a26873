"""Windows with sinks and dynamic blocks through the interpreted kernel, against float64 over exactly the kept keys."""

import pytest
import torch

from minillm.attention import sparse
from minillm.attention.sparse.blocks import kept_blocks, mask_of
from minillm.attention.sparse.kernel import BlockListAttention
from minillm.attention.sparse.window import WindowAttention
from minillm.attention.triton import TritonAttention
from minillm.kernels import paged_attention as kernels
from minillm.kernels.paged_attention import queries_per_tile
from minillm.sparse_options import LSH, DynamicBlocks, SlidingWindow
from tests.kernels.kernel_cases import SMALL, assert_close_to, masked_oracle, seen_with_sinks, small
from tests.unit.attention_cases import NAN, Ragged, assert_close, check, random_sequence

B = 16  # block size
FEW = 8  # queries of a small decode tile with two query heads per K/V head
MIXED = [(1, 1), (1, 40), (2, 2), (3, 35), (9, 9), (1, 70), (17, 60), (20, 133)]
ROWS = SMALL | {"prefill": small(block_m=32, block_n=64)}


def mixed_sequences(**shape):
    return [random_sequence(*MIXED[i], **shape) for i in torch.randperm(len(MIXED)).tolist()]


def window_body(window, sinks, num_splits=1):
    dense = TritonAttention(torch.float32, "cpu", SMALL, num_splits, sinks)
    return WindowAttention(SlidingWindow(window, sinks), dense)


def blocks_body(**options):
    return BlockListAttention(DynamicBlocks(**options), torch.float32, "cpu", rows=ROWS, num_splits=1)


def expected_with_sinks(problem, window, sinks):
    masks = [seen_with_sinks(len(q), len(k), window, sinks)[:, None] for q, k, _ in problem.sequences]
    parts = [masked_oracle(*sequence, seen) for sequence, seen in zip(problem.sequences, masks, strict=True)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def expected_of_blocks(problem, options):
    """Short requests dense; the others over the blocks chosen for the kernel's tiles of queries."""
    parts = []
    for q, k, v in problem.sequences:
        edges = [*range(0, len(q), queries_per_tile(ROWS["prefill"], 2)), len(q)]
        seen = mask_of(kept_blocks(options, q, k, edges, problem.window), q, k, edges, options.block, problem.window)
        if len(q) <= FEW:
            seen = seen_with_sinks(len(q), len(k), problem.window, 0).expand(q.shape[1], -1, -1)
        parts.append(masked_oracle(q, k, v, seen.transpose(0, 1)))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


# -- windows


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window, sinks", [(1, 1), (5, 3), (20, 40), (33, 0), (64, 4)])
def test_a_window_with_sinks_over_decodes_and_chunks(window, sinks, num_splits):
    problem = Ragged(mixed_sequences())
    actual = window_body(window, sinks, num_splits).attend_with_lse(*problem.inputs)
    assert_close_to(actual, expected_with_sinks(problem, window, sinks))


def test_the_kernel_s_switch_equals_the_sinks_that_are_merged_in_by_pytorch():
    problem = Ragged(mixed_sequences())
    merged = WindowAttention(SlidingWindow(12, 5), TritonAttention(torch.float32, "cpu", SMALL, 1))
    for ours, theirs in zip(
        window_body(12, 5).attend_with_lse(*problem.inputs), merged.attend_with_lse(*problem.inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_sinks_of_the_body_touch_no_layer_without_a_window():
    check(TritonAttention(torch.float32, "cpu", SMALL, 1, sinks=4), Ragged(mixed_sequences()))


def test_a_window_as_wide_as_the_context_is_dense():
    check(window_body(133, 4), Ragged(mixed_sequences()))


@pytest.mark.parametrize("chunk", [3, 16, 17])
def test_chunks_under_a_window_with_sinks_equal_one_prefill(chunk):
    q, k, v = random_sequence(50, 50)
    parts = []
    for start in range(0, 50, chunk):
        end = min(start + chunk, 50)
        parts.append(window_body(9, 3)(*Ragged([(q[start:end], k[:end], v[:end])]).inputs))
    assert_close(torch.cat(parts), expected_with_sinks(Ragged([(q, k, v)]), 9, 3)[0], torch.float32)


# -- blocks


@pytest.mark.parametrize(
    "options",
    [{"mass": 0.6, "block": 16}, {"top": 3, "block": 16}, {"mass": 0.5, "block": 32}, {"top": 2, "block": 128}],
)
@pytest.mark.parametrize("window", [None, 40])
def test_dynamic_blocks_over_a_shuffled_batch(options, window):
    problem = Ragged(mixed_sequences(), window)
    actual = blocks_body(**options).attend_with_lse(*problem.inputs)
    assert_close_to(actual, expected_of_blocks(problem, DynamicBlocks(**options)))


@pytest.mark.parametrize("options", [{"mass": 1.0, "block": 16}, {"top": 100, "block": 64}])
@pytest.mark.parametrize("window", [None, 9])
def test_a_whole_budget_is_dense(options, window):
    check(blocks_body(**options), Ragged(mixed_sequences(), window))


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (3, 3), (9, 3)])
def test_groups(heads, kv_heads):
    problem = Ragged([random_sequence(40, 90, heads=heads, kv_heads=kv_heads)])
    options = DynamicBlocks(top=2, block=16)
    (q, k, v), (row, group) = problem.sequences[0], (ROWS["prefill"], heads // kv_heads)
    edges = [*range(0, 40, queries_per_tile(row, group)), 40]
    seen = mask_of(kept_blocks(options, q, k, edges), q, k, edges, 16)
    assert_close_to(
        blocks_body(top=2, block=16).attend_with_lse(*problem.inputs), masked_oracle(q, k, v, seen.transpose(0, 1))
    )


def test_blocks_that_are_not_kept_are_not_read():
    q, k, v = random_sequence(16, 128, heads=2, kv_heads=1)
    options = DynamicBlocks(top=3, block=16)
    kept = kept_blocks(options, q, k, [0, 16])[0, 0]
    seen = mask_of(kept[None, None], q, k, [0, 16], 16)
    expected = masked_oracle(q, k, v, seen.transpose(0, 1))
    v = torch.where(kept.repeat_interleave(16)[:, None, None], v, NAN)
    assert_close_to(blocks_body(top=3, block=16).attend_with_lse(*Ragged([(q, k, v)]).inputs), expected)


# -- what is visited and what is chosen


class CountedTile:
    """`attend_tile`, which counts how often the interpreter enters it."""

    def __init__(self):
        self.real, self.visits = kernels.attend_tile, 0

    def __call__(self, *args, **options):
        self.visits += 1
        return self.real(*args, **options)


def visits(monkeypatch, attend, n):
    counted = CountedTile()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "attend_tile", counted)
        attend(*Ragged([random_sequence(n, n, heads=1, kv_heads=1)]).inputs)
    return counted.visits


def test_key_tiles_of_a_window_grow_as_n_times_w(monkeypatch):
    """Tiles of 32 queries and 32 keys, W = 32 t: each tile of queries visits t + 1 tiles and one of sinks."""
    for n, t in [(256, 1), (512, 1), (256, 3)]:
        tiles = n // 32
        expected = sum(min(tile + 1, t + 1 + 1) for tile in range(tiles))
        assert visits(monkeypatch, window_body(32 * t, 4), n) == expected
    dense = TritonAttention(torch.float32, "cpu", SMALL, 1)
    assert visits(monkeypatch, dense, 256) == 8 * 9 // 2


def test_key_tiles_of_a_block_list_are_those_that_were_kept(monkeypatch):
    assert visits(monkeypatch, blocks_body(top=2, block=64), 256) == 2 + 6 * 2
    assert visits(monkeypatch, blocks_body(mass=1.0, block=64), 256) == sum(tile // 2 + 1 for tile in range(8))


def test_on_a_gpu_window_and_blocks_go_to_the_kernel_and_hashing_to_pytorch():
    dense, device = TritonAttention(torch.float32, "cpu"), torch.device("cpu")
    body, reason = sparse.make_sparse(SlidingWindow(64, 4), device, torch.float32, dense, "triton: ours")
    assert reason == "sliding_window(window=64, sinks=4), as asked: prefill and decode, by triton"
    problem = Ragged(mixed_sequences())
    assert_close_to(body.attend_with_lse(*problem.inputs), expected_with_sinks(problem, 64, 4))
    body, reason = sparse.make_sparse(DynamicBlocks(mass=1), device, torch.float32, dense, "triton: ours")
    assert isinstance(body, BlockListAttention) and "by triton over lists of key tiles" in reason
    check(body, problem)
    _, reason = sparse.make_sparse(LSH(), device, torch.float32, dense, "triton: ours")
    assert "prefill by PyTorch; decode dense by triton" in reason
