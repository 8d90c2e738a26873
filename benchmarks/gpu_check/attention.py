"""Attention problems in the engine's own form, pages and batches, that several sections share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from benchmarks.gpu_check.sections import Check
from minillm.attention import choose_attention
from minillm.batch import Batch
from minillm.errors import ConfigError
from minillm.kv_cache import KVLayer

BLOCK_SIZE = 16


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def head_counts(check: Check) -> tuple[int, int]:
    """Query and K/V heads of Llama's 8B, or few."""
    return (4, 2) if check.dry else (32, 8)


def bodies(check: Check, names: Iterable[str]) -> dict[str, Callable]:
    """Those of the named bodies that run here, and no others: Triton's needs compute capability 8.0."""
    found = {}
    for name in names:
        with contextlib.suppress(ConfigError):
            found[name] = body(check, name)
    return found


def body(check: Check, name: str, dtype: torch.dtype | None = None) -> Callable:
    """An attention body of the engine by its name."""
    return choose_attention(check.device, dtype or check.dtype, name)[0]


class Ragged:
    """Requests (rows in this step, context after it) with random queries and pages in random order.

    Pages that no request owns, and rows behind a context, are NaN. `blocks` pages exist at least.
    """

    def __init__(
        self,
        check: Check,
        requests: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype | None = None,
        window: int | None = None,
        blocks: int = 0,
    ):
        dtype, device = dtype or check.dtype, check.device
        needed = [-(-context // BLOCK_SIZE) for _, context in requests]
        total = max(sum(needed) + 1, blocks)
        order = torch.randperm(total)[: sum(needed)] if blocks == 0 else torch.arange(total - sum(needed), total)
        tables = [table.tolist() for table in order.split(needed)]
        self.batch = Batch.build(
            [[0] * n for n, _ in requests], [context for _, context in requests], tables, BLOCK_SIZE, device=device
        )
        self.pages = torch.empty(2, total, BLOCK_SIZE, kv_heads, head_size, dtype=dtype, device=device)
        if blocks == 0:
            self.pages.fill_(float("nan"))
        self.kv_layer = KVLayer(self.pages[0], self.pages[1], window)
        rows = sum(n for n, _ in requests)
        self.q = torch.randn(rows, heads, head_size, device=device).to(dtype)
        self.k, self.v = (torch.empty(rows, kv_heads, head_size, dtype=dtype, device=device) for _ in "kv")
        start = 0
        for (n, context), table in zip(requests, tables, strict=True):
            slots = (
                (torch.tensor(table)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:context].to(device)
            )
            keys, values = (torch.randn(context, kv_heads, head_size, device=device).to(dtype) for _ in "kv")
            self.kv_layer.write(keys, values, slots)
            self.k[start : start + n], self.v[start : start + n] = keys[context - n :], values[context - n :]
            start += n

    def attend(self, attend: Callable) -> torch.Tensor:
        return attend(self.q, self.k, self.v, self.kv_layer, self.batch)

    def read_bytes(self) -> int:
        """Bytes of K and V that the step has to read once."""
        return 2 * sum(self.batch.context_lens) * self.pages[0, 0, 0].nbytes
