"""K and V in eight bits on a GPU: the writer makes codes and scales, the paged kernel reads them.

Oracles: rows turned in float64 with their scale worked out there, and attention in float64 over what was read back.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import triton.runtime.interpreter

from minillm.attention.choose import choose_attention
from minillm.attention.sparse import make_sparse
from minillm.attention.triton import TritonAttention
from minillm.checkpoint import load
from minillm.eight_bit import LARGEST, SMALLEST_SCALE
from minillm.kernels.fused_ops import FusedOps
from minillm.kv_cache import KVLayer
from minillm.model import Transformer
from minillm.norm import RMSNorm
from minillm.ops import PlainOps
from minillm.profiler import NO_PARTS
from minillm.sampling_params import SamplingParams
from minillm.sparse_options import parse
from minillm.step_graphs import StepGraphs
from tests.kernels.compile_checks import ROOT
from tests.kernels.test_small_kernels import angles_for, turned
from tests.unit.attention_cases import check, random_sequence
from tests.unit.eight_bit_cases import EIGHT_BIT, EightBitRagged, assert_rows_close, assert_tokens_follow
from tests.unit.engines import MAX_LEN, make_engine, random_prompts, run

NAN = float("nan")
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def fp8_rounded_to_the_nearest(monkeypatch):
    """Triton's interpreter (3.6, 3.7) drops the carry when rounding to fp8 reaches the next power of two: 1.97 becomes
    1.0 or 2.0, by the parity of its exponent. A GPU rounds in hardware; here PyTorch does."""
    convert = triton.runtime.interpreter._convert_float

    def rounded(values, source, target, mode):
        if target != triton.language.float8e4nv or source.primitive_bitwidth < 32:
            return convert(values, source, target, mode)
        return torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(triton.runtime.interpreter, "_convert_float", rounded)


def empty_layer(kv_dtype, blocks, block_size, kv_heads, head_size, dtype):
    """Pages whose rows all read back as NaN."""
    codes = torch.randint(-100, 100, (2, blocks, block_size, kv_heads, head_size), dtype=torch.int8).view(kv_dtype)
    return KVLayer(*codes, None, *torch.full(codes.shape[:-1], NAN), dtype)


# -- the writer


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "q/k norm"])
@pytest.mark.parametrize("heads, kv_heads, head_size", [(9, 3, 64), (4, 4, 16), (14, 2, 24), (8, 1, 80), (5, 5, 128)])
def test_rows_are_turned_quantised_and_written_in_one_pass(kv_dtype, dtype, normed, heads, kv_heads, head_size):
    tokens, blocks, block_size = 6, 3, 4
    stacked = (torch.randn(tokens, heads + 2 * kv_heads, head_size) * torch.rand(tokens, 1, 1) * 9).to(dtype)
    stacked[1] = 0  # a row of zeros gives zeros back
    q, k, v = stacked.double().split([heads, kv_heads, kv_heads], dim=1)
    norms = None
    if normed:
        norms = tuple(RMSNorm(torch.rand(head_size, dtype=dtype) + 0.5, eps=0.1) for _ in "qk")
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight.double()
            for x, norm in zip((q, k), norms, strict=True)
        )
    cos, sin, unit = angles_for(tokens, head_size, dtype)
    q, k = turned(q, unit), turned(k, unit)
    layer = empty_layer(kv_dtype, blocks, block_size, kv_heads, head_size, dtype)
    before = [tensor.clone() for tensor in (layer.k, layer.v)]
    slots = torch.randperm(blocks * block_size)[:tokens]
    skipped = int(torch.randint(2, tokens, ()))
    slots[skipped] = -1  # a padded row

    found = FusedOps().turn_and_write(stacked, norms, (cos, sin), layer, slots, NO_PARTS)
    rounding = 2e-3 if dtype == torch.float16 else 1e-5
    for ours, exact in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=rounding, atol=rounding)
    kept = [t for t in range(tokens) if t != skipped]
    for rows, scale, exact in zip(layer.read_rows(slots[kept]), (layer.k_scale, layer.v_scale), (k, v), strict=True):
        exact = exact[kept]
        largest = exact.abs().amax(-1)
        expected = (largest / LARGEST[kv_dtype]).clamp(min=SMALLEST_SCALE)
        torch.testing.assert_close(scale.flatten(0, 1)[slots[kept]].double(), expected, rtol=rounding, atol=1e-30)
        assert_rows_close(rows, exact, kv_dtype, rounding)
    others = [slot for slot in range(blocks * block_size) if slot not in slots[kept]]
    for pages, scale, old in zip((layer.k, layer.v), (layer.k_scale, layer.v_scale), before, strict=True):
        assert scale.flatten(0, 1)[others].isnan().all()
        same = pages.view(torch.int8).flatten(0, 1) == old.view(torch.int8).flatten(0, 1)
        assert same[others].all() and not same[slots[kept]].all()


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT)
def test_the_fused_writer_leaves_what_the_plain_one_does(kv_dtype):
    tokens, heads, kv_heads, head_size = 40, 6, 3, 64
    stacked = torch.randn(tokens, heads + 2 * kv_heads, head_size)
    cos, sin, _ = angles_for(tokens, head_size, torch.float32)
    layers = []
    for ops in (PlainOps(), FusedOps()):
        layer = empty_layer(kv_dtype, 3, 16, kv_heads, head_size, torch.float32)
        ops.turn_and_write(stacked.clone(), None, (cos, sin), layer, torch.arange(tokens), NO_PARTS)
        layers.append(layer)
    for name in ("k", "v"):
        scales = [getattr(layer, f"{name}_scale").flatten(0, 1)[:tokens] for layer in layers]
        torch.testing.assert_close(*scales, rtol=1e-6, atol=0)
        codes = [getattr(layer, name).flatten(0, 1)[:tokens].float() for layer in layers]
        # A value next to a border between two codes may fall on either side of it.
        assert (codes[0] != codes[1]).float().mean() < 1e-2
        torch.testing.assert_close(*codes, rtol=1 / 7, atol=1.001)


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT)
@pytest.mark.parametrize("broken", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("half", [0, 8])
def test_a_broken_value_spoils_its_row_and_no_other(kv_dtype, broken, half):
    stacked = torch.randn(3, 6, 16)  # 2 query heads, 2 of k, 2 of v
    stacked[1, 3, half + 2] = stacked[1, 4, half + 5] = broken
    layer = empty_layer(kv_dtype, 1, 4, 2, 16, torch.float32)
    cos, sin, _ = angles_for(3, 16, torch.float32)
    FusedOps().turn_and_write(stacked, None, (cos, sin), layer, torch.arange(3), NO_PARTS)
    k, v = layer.read_rows(torch.arange(3))
    assert not k[1, 1].isfinite().any() and not v[1, 0].isfinite().any()
    k[1, 1], v[1, 0] = 0, 0
    assert k.isfinite().all() and v.isfinite().all()


def test_eight_bit_writers_compile_without_spills():
    """In a process without the interpreter; fp8 from compute capability 8.9 on."""
    script = """
import json
from minillm.kernels.compile import compile_row
from minillm.kernels.rope_kv_write import rows
for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
    for dtype in ["int8"] + ["float8_e4m3fn"] * (capability > (8, 0)):
        print(json.dumps(compile_row(rows(capability, dtype)[-1]).figures))
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(figures) == 7
    for row in figures:
        assert row["spill_bytes"] == 0 and row["shared_bytes"] <= row["shared_limit"], row


# -- the reader


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_engine_s_kernels_read_what_was_written(kv_dtype, window, dtype):
    lengths = [(1, 1), (1, 130), (3, 35), (17, 90), (40, 40)]
    sequences = [random_sequence(n, context, head_size=24, dtype=dtype) for n, context in lengths]
    attend, _ = choose_attention("cpu", dtype, "triton", kv_dtype)
    check(attend, EightBitRagged(sequences, kv_dtype, window), dtype)


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT)
def test_a_decode_split_over_its_keys_reads_eight_bits(kv_dtype):
    attend = TritonAttention(torch.float32, "cpu", num_splits=4)
    check(attend, EightBitRagged([random_sequence(1, 300), random_sequence(1, 7)], kv_dtype))


# -- in an engine


@pytest.fixture(scope="module")
def tiny():
    checkpoint = load("random:tiny")
    return checkpoint, Transformer(checkpoint.config, checkpoint.weights)


@pytest.fixture(scope="module")
def fused(tiny):
    """The same model with the steps that a GPU takes."""
    checkpoint, _ = tiny
    return checkpoint, Transformer(checkpoint.config, checkpoint.weights, ops=FusedOps())


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT)
@pytest.mark.parametrize("sparse", [None, "sliding_window(64, sinks=2)", "dynamic_blocks(mass=1, block=16)"])
def test_generation_over_an_eight_bit_cache(tiny, fused, session_seed, kv_dtype, sparse):
    """Sparse methods with the whole budget, so that they see what dense attention sees."""
    prompts = random_prompts(tiny, [5, 33], session_seed)
    engine = make_engine(fused, "triton", num_blocks=24, kv_dtype=kv_dtype)
    if sparse:
        dense = choose_attention("cpu", torch.float32, "triton")
        engine.attend, _ = make_sparse(parse(sparse), "cpu", torch.float32, *dense)
    assert_tokens_follow(tiny, prompts, run(engine, prompts, SHORT), kv_dtype)


@pytest.mark.parametrize("kv_dtype", EIGHT_BIT)
def test_padding_of_step_graphs_writes_neither_codes_nor_scales(tiny, fused, session_seed, kv_dtype):
    engine = make_engine(fused, "triton", num_blocks=40, max_num_seqs=33, kv_dtype=kv_dtype)
    engine.step_graphs = StepGraphs(engine.model, engine.kv_cache, engine.attend, 33, MAX_LEN, capture=lambda run: run)
    prompts = random_prompts(tiny, [5, 17, 3], session_seed)
    assert_tokens_follow(tiny, prompts, run(engine, prompts, SHORT), kv_dtype)
    untouched = torch.stack([scale.isnan().all(dim=(0, 2, 3)) for scale in engine.kv_cache.scales]).all(dim=0)
    assert untouched.sum() == 40 - (1 + 2 + 1), "three requests of one, two and one block"
