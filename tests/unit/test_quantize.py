"""Codes and scales against their definition, written out in float64 one weight at a time."""

import pytest
import torch

from minillm.errors import ConfigError
from minillm.quantize import (
    INT4_GROUPS,
    ChannelQuantized,
    GroupQuantized,
    PackedInt4,
    int4_group,
    round_rows,
    round_to_int4,
)

FP8 = torch.float8_e4m3fn
# e4m3 by its definition: sign, 4 bits of exponent with a bias of 7, 3 of mantissa; 0x7F and 0xFF are NaN.
POSITIVE = [(m / 8) * 2.0**-6 for m in range(8)] + [
    (1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)
]
E4M3 = torch.tensor(sorted({-x for x in POSITIVE[:-1]} | set(POSITIVE[:-1])), dtype=torch.float64)


def uneven(n, k):
    """Weights whose groups of 32 and rows differ widely in size and in where they lie."""
    size = torch.logspace(-3, 1, k // 32).repeat_interleave(32) * torch.logspace(-1, 1, n)[:, None]
    return torch.randn(n, k) * size + torch.randn(n, k // 32).repeat_interleave(32, dim=1)


def by_hand(weight):
    """Every weight of a GroupQuantized from its own code, scale and minimum."""
    n, k = weight.codes.shape
    group = k // weight.scale.shape[1]
    rows = [
        [float(weight.codes[i, j]) * float(weight.scale[i, j // group]) + float(weight.minimum[i, j // group])]
        for i in range(n)
        for j in range(k)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(n, k)


# ---- int4 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k, group", [(32, 32), (96, 32), (64, 64), (192, 64), (128, 128), (384, 128)])
def test_int4_is_off_by_half_a_step_of_its_own_group_at_most(k, group):
    w = uneven(6, k)
    rounded = round_to_int4([w])
    assert rounded.group == group == int4_group(k) and rounded.codes.dtype == torch.uint8
    grouped = w.double().view(6, -1, group)
    step = (grouped.amax(-1) - grouped.amin(-1)) / 15
    off = (by_hand(rounded) - w.double()).abs().view(6, -1, group)
    assert (off <= step[..., None] * 0.5 * (1 + 1e-5) + 1e-6 * grouped.abs().amax(-1)[..., None]).all()
    # All 16 levels are in use: the smallest and the largest weight of a group are its first and its last.
    codes = rounded.codes.view(6, -1, group)
    assert (codes.amin(-1) == 0).all() and (codes.amax(-1) == 15).all()


def test_a_row_that_no_group_divides_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="rows of 48; use quantization='int8'"):
        round_to_int4([torch.randn(4, 48)])
    assert INT4_GROUPS == tuple(sorted(INT4_GROUPS, reverse=True))


@pytest.mark.parametrize("value", [0.0, -0.7, 3e38, 1e-42])
def test_a_group_of_equal_weights_is_exact(value):
    w = torch.randn(2, 64)
    w[0, 32:] = value
    rounded = round_to_int4([GroupQuantized(*(torch.zeros(1, n) for n in (64, 2, 2))), w])  # groups of 32
    assert torch.equal(rounded.dequantize()[1, 32:], w[0, 32:])


def test_shipped_codes_stay_and_tensors_beside_them_take_their_groups():
    codes = torch.randint(0, 16, (3, 128), dtype=torch.uint8)
    shipped = GroupQuantized(codes, torch.rand(3, 4), torch.randn(3, 4))
    w = uneven(5, 128)
    both = round_to_int4([shipped, w])
    assert both.group == 32 and torch.equal(both.codes[:3], codes)
    assert torch.equal(both.scale[:3], shipped.scale) and torch.equal(both.minimum[:3], shipped.minimum)
    assert torch.equal(
        both.codes[3:], round_to_int4([GroupQuantized(codes, shipped.scale, shipped.minimum), w]).codes[3:]
    )
    assert (both.dequantize()[3:] - w).norm() < 0.1 * w.norm()


# ---- two codes in a byte ---------------------------------------------------------------------


@pytest.mark.parametrize("n, k, group", [(1, 32, 32), (5, 96, 32), (3, 256, 64), (2, 384, 128)])
def test_packed_codes_are_the_same_weights_in_half_the_bytes(n, k, group):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    weight = GroupQuantized(codes, torch.rand(n, k // group) + 0.1, torch.randn(n, k // group))
    packed = PackedInt4.pack(weight)
    assert packed.shape == weight.shape and packed.group == group
    assert packed.nbytes == n * k // 2 + n * (k // group) * 8
    torch.testing.assert_close(packed.dequantize().double(), by_hand(weight), rtol=1e-6, atol=1e-6)
    assert packed.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_a_byte_holds_code_j_low_and_the_one_half_a_group_on_high():
    codes = (torch.arange(64) % 16).to(torch.uint8)[None]
    codes[0, 16:32] = 15
    packed = PackedInt4.pack(GroupQuantized(codes, torch.ones(1, 2), torch.zeros(1, 2))).codes
    assert packed.shape == (2, 1, 16)
    assert packed[0, 0].tolist() == [j + 15 * 16 for j in range(16)]
    assert packed[1, 0].tolist() == [j + j * 16 for j in range(16)]


# ---- a scale for each row --------------------------------------------------------------------


def test_int8_is_off_by_half_a_step_of_its_own_row_at_most():
    w = uneven(7, 96)
    rounded = round_rows([w], torch.int8)
    largest = w.double().abs().amax(1, keepdim=True)
    found = rounded.codes.double() * rounded.scale.double()[:, None]
    assert ((found - w.double()).abs() <= largest / 254 * (1 + 1e-5)).all()
    assert rounded.codes.abs().amax(1).tolist() == [127] * 7
    torch.testing.assert_close(rounded.dequantize().double(), found, rtol=1e-6, atol=0)


def test_fp8_takes_the_nearest_e4m3_number_and_reaches_448():
    w = uneven(7, 96)
    rounded = round_rows([w], FP8)
    scaled = w.double() / rounded.scale.double()[:, None]
    off = (rounded.codes.double() - scaled).abs()
    nearest = (E4M3 - scaled[..., None]).abs().amin(-1)
    assert (off <= nearest + 1e-4 * scaled.abs()).all()
    assert rounded.codes.double().abs().amax(1).tolist() == [448.0] * 7
    torch.testing.assert_close(rounded.scale, w.abs().amax(1) / 448)


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_rows_of_zeros_stay_zeros_and_parts_are_stacked_in_order(dtype):
    codes = torch.randint(0, 16, (2, 64), dtype=torch.uint8)
    shipped = GroupQuantized(codes, torch.rand(2, 2), torch.randn(2, 2))
    w = torch.randn(3, 64)
    w[1] = 0
    both = round_rows([shipped, w], dtype)
    assert isinstance(both, ChannelQuantized) and both.shape == (5, 64) and both.codes.dtype == dtype
    found = both.dequantize()
    assert torch.equal(found[3], torch.zeros(64)) and found.isfinite().all()
    exact = torch.cat([by_hand(shipped), w.double()])
    assert (found.double() - exact).norm() < 0.04 * exact.norm()
    assert both.nbytes == 5 * 64 + 5 * 4
