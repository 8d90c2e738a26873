"""K and V in 8 bits: is what the fused kernel writes and the paged kernel reads right, and what do fewer bytes save?

Rows are checked against float64: those of the plain steps, which may differ by half a step, and attention over what
was read back. Then the writer and the decode kernel are timed beside the model's dtype, and last the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_check.attention import BLOCK_SIZE, Ragged, body, head_counts, name_of
from benchmarks.gpu_check.correctness import TOLERANCES
from benchmarks.gpu_check.end_to_end import NEW_TOKENS, compare
from benchmarks.gpu_check.models import make_engine, random_model
from benchmarks.gpu_check.sections import Check
from benchmarks.gpu_check.tell import with_rates
from minillm.attention import naive
from minillm.attention.per_request import PerRequest
from minillm.attention.triton import TritonAttention
from minillm.eight_bit import LARGEST, bytes_per_value
from minillm.kernels.fused_ops import FusedOps
from minillm.kv_cache import KVLayer
from minillm.ops import PlainOps
from minillm.profiler import NO_PARTS

NAN = float("nan")


def rows(check: Check) -> Iterator[dict]:
    if not check.dry and check.capability < (8, 0):
        yield {"note": "the Triton kernels need compute capability 8.0"}
        return
    kinds = [torch.int8] + [torch.float8_e4m3fn] * (not check.dry and check.capability >= (8, 9))
    if torch.float8_e4m3fn not in kinds:
        yield {"note": "fp8 needs a GPU of compute capability 8.9; Triton's interpreter does not round it as one does"}
    for kind in kinds:
        yield from _written_and_read(check, kind)
    yield from _writer(check, kinds)
    yield from _decode(check, kinds)
    yield _engine(check, kinds)


def _written_and_read(check: Check, kind: torch.dtype) -> Iterator[dict]:
    """A chunk of a prompt and decodes over pages that the fused kernel filled, padding among the rows."""
    heads, kv_heads = head_counts(check)
    head_size = 16 if check.dry else 64  # that of the 1B model below, so the kernels are compiled once
    requests = [(5, 21), (1, 33)] if check.dry else [(200, 700), (1, 1031), (1, 17)]
    step = Ragged(check, requests, heads, kv_heads, head_size)
    total = step.batch.context_lens
    stacked = torch.randn(sum(total), heads + 2 * kv_heads, head_size, device=check.device).to(check.dtype)
    angle = torch.rand(sum(total), 1, head_size // 2, device=check.device) * 6
    cos, sin = angle.cos().to(check.dtype), angle.sin().to(check.dtype)
    angles = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    slots = torch.cat([_slots(table, n) for table, n in zip(step.batch.block_tables.long(), total, strict=True)])
    padded = slots.clone()
    padded[-1] = -1

    layer = _layer(step.kv_layer.k.shape, kind, check)
    FusedOps().turn_and_write(stacked.clone(), None, angles, layer, padded, NO_PARTS)
    untouched = bool(layer.k_scale.flatten(0, 1)[slots[-1]].isnan().all())
    FusedOps().turn_and_write(stacked[-1:].clone(), None, tuple(x[-1:] for x in angles), layer, slots[-1:], NO_PARTS)
    exact = KVLayer(*torch.zeros(2, *layer.k.shape, dtype=torch.float64, device=check.device))
    turned, _, _ = PlainOps().turn_and_write(
        stacked.double(), None, tuple(x.double() for x in angles), exact, slots, NO_PARTS
    )
    errors = []
    for codes, scale, pages in ((layer.k, layer.k_scale, exact.k), (layer.v, layer.v_scale, exact.v)):
        found, wanted = ((x.flatten(0, 1)[slots]) for x in (_read(codes, scale), pages))
        largest = wanted.abs().amax(-1, keepdim=True)
        step_error = largest / 254 if kind == torch.int8 else torch.maximum(wanted.abs() / 16, largest / 2**18)
        allowed = step_error + torch.finfo(check.dtype).eps * largest + 1e-6
        errors.append(float(((found - wanted).abs() / allowed).max()))
    yield _row("rope_kv_write", kind, max(errors), untouched, rows=len(slots), head_size=head_size)

    ends = torch.tensor(total).cumsum(0).tolist()
    step.q = torch.cat([turned[end - n : end] for end, (n, _) in zip(ends, requests, strict=True)]).to(check.dtype)
    step.kv_layer = layer
    found = step.attend(TritonAttention(check.dtype, check.device, num_splits=1))
    step.kv_layer = KVLayer(_read(layer.k, layer.k_scale), _read(layer.v, layer.v_scale))
    oracle = PerRequest(naive.attention)
    rounded = oracle(step.q.double(), step.k.double(), step.v.double(), step.kv_layer, step.batch)
    allowed = TOLERANCES[check.dtype] * (1 + rounded.abs())
    error = float(((found.double() - rounded).abs() / allowed).nan_to_num(NAN).max())
    step.kv_layer = exact
    unrounded = oracle(step.q.double(), step.k.double(), step.v.double(), exact, step.batch)
    off = float((found.double() - unrounded).norm() / unrounded.norm())
    yield _row("paged attention over it", kind, error, True, relative_error=round(off, 5), head_size=head_size)


def _writer(check: Check, kinds: list[torch.dtype]) -> Iterator[dict]:
    """Rotation and KV write: `work` is what has to move, for the model's dtype and for 8 bits."""
    heads, kv_heads = head_counts(check)
    head_size, watch = 16 if check.dry else 64, check.stopwatch(repeats=15)
    for tokens in (5,) if check.dry else (64, 2048):
        stacked = torch.randn(tokens, heads + 2 * kv_heads, head_size, device=check.device).to(check.dtype)
        angles = tuple(torch.rand(tokens, 1, head_size, device=check.device).to(check.dtype) for _ in range(2))
        slots = torch.arange(tokens, device=check.device)
        shape = (-(-tokens // BLOCK_SIZE), BLOCK_SIZE, kv_heads, head_size)
        tried = {}
        for kind in (check.dtype, *kinds):
            layer = _layer(shape, kind, check)
            for name, ops in (("fused", FusedOps()), ("pytorch", PlainOps())):
                tried[f"{name} {name_of(kind)}"] = lambda ops=ops, layer=layer, where=(angles, stacked, slots): (
                    ops.turn_and_write(where[1], None, where[0], layer, where[2], NO_PARTS)
                )
        times = watch.compare(tried)
        for kind in (check.dtype, *kinds):
            name = name_of(kind)
            written = bytes_per_value(kind, head_size)
            moved = tokens * head_size * ((2 * heads + 3 * kv_heads) * check.dtype.itemsize + 2 * kv_heads * written)
            row = {"step": "rotation and KV write", "kv": name, "tokens": tokens, "against": f"pytorch {name}"}
            its = {x: times[x] for x in (f"fused {name}", f"pytorch {name}")}
            yield with_rates(row | {"times": its, "work": {"bytes": round(moved)}})


def _decode(check: Check, kinds: list[torch.dtype]) -> Iterator[dict]:
    """One decode of many requests over long contexts: bytes saved and error made."""
    heads, kv_heads = head_counts(check)
    head_size, batch, context = (16, 2, 40) if check.dry else (128, 64, 8192)
    step = Ragged(check, [(1, context)] * batch, heads, kv_heads, head_size)
    attend, layers = body(check, "triton"), {name_of(check.dtype): step.kv_layer}
    for kind in kinds:
        layers[name_of(kind)] = layer = _layer(step.kv_layer.k.shape, kind, check)
        for table in step.batch.block_tables.long():
            slots = _slots(table, context)
            layer.write(*step.kv_layer.read_rows(slots), slots)
    tried = {
        name: lambda layer=layer: attend(step.q, step.k, step.v, layer, step.batch) for name, layer in layers.items()
    }
    outs = {name: run().float() for name, run in tried.items()}
    times = check.stopwatch(repeats=15).compare(tried)
    best = outs[name_of(check.dtype)]
    for kind in (check.dtype, *kinds):
        name = name_of(kind)
        num_bytes = round(2 * batch * context * kv_heads * head_size * bytes_per_value(kind, head_size))
        off = round(float((outs[name] - best).norm() / best.norm()), 5)
        row = {"kv": name, "batch": batch, "context": context, "head_size": head_size, "relative_error": off}
        yield with_rates(row | {"times": {"ours": times[name]}, "work": {"bytes": num_bytes}})


def _engine(check: Check, kinds: list[torch.dtype]) -> dict:
    """Seconds per output token of the 1B model with as much K and V in its steps as weights, in CUDA graphs."""
    n, batch = (20, 2) if check.dry else (4096, 32 if check.free_bytes > 40e9 else 8)
    model, attend = random_model(check, "1b"), body(check, "triton")
    engines = {
        name_of(kind): make_engine(model, attend, n + NEW_TOKENS, batch, with_graphs=True, kv_dtype=kind)
        for kind in (check.dtype, *kinds)
    }
    return compare(check, "1b", "tpot", n, batch, engines, repeats=2, against=name_of(check.dtype))


def _layer(shape: tuple[int, ...], kind: torch.dtype, check: Check) -> KVLayer:
    """Pages [P, block_size, Hkv, D] in which nothing was written yet: NaN, in 8 bits through their scales."""
    if kind not in LARGEST:
        return KVLayer(*torch.full((2, *shape), NAN, dtype=kind, device=check.device))
    codes = torch.zeros(2, *shape, dtype=torch.int8, device=check.device).view(kind)
    return KVLayer(*codes, None, *torch.full((2, *shape[:-1]), NAN, device=check.device), check.dtype)


def _slots(table: torch.Tensor, length: int) -> torch.Tensor:
    """The slots of the first `length` tokens of a request whose blocks are `table`."""
    position = torch.arange(length, device=table.device)
    return table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def _read(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes * scale in float64."""
    return codes.float().double() * scale.double()[..., None]


def _row(kernel: str, kind: torch.dtype, error: float, also: bool, **facts) -> dict:
    """`largest` is the largest error over what is allowed; NaN is not ok."""
    return {"kernel": kernel, "kv": name_of(kind), **facts, "largest": round(error, 4), "ok": error <= 1 and also}
