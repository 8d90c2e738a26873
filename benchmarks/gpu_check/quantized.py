"""Products with weights in int8, int4 and fp8 beside the bfloat16 product of cuBLAS, in the shapes of an 8B model.

First each against float64 with the weights that its codes stand for. Then the times: few rows have `work` in bytes, of
the weights as each holds them, many rows in FLOPs. What is still to be chosen is measured as well: up to how many rows
the kernels are faster than the other ways, and how many programs should share a sum. `decode` asks the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_check.attention import body
from benchmarks.gpu_check.end_to_end import NEW_TOKENS, compare
from benchmarks.gpu_check.models import config_of, make_engine, random_model
from benchmarks.gpu_check.sections import Check
from benchmarks.gpu_check.tell import with_rates
from minillm.eight_bit import quantize_rows
from minillm.errors import ConfigError
from minillm.kernels.coded_linear import MOST_ROWS, fp8_rows, int4_rows, int8_rows
from minillm.kernels.fp8_rows import FP8, round_rows_to_fp8
from minillm.kernels.widen_int4 import widen_int4
from minillm.linear import CodedLinear, Fp8Linear, PlainLinear
from minillm.linear.fp8 import by_tensor_cores, check_fp8
from minillm.quantize import GroupQuantized, PackedInt4, round_rows, round_to_int4

TOLERANCE = 5e-3  # relative, of a whole row of results: bfloat16 keeps 8 bits
DRY_TOLERANCE = 0.25  # the interpreter drops carries when it rounds to fp8
MEMORY_BOUND = 64  # rows up to which the bytes of the weights are the work
INPUT_SETS = 3


def rows(check: Check) -> Iterator[dict]:
    dtype = torch.float16 if check.dry else check.dtype  # codes are widened to half types only
    shapes = [(48, 128)] if check.dry else [(4096, 4096), (28672, 4096)]
    for n, k in shapes:
        forms, exact, note = _forms(check, torch.randn(n, k, device=check.device).mul_(k**-0.5), dtype)
        if note:
            yield {"note": note}
        yield from _correct(check, forms, exact, dtype)
        del exact
        yield from _times(check, forms, n, k, dtype)
        yield from _choices(check, forms, n, k, dtype)
    x = torch.randn((5, 64) if check.dry else (2048, 4096), device=check.device).to(dtype)
    bodies = {"pytorch": lambda: quantize_rows(x, FP8), "kernel": lambda: round_rows_to_fp8(x)}
    work = {"bytes": x.numel() * 3}
    times = check.stopwatch().compare(bodies)
    yield with_rates({"step": "rows to fp8", "rows": len(x), "times": times, "work": work, "against": "pytorch"})


def _forms(check: Check, w: torch.Tensor, dtype: torch.dtype) -> tuple[dict, dict, str]:
    """By name: the matrix in each form, and the float64 weights that it stands for; and why there is no fp8."""
    int8, int4, fp8 = round_rows([w], torch.int8), round_to_int4([w]), round_rows([w], FP8)
    short = GroupQuantized(
        int4.codes, *(part.repeat_interleave(int4.group // 32, 1) for part in (int4.scale, int4.minimum))
    )
    packed = {"int4": PackedInt4.pack(int4, dtype), "int4 groups of 32": PackedInt4.pack(short, dtype)}
    forms = {str(dtype).removeprefix("torch."): PlainLinear(w.to(dtype)), "int8": _coded(int8, int8_rows)}
    forms |= {name: _coded(weight, int4_rows, widen_int4) for name, weight in packed.items()}
    exact = {name: form.weight.double() for name, form in forms.items() if isinstance(form, PlainLinear)}
    exact |= {"int8": int8.dequantize().double()}
    exact |= {name: weight.dequantize().double() for name, weight in packed.items()}
    try:
        check_fp8(check.device, dtype)
        forms["fp8"] = Fp8Linear(fp8)
        exact["fp8"] = fp8.dequantize().double()
    except ConfigError as error:
        return forms, exact, str(error)
    return forms, exact, ""


def _coded(weight, product, widen=None) -> CodedLinear:
    return CodedLinear(weight, None, product, MOST_ROWS, widen)


def _correct(check: Check, forms: dict, exact: dict, dtype: torch.dtype) -> Iterator[dict]:
    for name, form in forms.items():
        n, k = exact[name].shape
        largest, spoilt = 0.0, 0
        for count in (1, 5, 70) if check.dry else (1, 16, 17, 64, 300):
            x = torch.randn(count, k, device=check.device).to(dtype)
            codes, scale = quantize_rows(x, FP8)
            seen = codes.double() * scale.double()[:, None] if name == "fp8" else x.double()
            expected = seen @ exact[name].T
            errors = (form(x).double() - expected).norm(dim=1) / expected.norm(dim=1)
            largest = max(largest, errors.max().item() / (DRY_TOLERANCE if check.dry else TOLERANCE))
            clean, x[count // 2, 3] = form(x), float("nan")
            others = torch.arange(count, device=check.device) != count // 2
            spoilt += int((form(x)[others] != clean[others]).sum())
        graph = _in_a_graph(check, form, k, dtype)
        ok = largest <= 1 and spoilt == 0 and graph != "DIFFERENT"
        yield {"form": name, "n": n, "k": k, "largest": largest, "spoilt": spoilt, "graph": graph, "ok": ok}


def _in_a_graph(check: Check, form, k: int, dtype: torch.dtype) -> str:
    """Whether a product of one row can be recorded as a CUDA graph and gives the same when it is replayed."""
    if check.device.type != "cuda":
        return "not here"
    x = torch.randn(1, k, device=check.device).to(dtype)
    expected, graph = form(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = form(x)
    y.zero_()
    graph.replay()
    return "same" if torch.equal(y, expected) else "DIFFERENT"


def _times(check: Check, forms: dict, n: int, k: int, dtype: torch.dtype) -> Iterator[dict]:
    plain = next(iter(forms))
    for count in (1, 70) if check.dry else (1, 8, 64, 2048):
        inputs = [(torch.randn(count, k, device=check.device).to(dtype),) for _ in range(INPUT_SETS)]
        times = check.stopwatch().compare(forms, inputs)
        for name, time in times.items():
            size = sum(forms[name].num_weight_bytes.values()) + count * (n + k) * dtype.itemsize
            work = {"bytes": size} if count <= MEMORY_BOUND else {"flops": 2 * count * n * k}
            with_rates({"times": {name: time}, "work": work})
        yield with_rates({"rows": count, "n": n, "k": k, "times": times, "against": plain})


def _choices(check: Check, forms: dict, n: int, k: int, dtype: torch.dtype) -> Iterator[dict]:
    """Kernel or the other way, by the number of rows; and one row with its sum shared by more and more programs."""
    products, others = _products(forms)
    for count in (5,) if check.dry else (16, 32, 64, 128, 256):
        x = torch.randn(count, k, device=check.device).to(dtype)
        for name, product in products.items():
            bodies = {"kernel": lambda x=x, product=product: product(x)}
            bodies |= {other: lambda x=x, way=way: way(x) for other, way in others[name].items()}
            times = check.stopwatch(repeats=10).compare(bodies)
            row = {"choice": name, "rows": count, "n": n, "k": k, "times": times, "against": next(iter(others[name]))}
            yield with_rates(row)
    x = torch.randn(1, k, device=check.device).to(dtype)
    for name, product in products.items():
        bodies = {f"{s} splits": lambda s=s, product=product: product(x, s) for s in (1, 2, 4, 8, 16)}
        times = check.stopwatch(repeats=10).compare(bodies | {"chosen": lambda product=product: product(x)})
        yield with_rates({"choice": f"{name}, splits", "rows": 1, "n": n, "k": k, "times": times, "against": "chosen"})


def _products(forms: dict) -> tuple[dict, dict]:
    """By name of a form: its kernel as product(x, splits=None), and what may replace it."""
    products, others = {}, {}
    for name, form in forms.items():
        if isinstance(form, CodedLinear):
            products[name] = lambda x, splits=None, form=form: form.product(x, form.codes, splits)
            others[name] = {"widened": CodedLinear(form.codes, widen=form.widen)}
        elif isinstance(form, Fp8Linear):
            products[name] = lambda x, splits=None, form=form: fp8_rows(
                *round_rows_to_fp8(x), form.codes, torch.bfloat16, splits
            )
            others[name] = {
                way: lambda x, form=form, fast=fast: by_tensor_cores(*round_rows_to_fp8(x), form.codes, fast)
                for way, fast in (("tensor cores", False), ("tensor cores, fast sums", True))
            }
    return products, others


def decode(check: Check) -> Iterator[dict]:
    """Time per output token of the engine, decode steps as CUDA graphs, with a random model in each precision."""
    name, length = "8b", 20 if check.dry else 512
    needed = 4 * config_of(check, name).num_parameters * check.dtype.itemsize
    if needed > check.free_bytes:
        yield {"model": name, "note": f"does not fit: it takes {needed:,} bytes, {check.free_bytes:,} are free"}
        return
    attend, models = body(check, "triton", check.dtype), {}
    for quantization in ("none", "int8", "int4", "fp8"):
        try:
            models[quantization] = random_model(check, name, quantization=quantization)
        except ConfigError as error:
            yield {"model": name, "quantization": quantization, "note": str(error)}
    for batch in (1, 2) if check.dry else (1, 8):
        engines = {
            quantization: make_engine(model, attend, length + NEW_TOKENS, batch, with_graphs=True)
            for quantization, model in models.items()
        }
        row = compare(check, name, "tpot", length, batch, engines, repeats=2, against="none")
        sizes = {quantization: sum(model.num_weight_bytes.values()) for quantization, model in models.items()}
        yield row | {f"{quantization} GB": round(size / 1e9, 2) for quantization, size in sizes.items()}
