"""The fused kernels against float64 formulas, and a model that uses them against the same model in PyTorch."""

import inspect

import pytest
import torch

from minillm.attention import choose_attention
from minillm.batch import Batch
from minillm.checkpoint.random_weights import random_weights
from minillm.errors import ShapeError
from minillm.kernels.fused_ops import FusedOps
from minillm.kv_cache import KVCache, KVLayer
from minillm.model import Transformer
from minillm.norm import RMSNorm
from minillm.ops import PlainOps, choose_ops
from minillm.profiler import NO_PARTS, PART_NAMES, Parts
from tests.tolerances import LOGITS_FP32

NAN = float("nan")
DTYPES = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.float16: dict(rtol=2e-3, atol=2e-3)}
FUSED = FusedOps()


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


def interior(*shape, dtype, scale=1.0):
    """Random numbers as the inner columns of a wider NaN-filled tensor, and that tensor."""
    outer = torch.full((*shape[:-1], shape[-1] + 24), NAN, dtype=dtype)
    inner = outer[..., 8:-16]
    inner.copy_(torch.randn(shape) * scale)
    return inner, outer


def assert_only_inside(outer):
    assert outer[..., :8].isnan().all() and outer[..., -16:].isnan().all()


# ---- RMSNorm and residual add ----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 48, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 5])
def test_add_norm_equals_the_formula(rows, n, dtype):
    x, outer = interior(rows, n, dtype=dtype)
    update, _ = interior(rows, n, dtype=dtype, scale=3.0)
    norm = RMSNorm(torch.randn(n, dtype=dtype), eps=0.3)
    exact_sum = (x.double() + update.double()).to(dtype)
    row = exact_sum.double()
    exact = row / (row.square().mean(-1, keepdim=True) + 0.3).sqrt() * norm.weight.double()

    total, normed = FUSED.add_norm(x, update, norm)
    torch.testing.assert_close(total, exact_sum, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=0)
    torch.testing.assert_close(normed.double(), exact, **DTYPES[dtype])
    assert_only_inside(outer)


def test_a_norm_without_an_update_leaves_x_alone(dtype):
    x, _ = interior(3, 96, dtype=dtype)
    before = x.clone()
    norm = RMSNorm(torch.rand(96, dtype=dtype), eps=1e-5)
    same, normed = FUSED.add_norm(x, None, norm)
    assert torch.equal(same, before) and torch.equal(x, before)
    row = before.double()
    exact = row / (row.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(normed.double(), exact, **DTYPES[dtype])


def test_half_precision_squares_do_not_overflow():
    x = torch.full((1, 64), 3e4, dtype=torch.float16)
    _, normed = FUSED.add_norm(x, None, RMSNorm(torch.ones(64, dtype=torch.float16), eps=1e-5))
    torch.testing.assert_close(normed, torch.ones_like(normed))


# ---- activation ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 80, 1024, 1500])
@pytest.mark.parametrize("rows", [1, 3])
def test_silu_mul_equals_the_formula(rows, n, dtype):
    gate_up, outer = interior(rows, 2 * n, dtype=dtype, scale=2.0)
    gate, up = gate_up.double().chunk(2, dim=-1)
    found = FUSED.silu_mul(gate_up)
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), gate / (1 + (-gate).exp()) * up, **DTYPES[dtype])


def test_silu_mul_of_large_gates_is_finite(dtype):
    gate_up = torch.tensor([[-3e4, -200.0, 200.0, 0.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    assert FUSED.silu_mul(gate_up).tolist() == [[0.0, 0.0, 200.0, 0.0]]


# ---- rotation and KV write -------------------------------------------------------------------


def angles_for(tokens, head_size, dtype):
    """cos and sin as Rope.at gives them, of random angles, and the angles [T, D/2] as they were rounded."""
    angle = torch.rand(tokens, head_size // 2, dtype=torch.float64) * 6.28
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return (
        torch.cat([cos, cos], -1)[:, None],
        torch.cat([-sin, sin], -1)[:, None],
        torch.complex(cos.double(), sin.double()),
    )


def turned(x, unit):
    """x [T, heads, D] turned: the pair (d, d + D/2) as one complex number times cos + i sin."""
    half = x.shape[-1] // 2
    pair = torch.complex(x[..., :half].double(), x[..., half:].double()) * unit[:, None]
    return torch.cat([pair.real, pair.imag], dim=-1)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "q/k norm"])
@pytest.mark.parametrize("heads, kv_heads", [(9, 3), (4, 4), (14, 2), (8, 1)])
@pytest.mark.parametrize("head_size", [16, 24, 64, 80, 128])
def test_rope_kv_write_turns_q_and_k_and_fills_the_slots(head_size, heads, kv_heads, normed, dtype):
    tokens, blocks, block_size = 5, 3, 4
    stacked = torch.randn(tokens, heads + 2 * kv_heads, head_size).to(dtype)
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
    pages = torch.full((2, blocks, block_size, kv_heads, head_size), NAN, dtype=dtype)
    slots = torch.randperm(blocks * block_size)[:tokens]
    skipped = int(torch.randint(tokens, ()))
    slots[skipped] = -1  # a padded row

    found = FUSED.turn_and_write(stacked, norms, (cos, sin), KVLayer(pages[0], pages[1]), slots, NO_PARTS)
    for ours, exact in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(ours.double(), exact, **DTYPES[dtype])
    expected = torch.full((2, blocks * block_size, kv_heads, head_size), NAN, dtype=torch.float64)
    kept = [t for t in range(tokens) if t != skipped]
    expected[0, slots[kept]], expected[1, slots[kept]] = k[kept], v[kept]
    torch.testing.assert_close(pages.flatten(1, 2).double(), expected, equal_nan=True, **DTYPES[dtype])


def test_a_value_that_is_not_finite_stays_where_it_is():
    """v is copied, not multiplied by the cosine of nothing: inf * 0 would be NaN in its other half."""
    stacked = torch.randn(1, 3, 16)
    stacked[0, 2, 3] = float("inf")
    before = stacked[0, 2].clone()
    pages = torch.full((2, 1, 1, 1, 16), NAN)
    cos, sin, _ = angles_for(1, 16, torch.float32)
    _, _, v = FUSED.turn_and_write(stacked, None, (cos, sin), KVLayer(*pages), torch.tensor([0]), NO_PARTS)
    assert torch.equal(v[0, 0], before) and torch.equal(pages[1, 0, 0, 0], before)


def test_pages_that_are_not_rows_of_one_stride_are_refused():
    """A copy would take the write and be thrown away."""
    pages = torch.zeros(2, 2, 3, 4, 16).transpose(2, 3)  # [2, P, block_size, Hkv, D] out of head-major memory
    cos, sin, _ = angles_for(1, 16, torch.float32)
    with pytest.raises(ShapeError, match="strides"):
        FUSED.turn_and_write(torch.randn(1, 9, 16), None, (cos, sin), KVLayer(*pages), torch.tensor([0]), NO_PARTS)


# ---- in a model ------------------------------------------------------------------------------


def logits_and_pages(model, steps, cache):
    """Logits of each step's last row. steps: lists of (tokens, context after them, block table)."""
    attend, _ = choose_attention("cpu", torch.float32, "naive")
    with torch.inference_mode():
        batches = [Batch.build(*map(list, zip(*step, strict=True)), cache.block_size) for step in steps]
        logits = torch.cat([model.forward(batch, cache, attend) for batch in batches])
    return logits, [tensor.clone() for tensor in cache.tensors]


@pytest.mark.parametrize("name", ["tiny", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_a_model_with_fused_kernels_gives_the_logits_of_the_plain_one(name):
    config, weights = random_weights(name, seed=int(torch.randint(10**6, ())))
    tokens = torch.randint(config.vocab_size, (40,)).tolist()
    # Two requests: a chunk and a whole prompt, then the rest of the first beside a decode.
    steps = [
        [(tokens[:7], 7, [2, 0, 5]), (tokens[20:29], 9, [1, 4, 3])],
        [(tokens[7:20], 20, [2, 0, 5]), (tokens[29:30], 10, [1, 4, 3])],
    ]
    results = []
    for ops in (PlainOps(), FUSED):
        cache = KVCache(config, num_blocks=7, block_size=8)
        for tensor in cache.tensors:
            tensor.fill_(NAN)
        results.append(logits_and_pages(Transformer(config, weights, ops=ops), steps, cache))
    (plain, plain_pages), (fused, fused_pages) = results
    assert plain.std() > 0.5
    assert (fused - plain).abs().max() <= LOGITS_FP32 * plain.abs().max()
    for ours, theirs in zip(fused_pages, plain_pages, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_both_ways_have_the_same_methods_and_parts():
    for name, method in inspect.getmembers(PlainOps, inspect.isfunction):
        assert inspect.signature(getattr(FusedOps, name)) == inspect.signature(method)
    config, weights = random_weights("tiny")
    attend, _ = choose_attention("cpu", torch.float32, "naive")
    for ops in (PlainOps(), FUSED):
        cache, parts = KVCache(config, 4), Parts(clock=lambda: 0.0)
        batch = Batch.build([[1, 2, 3]], [3], [[1]], cache.block_size)
        with torch.inference_mode():
            Transformer(config, weights, ops=ops).forward(batch, cache, attend, parts)
        assert set(parts.seconds) == set(PART_NAMES) - {"sample"}


def test_a_processor_uses_plain_steps():
    assert type(choose_ops("cpu")) is PlainOps
