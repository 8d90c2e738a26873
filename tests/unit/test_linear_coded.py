"""int8, int4 and fp8 weights as the only copy of a matrix, against float64 products of what their codes stand for."""

import pytest
import torch

from minillm.errors import ConfigError
from minillm.linear import CodedLinear, EmulatedFp8, Forms, Fp8Linear, Int4Linear, PlainLinear, choose_forms
from minillm.linear.coded import INT8_MAX_ROWS
from minillm.quantize import ChannelQuantized, GroupQuantized, PackedInt4, round_rows, round_to_int4

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HAS_INT8 = hasattr(torch.ops.aten, "_weight_int8pack_mm")
HAS_INT4 = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2}  # relative; scale, result and sum are each rounded to 2^-9
COARSE = {"int8": 0.05, "int4": 0.3, "fp8": 0.1}  # what rounding a matrix changes, and more


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def shipped(n, k, group=32):
    """4-bit codes as a file has them, groups far apart in size."""
    size = torch.logspace(-2, 0, k // group)
    return GroupQuantized(
        torch.randint(0, 16, (n, k), dtype=torch.uint8),
        torch.rand(n, k // group).add(0.5).mul(size),
        -8 * torch.rand(n, k // group).mul(size),
    )


def matrix(n, k):
    """A weight whose rows and columns differ in size by a factor of ten."""
    return torch.randn(n, k) * torch.logspace(-1, 0, n)[:, None] * torch.logspace(-1, 0, k)[torch.randperm(k)]


def stands_for(quantization, weights):
    """The matrix [N, K] in float64 that the codes of `weights` mean, by the definitions in quantize.py."""
    if quantization == "int4":
        rounded = round_to_int4(weights)
        scale, minimum = (
            part.double().repeat_interleave(rounded.group, 1) for part in (rounded.scale, rounded.minimum)
        )
        return rounded.codes.double() * scale + minimum
    rounded = round_rows(weights, torch.int8 if quantization == "int8" else FP8)
    return rounded.codes.double() * rounded.scale.double()[:, None]


def rounded_rows(x):
    """x as fp8 has it, in float64: each row scaled to 448, and every value the nearest e4m3 number."""
    scale = x.double().abs().amax(1, keepdim=True) / 448
    return (x.double() / scale).float().to(FP8).double() * scale


# ---- right products --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("rows", [0, 1, 2, INT8_MAX_ROWS, INT8_MAX_ROWS + 1, 40])
@pytest.mark.parametrize("n, k", [(48, 64), (80, 160), (17, 96), (32, 384)])
def test_products_are_those_of_the_weights_that_the_codes_stand_for(quantization, dtype, rows, n, k):
    weights = [matrix(n - 16, k), shipped(16, k)] if k % 128 else [matrix(n, k)]
    bias, x = torch.randn(n), torch.randn(rows, k).to(dtype)
    found = choose_forms(dtype, CPU, quantization).make(weights, bias)(x)
    assert found.shape == (rows, n) and found.dtype == dtype
    seen = rounded_rows(x) if quantization == "fp8" else x.double()
    expected = seen @ stands_for(quantization, weights).T + bias.to(dtype).double()
    if rows:
        assert relative_error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_the_codes_stand_for_the_weights(quantization):
    whole = matrix(80, 160)
    assert relative_error(stands_for(quantization, [whole]), whole.double()) < COARSE[quantization]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int4_multiplies_by_the_codes_of_the_file(dtype):
    """Equal in float32; in bfloat16 the weights read back are off by three thousandths at most."""
    parts = [shipped(32, 96), shipped(16, 96)]
    linear = choose_forms(dtype, CPU, "int4").make(parts)
    exact = torch.cat([part.dequantize() for part in parts]).double()
    read_back = linear(torch.eye(96, dtype=dtype)).T
    assert relative_error(read_back, exact) < (1e-5 if dtype == torch.float32 else 8e-3)
    if dtype == torch.bfloat16 and HAS_INT4:
        assert isinstance(linear, Int4Linear)
        scale, zero = linear.scale_and_zero.double().transpose(0, 1).repeat_interleave(32, dim=1).unbind(-1)
        held = (torch.cat([part.codes for part in parts]).double() - 8) * scale + zero
        assert 1e-4 < relative_error(held, exact) < 3e-3


def test_few_rows_go_to_the_product_and_more_are_widened():
    weight = round_rows([matrix(8, 32)], torch.int8)
    calls = []

    def product(x, codes):
        calls.append(len(x))
        assert codes is weight
        return torch.full((len(x), 8), 7.0)

    linear = CodedLinear(weight, torch.ones(8), product, most_rows=3)
    assert torch.equal(linear(torch.randn(3, 32)), torch.full((3, 8), 8.0))
    x = torch.randn(4, 32)
    assert relative_error(linear(x), x.double() @ stands_for("int8", [weight.dequantize()]).T + 1) < 1e-5
    assert calls == [3]
    CodedLinear(weight, most_rows=3)(x[:1])  # without a product everything is widened


# ---- numbers that are not finite, and rows of zeros ------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [3, 20])
def test_a_row_that_is_not_finite_spoils_itself_alone(quantization, dtype, value, rows):
    linear = choose_forms(dtype, CPU, quantization).make([matrix(32, 64)])
    x = torch.randn(rows, 64).to(dtype)
    clean = linear(x)
    spoilt = int(torch.randint(rows, ()))
    x[spoilt, int(torch.randint(64, ()))] = value
    found = linear(x)
    others = [row for row in range(rows) if row != spoilt]
    assert torch.equal(found[others], clean[others]) and found[others].isfinite().all()
    assert not found[spoilt].isfinite().any()
    assert found[spoilt].isnan().all() or (value == value and quantization != "fp8")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_zeros_give_zeros(quantization, dtype):
    w = matrix(32, 64)
    w[5] = 0
    x = torch.randn(3, 64).to(dtype)
    x[1] = 0
    found = choose_forms(dtype, CPU, quantization).make([w])(x)
    assert found.isfinite().all() and (found[1] == 0).all() and (found[:, 5] == 0).all()


def test_sums_of_codes_do_not_overflow_in_float16():
    w, x = torch.ones(16, 64), torch.ones(3, 64).half()
    found = choose_forms(torch.float16, CPU, "fp8").make([w])(x)
    assert found.dtype == torch.float16 and torch.equal(found, torch.full((3, 16), 64.0).half())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_rows_of_any_size_neither_overflow_nor_vanish(dtype):
    linear = choose_forms(dtype, CPU, "fp8").make([torch.eye(32) * 3e4])
    x = torch.randn(4, 32) * torch.tensor([1e-20, 1.0, 1e4, 1e30])[:, None]
    found = linear(x.to(dtype)) / 3e4
    assert found.isfinite().all()
    for row in range(4):
        assert relative_error(found[row], x[row].double()) < COARSE["fp8"]


# ---- what is held ----------------------------------------------------------------------------


def test_bytes_are_those_of_one_copy():
    n, k = 64, 256
    w = matrix(n, k)
    sizes = {q: dict(choose_forms(torch.bfloat16, CPU, q).make([w]).num_weight_bytes) for q in ("int8", "int4")}
    assert sizes == {"int8": {"int8": n * k + n * 2}, "int4": {"int4": n * k // 2 + n * (k // 128) * 2 * 2}}
    assert dict(choose_forms(torch.float32, CPU, "int8").make([w]).num_weight_bytes) == {"int8": n * k + n * 4}
    emulated = dict(Forms(torch.float32, CPU, PlainLinear, "fp8").make([w]).num_weight_bytes)
    assert emulated == {"fp8 held as plain float32": n * k * 4}


def test_the_head_is_held_more_exactly_than_the_layers():
    w = matrix(48, 64)
    heads = {q: choose_forms(torch.float32, CPU, q).make([w], head=True) for q in ("int8", "int4", "fp8")}
    assert isinstance(heads["int4"].codes, ChannelQuantized) and isinstance(heads["int8"].codes, ChannelQuantized)
    assert isinstance(heads["fp8"], PlainLinear)
    layer = choose_forms(torch.float32, CPU, "int4").make([w])
    assert isinstance(layer.codes, PackedInt4)


@pytest.mark.skipif(not (HAS_INT8 and HAS_INT4), reason="this PyTorch has no products for codes on a CPU")
def test_bfloat16_uses_the_products_of_pytorch_where_they_know_the_shape():
    int8, int4 = (choose_forms(torch.bfloat16, CPU, q) for q in ("int8", "int4"))
    assert int8.make([matrix(17, 96)]).product is not None and int8.make([matrix(16, 80)]).product is None
    assert isinstance(int4.make([matrix(32, 96)]), Int4Linear) and isinstance(int4.make([matrix(17, 96)]), CodedLinear)
    for q in ("int8", "int4"):  # in float32 those products are plain loops
        assert choose_forms(torch.float32, CPU, q).make([matrix(32, 96)]).product is None


@pytest.mark.parametrize("n, k", [(16, 80), (16, 8), (3, 17)])
def test_int8_and_fp8_hold_any_shape_on_a_cpu(n, k):
    w, x = matrix(n, k), torch.randn(2, k).bfloat16()
    for quantization in ("int8", "fp8"):
        found = choose_forms(torch.bfloat16, CPU, quantization).make([w])(x)
        assert relative_error(found, x.double() @ w.double().T) < COARSE[quantization]


@pytest.mark.parametrize("quantization", ["none", "auto", "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reason_names_what_was_chosen(quantization, dtype):
    forms = choose_forms(dtype, CPU, quantization)
    assert forms.reason.startswith(f"{forms.quantization}: ")
    linear = forms.make([matrix(32, 64)])
    if quantization in ("int8", "int4"):
        has_product = isinstance(linear, Int4Linear) or linear.product is not None
        assert ("PyTorch's product" in forms.reason) == has_product
    assert ("emulated" in forms.reason) == isinstance(linear, EmulatedFp8)


# ---- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_fp8_is_refused_on_gpus_that_cannot_multiply_it(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with pytest.raises(ConfigError, match=f"8.9 .*{capability[0]}.{capability[1]}; use quantization='int8'"):
        choose_forms(torch.bfloat16, CUDA, "fp8")


def test_fp8_on_a_gpu_is_bfloat16_in_multiples_of_16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(ConfigError, match="use dtype='bfloat16'"):
            choose_forms(dtype, CUDA, "fp8")
    assert choose_forms(torch.bfloat16, CUDA, "fp8").quantization == "fp8"
    for n, k in ((24, 64), (64, 24)):
        with pytest.raises(ConfigError, match=rf"multiples of 16 .*\[{n}, {k}\]; use quantization='int8'"):
            Fp8Linear(round_rows([matrix(n, k)], FP8))


def test_int4_refuses_rows_that_no_group_divides():
    with pytest.raises(ConfigError, match="rows of 80; use quantization='int8'"):
        choose_forms(torch.bfloat16, CPU, "int4").make([matrix(16, 80)])
