"""Prefill on a processor: tiles by the library and by plain products, against the row-by-row oracle."""

import pytest
import torch

from minillm.attention import CPUAttention, cpu_prefill
from minillm.attention.cpu_prefill import by_library, by_products, choose_prefill, without_bias
from tests.tolerances import PREFILL_BF16
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

BF16 = torch.bfloat16


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles in a small problem, and products for all of them."""
    for name, value in (("LIBRARY_TILE", 16), ("PRODUCT_TILE", 16), ("FEWEST_SCORES", 0)):
        monkeypatch.setattr(cpu_prefill, name, value)


@pytest.fixture
def always_products(monkeypatch):
    monkeypatch.setattr(cpu_prefill, "FEWEST_SCORES", 0)


def check(prefill, q, k, v, window=None):
    expected, expected_lse = oracle(q, k, v, window)
    out, lse = prefill(q, k, v, window)
    assert out.dtype == q.dtype
    assert_close(out, expected, q.dtype)
    assert_close(lse, expected_lse, q.dtype)
    without, _ = prefill(q, k, v, window, with_lse=False)
    assert_close(without, expected, q.dtype)


@pytest.mark.parametrize("prefill", [by_library, by_products])
@pytest.mark.parametrize("n, num_keys", [(1, 1), (1, 40), (15, 15), (16, 16), (17, 17), (33, 33), (16, 50), (33, 100)])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 40])
@pytest.mark.usefixtures("small_tiles")
def test_every_tile_sees_its_own_keys(prefill, n, num_keys, window):
    check(prefill, *random_sequence(n, num_keys), window)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (2, 2), (3, 1), (9, 3), (10, 2)])
@pytest.mark.parametrize("head_size", [8, 64, 80])
@pytest.mark.usefixtures("small_tiles")
def test_heads_share_their_own_keys(heads, kv_heads, head_size):
    check(by_products, *random_sequence(20, 37, heads, kv_heads, head_size))


@pytest.mark.parametrize("values", [rising, deep, equal])
@pytest.mark.parametrize("layout", [inside_nan, transposed])
@pytest.mark.usefixtures("small_tiles")
def test_values_and_layouts_that_broke_others(values, layout):
    check(by_products, *(layout(x) for x in values(*random_sequence(40, 61))))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.usefixtures("always_products")
def test_bfloat16_stays_within_its_tolerance(window):
    check(by_products, *random_sequence(200, 300, 9, 3, 64, BF16), window)


@pytest.mark.parametrize("prefill", [by_library, by_products])
@pytest.mark.parametrize("n, num_keys", [(200, 200), (130, 500)])
@pytest.mark.usefixtures("always_products")
def test_both_ways_stay_as_close_as_their_row_of_the_table_says(prefill, n, num_keys):
    q, k, v = random_sequence(n, num_keys, 9, 3, 64, BF16)
    expected, _ = oracle(3 * q, k, v)
    out, _ = prefill(3 * q, k, v)
    assert relative_error(out, expected) < PREFILL_BF16[prefill.__name__]


def relative_error(out, expected):
    return float((out.double() - expected).norm() / expected.norm())


def test_a_bias_of_some_channels_is_taken_out_and_no_other_channel_is_touched():
    k = torch.randn(300, 3, 16).to(BF16)
    k[:, 1, 5] += 100
    left, bias = without_bias(k)
    assert (bias != 0).nonzero().tolist() == [[1, 5]] and bias[1, 5] == pytest.approx(100, abs=1)
    touched = left != k
    assert touched[:, 1, 5].all() and touched.sum() == 300
    torch.testing.assert_close(left.float() + bias, k.float(), rtol=0, atol=0.02)


def test_a_first_key_unlike_the_others_hides_no_bias():
    k = torch.randn(300, 3, 16).to(BF16)
    k[1:, 1, 5] += 100
    _, bias = without_bias(k)
    assert (bias != 0).nonzero().tolist() == [[1, 5]]


@pytest.mark.usefixtures("always_products")
def test_a_large_bias_of_all_keys_costs_no_precision():
    """Scores near 300, where neighbouring bfloat16 numbers are 2 apart: rounded there, the weights would be noise."""
    q, k, v = random_sequence(200, 200, 9, 3, 64)
    direction = torch.ones(64)
    q, k, v = (x.to(BF16) for x in (direction + 0.2 * q, 37 * direction + 0.5 * k, v))
    expected, _ = oracle(q, k, v)
    out, _ = by_products(q, k, v)
    library, _ = by_library(q, k, v)
    assert relative_error(out, expected) < 4 * relative_error(library, expected) < 0.02


@pytest.mark.usefixtures("small_tiles")
def test_values_after_a_tile_are_not_read():
    q, k, v = random_sequence(40, 60)
    expected, _ = oracle(q, k, v)
    v[36:] = NAN  # queries 0..15 stand at positions 20..35
    out, _ = by_products(q, k, v)
    assert_close(out[:16], expected[:16], torch.float32)
    assert out[16:].isnan().all()


def test_few_scores_go_to_the_library(monkeypatch):
    monkeypatch.setattr(torch, "bmm", None)
    check(by_products, *random_sequence(255, 257))
    with pytest.raises(TypeError):
        by_products(*random_sequence(256, 256))


@pytest.mark.parametrize(
    "dtype, features, chosen",
    [
        (torch.float32, {"_is_avx512_bf16_supported"}, by_library),
        (BF16, {"_is_avx512_bf16_supported"}, by_products),
        (BF16, {"_is_avx512_bf16_supported", "_is_amx_tile_supported"}, by_library),
        (BF16, set(), by_library),
    ],
)
def test_the_processor_decides(monkeypatch, dtype, features, chosen):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name in features, raising=False)
    prefill, reason = choose_prefill(dtype)
    assert prefill is chosen and "prefill" in reason
    assert reason in CPUAttention(dtype, use_numba=False).reason


def test_an_old_pytorch_without_these_questions_takes_the_library(monkeypatch):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert choose_prefill(BF16)[0] is by_library


@pytest.mark.usefixtures("small_tiles")
def test_a_batch_of_chunks_and_decodes_by_products(monkeypatch):
    monkeypatch.setattr(cpu_prefill, "_has", lambda feature: feature == "_is_avx512_bf16_supported")
    attend = CPUAttention(BF16)
    problem = Ragged([random_sequence(*sizes, 9, 3, 64, BF16) for sizes in ((40, 40), (1, 70), (20, 90), (1, 1))])
    expected, expected_lse = problem.expected()
    out, lse = attend.attend_with_lse(*problem.inputs)
    assert_close(out, expected, BF16)
    assert_close(lse, expected_lse, BF16)
    assert_close(attend(*problem.inputs), expected, BF16)
