"""Each form of a weight matrix against the product in float64."""

import pytest
import torch

from minillm.linear import (
    INT4_MAX_ROWS,
    FewRowsInt4,
    Forms,
    Int4Linear,
    PackedLinear,
    PlainLinear,
    choose_forms,
)
from minillm.quantize import GroupQuantized

CPU = torch.device("cpu")
HALF = [torch.bfloat16, torch.float16]
# Relative to the float64 product; a wrong code, scale or row changes a tenth and more. Half types round weights, result
# and, on some processors, parts of the sum to 2^-9 each.
FLOAT32, HALF_PRODUCT = 1e-5, 1e-2
# What this machine offers, asked of PyTorch and not of the code under test, or a broken form would skip its own tests.
HAS_PACKED = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
HAS_INT4 = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
BEST = Forms(torch.bfloat16, CPU, PackedLinear if HAS_PACKED else PlainLinear, "auto" if HAS_INT4 else "none")

needs_packed = pytest.mark.skipif(not HAS_PACKED, reason="this CPU has no packed bfloat16 product")
needs_int4 = pytest.mark.skipif(not HAS_INT4, reason="this PyTorch has no 4-bit product on a CPU")


def quantized(n, k, group=32):
    """A normal random matrix rounded to 16 levels per group, as a Q4_1 file holds it (fp16 scale and minimum)."""
    w = torch.randn(n, k // group, group)
    minimum = w.amin(-1).half().float()
    scale = ((w.amax(-1) - minimum) / 15).half().float()
    codes = ((w - minimum[..., None]) / scale[..., None]).round().clamp(0, 15)
    return GroupQuantized(codes.to(torch.uint8).view(n, k), scale, minimum)


def decoded(weight):
    """The numbers that codes stand for, one by one in float64."""
    scale = weight.scale.double().repeat_interleave(weight.group, dim=1)
    return weight.codes.double() * scale + weight.minimum.double().repeat_interleave(weight.group, dim=1)


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def test_dequantize_gives_the_numbers_the_codes_stand_for():
    weight = quantized(48, 96)
    codes = weight.codes.clone()
    assert relative_error(weight.dequantize(), decoded(weight)) < 1e-7
    assert relative_error(weight.dequantize(torch.bfloat16), decoded(weight)) < 2e-3
    assert torch.equal(weight.codes, codes)


@needs_int4
@pytest.mark.parametrize("shape", [(16, 32), (48, 64), (192, 576), (576, 1536), (80, 160)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
def test_int4_multiplies_by_exactly_the_codes_of_the_file(shape, rows):
    weight = quantized(*shape)
    x = torch.randn(rows, shape[1])
    found = Int4Linear(weight, dtype=torch.float32)(x)
    assert relative_error(found, x.double() @ decoded(weight).T) < FLOAT32


@needs_int4
def test_int4_in_bfloat16_changes_the_weights_by_three_thousandths_at_most():
    """Only scale and zero are rounded. Rows of the identity read the weights back out, with one more rounding."""
    weight = quantized(192, 576)
    linear = Int4Linear(weight)
    scale, zero = linear.scale_and_zero.float().transpose(0, 1).repeat_interleave(32, dim=1).unbind(-1)
    held = (weight.codes.double() - 8) * scale + zero
    assert 1e-4 < relative_error(held, decoded(weight)) < 3e-3
    read_back = linear(torch.eye(576, dtype=torch.bfloat16)).T
    assert relative_error(read_back, held) < HALF_PRODUCT / 2


@needs_int4
@pytest.mark.parametrize("form", ["int4", "both"])
def test_int4_adds_its_bias(form):
    weight, bias, x = quantized(64, 64), torch.randn(64) * 20, torch.randn(2, 64)
    linear = Int4Linear(weight, bias, torch.float32)
    if form == "both":
        linear = Forms(torch.float32, CPU, PlainLinear, "auto").make([weight], bias)
        assert isinstance(linear, FewRowsInt4)
    assert relative_error(linear(x), x.double() @ decoded(weight).T + bias) < FLOAT32


@needs_packed
@pytest.mark.parametrize("rows", [0, 1, 2, 31, 64, 65, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_equals_the_exact_product_up_to_its_own_rounding(rows, with_bias):
    w, x = torch.randn(100, 48).bfloat16(), torch.randn(rows, 48).bfloat16()
    bias = torch.randn(100).bfloat16() if with_bias else None
    found = PackedLinear(w, bias)(x)
    assert found.shape == (rows, 100) and found.dtype == torch.bfloat16
    if rows:
        assert relative_error(found, x.double() @ w.double().T + (bias.double() if with_bias else 0)) < HALF_PRODUCT


@pytest.mark.parametrize("dense", [PlainLinear, pytest.param(PackedLinear, marks=needs_packed)])
@pytest.mark.parametrize("quantization", ["none", pytest.param("auto", marks=needs_int4), "int8", "int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rows_may_be_an_interior_slice_of_a_poisoned_buffer(dense, quantization, rows):
    linear = Forms(torch.bfloat16, CPU, dense, quantization).make([quantized(64, 64)])
    buffer = torch.full((rows + 2, 200), float("nan"), dtype=torch.bfloat16)
    buffer[1:-1, 30:94] = x = torch.randn(rows, 64).bfloat16()
    assert torch.equal(linear(buffer[1:-1, 30:94]), linear(x))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_stacked_matrices_give_the_products_side_by_side(dtype):
    weights = [quantized(48, 64), torch.randn(32, 64), quantized(16, 64)]
    bias = torch.randn(96)
    x = torch.randn(6, 64).to(dtype)
    found = choose_forms(dtype, "cpu", "auto").make(weights, bias)(x)
    exact = torch.cat([decoded(weights[0]), weights[1].double(), decoded(weights[2])])
    tolerance = FLOAT32 if dtype == torch.float32 else HALF_PRODUCT
    assert relative_error(found, x.double() @ exact.T + bias) < tolerance


@needs_int4
def test_few_rows_read_the_codes_and_many_the_dense_copy():
    parts = [quantized(32, 64), quantized(16, 64)]
    both = BEST.make(parts)
    assert isinstance(both, FewRowsInt4) and INT4_MAX_ROWS >= 1
    codes, dense = (
        Int4Linear(GroupQuantized.cat(parts)),
        BEST.dense(torch.cat([p.dequantize() for p in parts]).bfloat16()),
    )
    for rows in (1, INT4_MAX_ROWS, INT4_MAX_ROWS + 1, 50):
        x = torch.randn(rows, 64).bfloat16()
        assert torch.equal(both(x), codes(x) if rows <= INT4_MAX_ROWS else dense(x))
        assert not torch.equal(codes(x), dense(x))


@needs_int4
@pytest.mark.parametrize("n, k, group", [(40, 64, 32), (64, 48, 16)])
def test_a_shape_the_4_bit_product_does_not_know_is_held_dense(n, k, group):
    weight = quantized(n, k, group)
    linear = BEST.make([weight])
    assert isinstance(linear, BEST.dense)
    x = torch.randn(1, weight.shape[1]).bfloat16()
    assert relative_error(linear(x), x.double() @ decoded(weight).T) < HALF_PRODUCT


@needs_int4
def test_one_dense_part_makes_the_whole_stack_dense():
    assert isinstance(BEST.make([quantized(32, 64), torch.randn(16, 64)]), BEST.dense)


def test_bfloat16_uses_everything_the_machine_offers():
    assert choose_forms(torch.bfloat16, "cpu", "auto") == BEST


def test_float32_has_one_form_and_none_switches_the_codes_off():
    for quantization in ("auto", "none"):
        assert choose_forms(torch.float32, "cpu", quantization) == Forms(torch.float32, CPU, PlainLinear)
    assert choose_forms(torch.bfloat16, "cpu", "none") == Forms(torch.bfloat16, CPU, BEST.dense)
    assert choose_forms(torch.float16, "cpu", "auto").quantization == "none"  # the product is slow there


def test_a_gpu_gets_plain_matrices():
    assert choose_forms(torch.bfloat16, "cuda", "auto") == Forms(torch.bfloat16, torch.device("cuda"), PlainLinear)


def test_where_packing_is_impossible_the_plain_form_stands_in():
    """oneDNN has no float64: the probe finds out, and says so in the log."""
    forms = choose_forms(torch.float64)
    assert forms.dense is PlainLinear
    x, w = torch.randn(3, 8).double(), torch.randn(5, 8).double()
    torch.testing.assert_close(forms.make([w])(x), x @ w.T)


@needs_int4
def test_bytes_count_both_copies():
    n, k = 64, 128
    linear = BEST.make([quantized(n, k)])
    dense = "packed bfloat16" if BEST.dense is PackedLinear else "plain bfloat16"
    assert dict(linear.num_weight_bytes) == {"int4": n * k // 2 + n * (k // 32) * 2 * 2, dense: n * k * 2}
    plain = Forms(torch.float32, CPU, PlainLinear).make([torch.randn(n, k), torch.randn(8, k)])
    assert dict(plain.num_weight_bytes) == {"plain float32": (n + 8) * k * 4}
