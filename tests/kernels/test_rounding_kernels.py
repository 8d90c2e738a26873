"""Rows rounded to fp8 and int4 codes widened, by one kernel each, against the same in PyTorch and by definition."""

import pytest
import torch

from minillm.eight_bit import quantize_rows
from minillm.kernels.fp8_rows import round_rows_to_fp8
from minillm.kernels.widen_int4 import widen_int4
from minillm.quantize import GroupQuantized, PackedInt4
from tests.kernels.test_eight_bit_kernels import fp8_rounded_to_the_nearest  # noqa: F401, for every test of this file

FP8 = torch.float8_e4m3fn
NAN = float("nan")


def inside_nan(rows, k, dtype):
    outer = torch.full((rows + 2, k + 24), NAN, dtype=dtype)
    outer[1:-1, 8:-16] = torch.randn(rows, k) * torch.logspace(-3, 3, rows)[:, None]
    return outer[1:-1, 8:-16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows, k", [(0, 16), (1, 16), (3, 100), (5, 1024), (2, 1500)])
def test_rows_are_rounded_as_in_pytorch(rows, k, dtype):
    x = inside_nan(rows, k, dtype)
    codes, scale = round_rows_to_fp8(x)
    expected, expected_scale = quantize_rows(x, FP8)
    assert codes.dtype == FP8 and codes.shape == (rows, k) and scale.shape == (rows,)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    # A scale that is off in its last bit moves a number over the middle between two codes, never farther.
    differ = codes.float() != expected.float()
    assert differ.sum() <= max(1, rows * k // 100)
    ratio = codes.float()[differ] / expected.float()[differ]
    assert ((ratio > 0.85) & (ratio < 1.18)).all()
    if rows:
        found = codes.double() * scale.double()[:, None]
        off = (found - x.double()).abs()
        assert (off <= x.double().abs() / 16 + x.double().abs().amax(1, keepdim=True) / 448 * 2.0**-9).all()
        assert codes.double().abs().amax(1).tolist() == [448.0] * rows


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(value):
    x = torch.randn(4, 100)
    clean, clean_scale = round_rows_to_fp8(x)
    x[2, 70] = value
    codes, scale = round_rows_to_fp8(x)
    others = [0, 1, 3]
    assert torch.equal(codes.float()[others], clean.float()[others]) and torch.equal(scale[others], clean_scale[others])
    assert (codes.float()[2] * scale[2]).isnan().any()


def test_a_row_of_zeros_stays_zeros_and_tiny_ones_do_not_overflow():
    x = torch.zeros(3, 40)
    x[1] = 1e-40
    x[2, 3] = 3e38
    codes, scale = round_rows_to_fp8(x)
    found = codes.double() * scale.double()[:, None]
    assert (found[0] == 0).all() and found.isfinite().all() and (found[1].abs() < 1e-36).all()
    assert abs(found[2, 3].item() / 3e38 - 1) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n, k, group", [(1, 32, 32), (40, 96, 32), (33, 192, 64), (70, 256, 128)])
def test_codes_are_widened_to_what_they_stand_for(n, k, group, dtype):
    scale = torch.rand(n, k // group).add(0.1).half().float()
    minimum = torch.randn(n, k // group).half().float()
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    found = widen_int4(PackedInt4.pack(GroupQuantized(codes, scale, minimum), dtype), dtype)
    scale, minimum = (part.double().repeat_interleave(group, 1) for part in (scale, minimum))
    assert found.dtype == dtype and found.shape == (n, k)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(found.double(), codes * scale + minimum, rtol=tolerance, atol=tolerance)
