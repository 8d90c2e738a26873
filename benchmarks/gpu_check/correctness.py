"""Every kernel in its real dtypes on this GPU, against float64: the textbook's attention and the plain steps.

Pages are NaN wherever nothing was written, so a kernel that reads too far shows it. `largest` is the largest error
relative to what the tolerance allows; above 1 the row is not ok.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu_check.attention import Ragged, body, name_of
from benchmarks.gpu_check.models import generate, make_engine, random_model, random_prompts
from benchmarks.gpu_check.sections import Check
from minillm.attention import naive
from minillm.attention.per_request import PerRequest
from minillm.batch import Batch
from minillm.errors import ConfigError
from minillm.kernels.flash import flash_attention
from minillm.kernels.fused_ops import FusedOps
from minillm.kernels.launch import find_row
from minillm.kv_cache import KVCache, KVLayer
from minillm.norm import RMSNorm
from minillm.ops import PlainOps
from minillm.profiler import NO_PARTS

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4}  # absolute, and relative
FAR = 2**31  # values of a tensor beyond which a 32-bit offset wraps


def rows(check: Check) -> Iterator[dict]:
    dtypes = (torch.float32,) if check.dry else [check.dtype, torch.float16, torch.float32]
    for dtype in dict.fromkeys(dtypes):
        for part in (_fused, _flash, _paged):
            yield from _where_it_runs(part(check, dtype))
    yield from _where_it_runs(_far_slots(check))
    yield from _where_it_runs(_whole_model(check))
    yield from _where_it_runs(_graphs(check))


def _where_it_runs(rows: Iterator[dict]) -> Iterator[dict]:
    """The rows, or why the kernels refuse this GPU."""
    try:
        yield from rows
    except ConfigError as error:
        yield {"note": str(error)}


def _flash(check: Check, dtype: torch.dtype) -> Iterator[dict]:
    for head_size in (16,) if check.dry else (64, 128, 256):
        row = find_row("flash", check.capability, head_size, name_of(dtype))
        errors = []
        for n, context in ((3, 20), (17, 17)) if check.dry else ((1, 1), (1, 300), (17, 300), (129, 129), (1000, 1000)):
            q = torch.randn(2, n, 6, head_size, device=check.device).to(dtype)
            k, v = (torch.randn(2, context, 2, head_size, device=check.device).to(dtype) for _ in "kv")
            k[:, :, 0] *= torch.linspace(0.1, 3, context, device=check.device)[:, None].to(dtype)  # scores grow
            found, _ = flash_attention(q, k, v, row)
            exact = torch.stack([naive.attention(*(x[b].double() for x in (q, k, v)))[0] for b in range(2)])
            errors.append(_error(found, exact, dtype))
        yield _row("flash", dtype, max(errors), head_size=head_size)


def _paged(check: Check, dtype: torch.dtype) -> Iterator[dict]:
    attend, oracle = body(check, "triton", dtype), PerRequest(naive.attention)
    mixed = [(1, 5), (5, 21), (1, 33)] if check.dry else [(1, 700), (65, 300), (1, 17), (200, 200), (7, 1031), (1, 1)]
    decodes = [(1, 40)] if check.dry else [(1, 5000), (1, 16), (1, 129)]
    shapes = [(4, 2, 16, None)] if check.dry else [(9, 3, 64, None), (32, 8, 128, None)]
    if dtype == check.dtype:  # each shape is three compilations
        shapes += (
            [(4, 2, 16, 24)] if check.dry else [(9, 3, 64, 24), (8, 8, 80, None), (7, 1, 96, None), (4, 2, 256, None)]
        )
    for heads, kv_heads, head_size, window in shapes:
        errors = []
        for requests in (mixed, decodes):
            step = Ragged(check, requests, heads, kv_heads, head_size, dtype, window)
            exact_layer = KVLayer(step.kv_layer.k.double(), step.kv_layer.v.double(), window)
            exact = oracle(step.q.double(), step.k.double(), step.v.double(), exact_layer, step.batch)
            errors.append(_error(step.attend(attend), exact, dtype))
        yield _row("paged attention", dtype, max(errors), heads=heads, head_size=head_size, window=window or 0)


def _fused(check: Check, dtype: torch.dtype) -> Iterator[dict]:
    """In place, so each way gets a copy of its own."""
    fused, plain = FusedOps(), PlainOps()

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=check.device).to(dtype)

    x, update, norm = noise(5, 576), noise(5, 576), RMSNorm(noise(576), 1e-5)
    exact = plain.add_norm(x.double(), update.double(), RMSNorm(norm.weight.double(), 1e-5))[1]
    yield _row("rms_norm", dtype, _error(fused.add_norm(x.clone(), update, norm)[1], exact, dtype))

    gate_up = noise(5, 2 * 1536)
    yield _row("silu_mul", dtype, _error(fused.silu_mul(gate_up), plain.silu_mul(gate_up.double()), dtype))

    stacked, slots = noise(5, 15, 64), torch.tensor([3, 17, 5, 30, 0], device=check.device)
    norms = tuple(RMSNorm(noise(64), 1e-5) for _ in "qk")
    angle = torch.rand(5, 1, 32, device=check.device) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    angles = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    results = []
    for ops, kind in ((fused, dtype), (plain, torch.float64)):
        layer = KVLayer(*torch.zeros(2, 2, 16, 3, 64, dtype=kind, device=check.device))
        normed = tuple(RMSNorm(one.weight.to(kind), 1e-5) for one in norms)
        q, k, v = ops.turn_and_write(
            stacked.clone().to(kind), normed, tuple(x.to(kind) for x in angles), layer, slots, NO_PARTS
        )
        results.append(torch.cat([x.flatten() for x in (q, k, v, layer.k, layer.v)]))
    yield _row("rope_kv_write", dtype, _error(*results, dtype))


def _far_slots(check: Check) -> Iterator[dict]:
    """A cache of more than 2^31 values per layer, used at its far end: a 32-bit offset would wrap."""
    heads, kv_heads, head_size = (4, 2, 16) if check.dry else (8, 8, 128)
    blocks = 8 if check.dry else FAR // (16 * kv_heads * head_size) + 64
    if 3 * 2 * blocks * 16 * kv_heads * head_size * check.dtype.itemsize > 2 * check.free_bytes:
        yield {"kernel": "paged attention far into the cache", "note": "not enough free memory for 2^31 values"}
        return
    step = Ragged(check, [(5, 70), (1, 40)], heads, kv_heads, head_size, blocks=blocks)
    errors = [_error(step.attend(body(check, "triton")), _exact(step), check.dtype)]

    stacked = torch.randn(2, heads + 2 * kv_heads, head_size, device=check.device).to(check.dtype)
    slots = torch.tensor([blocks * 16 - 1, blocks * 16 - 20], device=check.device)
    ones, zeros = (x(2, 1, head_size, device=check.device, dtype=check.dtype) for x in (torch.ones, torch.zeros))
    written = stacked[:, heads : heads + kv_heads].clone()
    FusedOps().turn_and_write(stacked, None, (ones, zeros), step.kv_layer, slots, NO_PARTS)
    errors.append(_error(step.kv_layer.k.flatten(0, 1)[slots], written.double(), check.dtype))
    yield _row("paged attention and KV write far into the cache", check.dtype, max(errors), blocks=blocks)


def _exact(step: Ragged) -> torch.Tensor:
    """The textbook's answer in float32, from a copy of only those pages that the step's requests own."""
    tables = step.batch.block_tables.long()
    used = tables.unique()
    pages = step.pages[:, used].float()
    batch = replace(step.batch, block_tables=torch.searchsorted(used, tables))
    return PerRequest(naive.attention)(step.q.float(), step.k.float(), step.v.float(), KVLayer(*pages), batch)


def _whole_model(check: Check) -> Iterator[dict]:
    """Logits of the fused model against the plain one, in float32, with the engine's attention and the textbook's."""
    torch.manual_seed(1)
    model = random_model(check, "135m", torch.float32, ops=PlainOps())
    prompt = torch.randint(model.config.vocab_size, (24 if check.dry else 300,)).tolist()
    logits = {}
    for name, ops, attention in (("plain", PlainOps(), "naive"), ("fused", FusedOps(), "triton")):
        model.ops = ops
        cache = KVCache(model.config, -(-len(prompt) // 16), 16, torch.float32, check.device)
        batch = Batch.build([prompt], [len(prompt)], [list(range(cache.num_blocks))], 16, device=check.device)
        logits[name] = model.lm_head(model.hidden(batch, cache, body(check, attention, torch.float32)))
    error = (logits["fused"] - logits["plain"]).abs().max() / logits["plain"].abs().max()
    yield {"kernel": "whole model", "dtype": "float32", "largest": float(error) / 1e-3, "ok": bool(error < 1e-3)}


def _graphs(check: Check) -> Iterator[dict]:
    """Tokens of requests whose steps are replayed, chunks beside decodes among them, against those of eager steps."""
    torch.manual_seed(2)
    model = random_model(check, "135m", torch.float32)
    attend = body(check, "triton", torch.float32)
    lengths = (20, 40) if check.dry else (33, 500, 90, 700, 64)
    prompts = [random_prompts(model.config, 1, n)[0] for n in lengths]
    options = {"max_num_batched_tokens": 64 if check.dry else 256}
    engines = [make_engine(model, attend, 800, len(lengths), graphs, **options) for graphs in (False, True)]
    eager, replayed = ([x.outputs[0].token_ids for x in generate(engine, prompts, 16)] for engine in engines)
    shapes = [list(shape) for shape in engines[1].step_graphs.graphs]  # none where a recording failed
    ok = eager == replayed and {rows > requests for rows, requests in shapes} == {True, False}
    yield {"kernel": "step graphs", "dtype": "float32", "shapes": shapes, "largest": 0.0, "ok": ok}


def _error(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest error over what is allowed; infinite where something is not finite."""
    if not found.isfinite().all():
        return float("inf")
    allowed = TOLERANCES[dtype] * (1 + exact.abs())
    return float(((found.double() - exact.double()).abs() / allowed).max())


def _row(kernel: str, dtype: torch.dtype, error: float, **facts) -> dict:
    return {"kernel": kernel, "dtype": name_of(dtype), **facts, "largest": round(error, 4), "ok": error <= 1}
