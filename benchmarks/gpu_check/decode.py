"""Decode attention: one query per request against its whole context, so the bytes of K and V are the work.

Ours reads pages; the library reads dense tensors of equal lengths, the best case that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu_check.attention import Ragged, bodies, head_counts, name_of
from benchmarks.gpu_check.sections import Check
from benchmarks.gpu_check.tell import with_rates
from minillm.errors import ConfigError
from minillm.kernels.launch import find_row
from minillm.kernels.paged_attention import paged_attention


def rows(check: Check) -> Iterator[dict]:
    """TB/s over batch and context. `sdpa dense` gets its K and V side by side, copied beforehand."""
    watch = check.stopwatch(repeats=15)
    heads, kv_heads = head_counts(check)
    ours = bodies(check, ("triton",))
    for head_size in (16,) if check.dry else (128, 64):
        for batch in (1, 3) if check.dry else (1, 8, 64):
            for context in (40,) if check.dry else (1024, 4096, 16384, 65536):
                if 5 * batch * context * kv_heads * head_size * 4 > check.free_bytes:
                    continue
                step = Ragged(check, [(1, context)] * batch, heads, kv_heads, head_size)
                tried = {name: lambda step=step, attend=attend: step.attend(attend) for name, attend in ours.items()}
                times = watch.compare(tried | {"sdpa dense": dense(step, batch, context)})
                yield with_rates(
                    {
                        "head_size": head_size,
                        "batch": batch,
                        "context": context,
                        "times": times,
                        "work": {"bytes": step.read_bytes()},
                        "against": "sdpa dense",
                    }
                )


def dense(step: Ragged, batch: int, context: int) -> Callable:
    """The library's call for the same step."""
    tables = step.batch.block_tables.long()
    k, v = (pages[tables].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for pages in step.pages)
    q = step.q[:, :, None]  # [B, H, 1, D]
    group = q.shape[1] // k.shape[1]
    if step.q.device.type == "cuda":
        return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return lambda: F.scaled_dot_product_attention(q, *(x.repeat_interleave(group, 1) for x in (k, v)))


def eight_bit(check: Check) -> Iterator[dict]:
    """K and V in 8 bits with a scale per row and head, against the model's dtype: bytes saved and error made."""
    watch = check.stopwatch(repeats=15)
    heads, kv_heads = head_counts(check)
    head_size, batch, context = (16, 2, 40) if check.dry else (128, 64, 8192)
    step = Ragged(check, [(1, context)] * batch, heads, kv_heads, head_size)
    step.pages.nan_to_num_()  # a scale of NaN would hide the rows beside it
    kinds = {check.dtype: (step.kv_layer.k, step.kv_layer.v, None, None)}
    for dtype in (torch.int8, torch.float8_e4m3fn):
        k, k_scale = _quantized(step.kv_layer.k, dtype)
        v, v_scale = _quantized(step.kv_layer.v, dtype)
        kinds[dtype] = (k, v, k_scale, v_scale)
    outs, bodies, notes = {}, {}, {}
    for dtype, (k, v, k_scale, v_scale) in kinds.items():
        name = name_of(dtype)
        try:
            row = find_row("paged_attention", check.capability, head_size, name, "decode")
        except ConfigError as error:
            notes[name] = {"error": str(error)}
            continue
        outs[name], lse = torch.empty_like(step.q), torch.empty(step.q.shape[:2], device=check.device)
        tables = (step.batch.block_tables, step.batch.query_start_loc, step.batch.seq_lens, row)
        bodies[name] = lambda o=outs[name], lse=lse, k=k, v=v, tables=tables, scales=(k_scale, v_scale): (
            paged_attention(o, lse, step.q, k, v, *tables, k_scale=scales[0], v_scale=scales[1])
        )
    times = watch.compare(bodies) | notes
    exact = outs[name_of(check.dtype)].float()
    errors = {name: round(float((out.float() - exact).norm() / exact.norm()), 5) for name, out in outs.items()}
    for name, time in times.items():
        values, scale = (1, 4 / head_size) if name != name_of(check.dtype) else (check.dtype.itemsize, 0)
        num_bytes = int(2 * batch * context * kv_heads * head_size * (values + scale))
        row = {"kv": name, "batch": batch, "context": context, "relative_error": errors.get(name)}
        yield with_rates(row | {"times": {"ours": time}, "work": {"bytes": num_bytes}})


def _quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [P, block_size, Hkv, D] as 8-bit values and their scales [P, block_size, Hkv] float32."""
    largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.float().abs().amax(-1).clamp(min=1e-6) / largest
    values = x.float() / scale[..., None]
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale
