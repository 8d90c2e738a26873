"""The dense kernel of lesson 08 against the float64 oracle."""

import pytest
import torch

from minillm.attention.triton import attention
from minillm.errors import ShapeError
from minillm.kernels import flash
from minillm.kernels.flash import flash_attention
from tests.kernels.kernel_cases import Stretched, assert_close_to, small
from tests.kernels.memory import MemoryGuard
from tests.unit.attention_cases import NAN, deep, equal, inside_nan, oracle, random_sequence, rising, transposed

ROW = small(kernel="flash")  # 16 queries, 32 keys


def check(q, k, v, row=ROW, dtype=torch.float32):
    out, lse = attention(q, k, v, row=row)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_close_to((out, lse), oracle(q, k, v), dtype)


@pytest.mark.parametrize("n", range(1, ROW.block_m + 2))
def test_every_number_of_queries_up_to_one_more_than_a_tile(n):
    check(*random_sequence(n, 40))


@pytest.mark.parametrize("n", [1, 7, 8, 15, 16, 17, 63, 65, 127, 129])
def test_a_fresh_prompt_and_the_same_prompt_behind_others(n):
    check(*random_sequence(n, n, heads=2, kv_heads=1))
    check(*random_sequence(n, n + 33, heads=2, kv_heads=1))


@pytest.mark.parametrize("block_m, block_n", [(16, 16), (16, 64), (64, 16), (128, 64)])
@pytest.mark.parametrize("n, num_keys", [(33, 50), (50, 50), (3, 70)])
def test_tile_sizes(block_m, block_n, n, num_keys):
    check(*rising(*random_sequence(n, num_keys)), small(block_m=block_m, block_n=block_n, kernel="flash"))


@pytest.mark.parametrize("head_size", [16, 32, 64, 128, 256])
def test_head_sizes(head_size):
    check(*random_sequence(17, 37, head_size=head_size))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8])
def test_groups_of_query_heads_with_distinct_kv_heads(group):
    check(*random_sequence(5, 40, heads=3 * group, kv_heads=3))


@pytest.mark.parametrize("kind", [rising, deep, equal])
@pytest.mark.parametrize("n, num_keys", [(1, 129), (17, 100), (65, 65)])
def test_hard_values(kind, n, num_keys):
    check(*kind(*random_sequence(n, num_keys, heads=6, head_size=32)))


def test_two_queries_at_the_end_of_five_keys_by_hand():
    """The last query sees all five keys (bottom-right); top-left alignment would show it two."""
    q, k = torch.zeros(2, 1, 16), torch.zeros(5, 1, 16)  # all scores are 0: the output is a mean
    v = torch.arange(5.0)[:, None, None].expand(5, 1, 16)
    out, lse = attention(q, k, v, row=ROW)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1.5, 2.0]))
    torch.testing.assert_close(lse[:, 0], torch.tensor([4.0, 5.0]).log())


@pytest.mark.parametrize("num_keys", [0, 1, 5, 20])
def test_a_row_before_the_first_key_gives_zero_and_minus_infinity(num_keys):
    q, k, v = random_sequence(40, num_keys)
    out, lse = attention(q, k, v, row=ROW)
    assert (out[: 40 - num_keys] == 0).all() and (lse[: 40 - num_keys] == -torch.inf).all()
    check(q, k, v)


def test_nan_in_tiles_wholly_above_the_diagonal_does_not_reach_the_output():
    q, k, v = random_sequence(64, 64)
    expected = oracle(q, k, v)
    k[32:], v[32:] = NAN, NAN
    out, lse = attention(q, k, v, row=ROW)
    assert_close_to((out[:32], lse[:32]), [x[:32] for x in expected])
    assert out[32:].isnan().all()


@pytest.mark.parametrize("layout", [inside_nan, transposed])
def test_strided_inputs(layout):
    check(*(layout(x) for x in random_sequence(17, 45)))


def test_slices_of_a_fused_projection():
    q, k, v = torch.randn(21, 8, 16).split([4, 2, 2], dim=1)
    check(q, k, v)


def test_one_row_with_odd_strides_and_keys_expanded_from_one_head():
    q, k, v = random_sequence(1, 30, heads=4, kv_heads=1)
    q = torch.full((100,), NAN)[:64].copy_(q.flatten()).as_strided((1, 4, 16), (77, 16, 1))
    check(q, k.expand(30, 4, 16), v.expand(30, 4, 16))


def test_sequences_of_one_length_in_one_launch():
    sequences = [random_sequence(20, 50) for _ in range(3)]
    out, lse = flash_attention(*(torch.stack(x) for x in zip(*sequences, strict=True)), ROW)
    for i, sequence in enumerate(sequences):
        assert_close_to((out[i], lse[i]), oracle(*sequence))


@pytest.mark.parametrize("n, num_keys", [(1, 100), (40, 40), (17, 65)])
def test_float16_within_its_tolerance(n, num_keys):
    check(*random_sequence(n, num_keys, head_size=64, dtype=torch.float16), dtype=torch.float16)


def test_nothing_is_read_or_written_outside_the_tensors(monkeypatch):
    guard = MemoryGuard(monkeypatch)
    for n, num_keys in [(1, 1), (17, 33), (33, 47), (20, 5)]:
        q, k, v = random_sequence(n, num_keys)
        guard.watch(q, k, v)
        check(q, k, v)
    assert not guard.outside


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_offsets_are_64_bit(monkeypatch, name):
    """Rows that lie 2^29 values apart: where does the kernel go to read row 4 and later ones?"""
    monkeypatch.setattr(
        flash, "flash_attention_kernel", Stretched(flash.flash_attention_kernel, **{f"{name}_row_stride": 2**29})
    )
    tensors = dict(zip("qkv", (torch.randn(1, 7, 1, 16) for _ in range(3)), strict=True))
    guard = MemoryGuard(monkeypatch)
    guard.watch(*(x[:, :1] if key == name else x for key, x in tensors.items()))
    flash_attention(*tensors.values(), ROW)
    start = tensors[name].data_ptr()
    assert set(guard.outside) == {start + 4 * (row * 2**29 + d) for row in range(1, 7) for d in range(16)}


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("num_keys", [0, 5, 50])
def test_a_window_goes_through_the_paged_kernel(window, num_keys):
    q, k, v = random_sequence(20, num_keys)
    assert_close_to(attention(q, k, v, window, row=small()), oracle(q, k, v, window))


@pytest.mark.parametrize("head_size", [8, 24, 80])
def test_head_sizes_that_are_no_power_of_two_go_through_the_paged_kernel(head_size):
    q, k, v = random_sequence(20, 50, head_size=head_size)
    assert_close_to(attention(q, k, v, row=small()), oracle(q, k, v))
    with pytest.raises(ShapeError, match=f"head size {head_size} is not a power of two"):
        flash_attention(q[None], k[None], v[None], ROW)


def test_heads_that_do_not_divide_are_refused():
    q, k, v = random_sequence(4, 9, heads=5, kv_heads=2)
    with pytest.raises(ShapeError, match="5 query heads are not a multiple of 2"):
        attention(q, k, v)
    with pytest.raises(ShapeError, match="5 query heads are not a multiple of 2"):
        flash_attention(q[None], k[None], v[None], ROW)
