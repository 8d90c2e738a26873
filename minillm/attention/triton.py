"""Attention by our own Triton kernels: a launch for prefill chunks and one for decodes, over the paged cache.

What a kernel does stands in `minillm/kernels/`; here a step is taken apart. Requests of a few queries go to the
decode tiles, split over their keys when they are few and long; all others go to the prefill tiles. Both launches
fill rows of one output, so the order inside the batch does not matter. Runs on GPUs of compute capability 8.0 and
up, and on a CPU under Triton's interpreter. Triton itself is imported when the body is made. Built in lesson 12.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from minillm.attention.mask import check_batch, check_inputs
from minillm.batch import Batch
from minillm.errors import ConfigError, ShapeError
from minillm.kernels.launch import LaunchRow, find_row
from minillm.kv_cache import KVLayer

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED = (8, 9)
"""The compute capability whose launch rows the interpreter takes; it runs those of every GPU."""


class TritonAttention:
    """A body of the contract for CUDA tensors, or for CPU tensors under TRITON_INTERPRET=1.

    rows        launch rows by phase ("prefill", "decode", "split") in place of the table's
    num_splits  parts that the keys of a decode are cut into, in place of a number chosen for each step
    sinks       first keys of a request that layers with a window see besides it

    Raises ConfigError where the kernels do not run; `why_not` says why.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        rows: dict[str, LaunchRow] | None = None,
        num_splits: int | None = None,
        sinks: int = 0,
    ):
        device = torch.device(device)
        self._capability = _check_runs(device, dtype)
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self._rows = rows or {}
        self._num_splits = num_splits
        self.sinks = sinks

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> torch.Tensor:
        return self.attend_with_lse(q, k, v, kv_layer, batch)[0]

    def attend_with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layer: KVLayer, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, H, D], lse [T, H] float32). K and V are read from the pages, where they already are."""
        from minillm.kernels.paged_attention import queries_per_tile

        check_batch(q, k, v, kv_layer, batch)
        if kv_layer.k.stride(-1) != 1 or kv_layer.v.stride(-1) != 1:
            raise ShapeError("the pages' last axis must be contiguous, and it is strided; lay the pages out [..., D]")
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        decode = self._row("decode", kv_layer)
        few = queries_per_tile(decode, q.shape[1] // kv_layer.k.shape[2])
        decodes = [request for request, n in enumerate(batch.query_lens) if 0 < n <= few]

        if any(n > few for n in batch.query_lens):
            row = self._row("prefill", kv_layer)
            lists = self._key_tiles(q, k, kv_layer, batch, row, few)
            self._launch(out, lse, q, kv_layer, batch, row, fewest_queries=few + 1, **lists)
        num_splits = self._choose_num_splits(kv_layer, batch, decodes) if decodes else 1
        if num_splits > 1:
            self._split(out, lse, q, kv_layer, batch, decodes, num_splits)
        elif decodes:
            self._launch(out, lse, q, kv_layer, batch, decode)
        return out, lse

    def _key_tiles(self, q, k, kv_layer: KVLayer, batch: Batch, row: LaunchRow, few: int) -> dict:
        """Options of the kernel that say which key tiles a prefill visits: all here, fewer in sparse/kernel.py."""
        return {}

    def _split(self, out, lse, q, kv_layer, batch, decodes, num_splits):
        from minillm.kernels.split_kv import merge_splits

        queries = max(batch.query_lens[request] for request in decodes)
        parts = (num_splits, batch.num_requests, queries, q.shape[1])
        part_out = torch.empty((*parts, q.shape[2]), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
        row = self._row("split", kv_layer)
        self._launch(part_out, part_lse, q, kv_layer, batch, row, num_splits=num_splits, queries_per_part=queries)
        row = find_row("merge_splits", self._capability, q.shape[2], _name(q.dtype), "split")
        merge_splits(out, lse, part_out, part_lse, batch.query_start_loc, row)

    def _choose_num_splits(self, kv_layer: KVLayer, batch: Batch, decodes: list[int]) -> int:
        from minillm.kernels.split_kv import choose_num_splits

        if self._num_splits is not None:
            return self._num_splits
        longest = max(batch.context_lens[request] for request in decodes)
        if kv_layer.window is not None:
            longest = min(longest, kv_layer.window)
        return choose_num_splits(len(decodes) * kv_layer.k.shape[2], longest, self._num_sms)

    def _launch(self, out, lse, q, kv_layer: KVLayer, batch: Batch, row: LaunchRow, **options) -> None:
        from minillm.kernels.paged_attention import paged_attention

        tables = (batch.block_tables, batch.query_start_loc, batch.seq_lens)
        options |= {"window": kv_layer.window, "sinks": self.sinks if kv_layer.window else 0}
        options |= {"k_scale": kv_layer.k_scale, "v_scale": kv_layer.v_scale}
        paged_attention(out, lse, q, kv_layer.k, kv_layer.v, *tables, row, **options)

    def _row(self, phase: str, kv_layer: KVLayer) -> LaunchRow:
        if phase in self._rows:
            return self._rows[phase]
        pages = kv_layer.k
        return find_row("paged_attention", self._capability, pages.shape[3], _name(pages.dtype), phase)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, row: LaunchRow | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one sequence: q [n, H, D], k and v [S, Hkv, D] -> (out [n, H, D], lse [n, H]).

    By the dense kernel of lesson 08; with a window, or a head size that it does not take, by the paged one over pages
    of a single row. `row` stands in place of the table's.
    """
    check_inputs(q, k, v, window)
    capability = _check_runs(q.device, q.dtype)
    head_size = q.shape[2]
    if window is None and head_size >= 16 and head_size & (head_size - 1) == 0:
        from minillm.kernels.flash import flash_attention

        row = row or find_row("flash", capability, head_size, _name(q.dtype), "prefill")
        out, lse = flash_attention(q[None], k[None], v[None], row)
        return out[0], lse[0]
    from minillm.kernels.paged_attention import paged_attention

    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    table = torch.arange(len(k), dtype=torch.int32, device=q.device)[None]
    start_loc, length = (torch.tensor(x, dtype=torch.int32, device=q.device) for x in ([0, len(q)], [len(k)]))
    row = row or find_row("paged_attention", capability, head_size, _name(q.dtype), "prefill")
    paged_attention(out, lse, q, k[:, None], v[:, None], table, start_loc, length, row, window=window)
    return out, lse


def why_not(kind: str, dtype: torch.dtype, capability: tuple[int, int]) -> str:
    """Why the kernels do not run for queries of `dtype` on a "cuda" or "cpu" device, or "" if they do."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton (pip install triton, on Linux); without it use 'sdpa' or 'cpu'"
    if kind == "cpu" and not interpreted():
        return (
            "runs on a CPU in Triton's interpreter only: set TRITON_INTERPRET=1 before Python starts (slow, for tests "
            "and lessons), or use attention='cpu'"
        )
    if kind == "cpu" and dtype == torch.bfloat16:
        return "cannot interpret bfloat16 (the interpreter multiplies bit patterns); use dtype='float32' or 'float16'"
    if dtype not in QUERY_DTYPES:
        return f"computes float32, float16 and bfloat16, not {dtype}; use attention='sdpa'"
    if kind == "cuda" and capability < (8, 0):
        major, minor = capability
        return (
            f"needs compute capability 8.0, this GPU has {major}.{minor}: since Triton 3.3 tl.dot has no Tensor Cores "
            "below it; use attention='sdpa'"
        )
    return ""


def interpreted() -> bool:
    """Did this process import the kernels for the interpreter? TRITON_INTERPRET has to be set before that."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    from triton import JITFunction

    from minillm.kernels.flash import flash_attention_kernel

    return not isinstance(flash_attention_kernel, JITFunction)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU; of the interpreter's launch rows on a CPU; (0, 0) for a GPU that PyTorch does not see."""
    if device.type == "cpu":
        return INTERPRETED
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def _check_runs(device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    capability = compute_capability(device)
    problem = why_not(device.type, dtype, capability)
    if problem:
        raise ConfigError(f"attention='triton' {problem}")
    return capability


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
