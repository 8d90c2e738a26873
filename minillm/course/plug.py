"""A learner's small function as a part of a running engine.

An exercise asks for the simplest form of a part: attention of one sequence, the slots of one request, the plan of
one step. Here each becomes what the engine takes as a constructor argument, so nothing is patched:

    Engine(..., attend=plug.attention(my_attention), make_batch=plug.slot_mapping(my_slots))
    BlockPool(..., hash_fn=plug.hash_block(my_hash))
    plug.prefix_table(MyTable)(num_blocks, block_size)          # a BlockPool
    plug.schedule(my_schedule)(config, block_pool, max_model_len)      # a Scheduler

Each part counts its `calls`, so a check can tell that it ran, and refuses by name a result that does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from minillm.attention.mask import visible
from minillm.attention.per_request import PerRequest
from minillm.batch import Batch
from minillm.course.plug_prefix import PrefixPool
from minillm.course.plug_schedule import Candidate, PluggedScheduler
from minillm.errors import GradeError

__all__ = [
    "Candidate",
    "Part",
    "attention",
    "hash_block",
    "merge",
    "prefix_table",
    "schedule",
    "slot_mapping",
    "slots_of_runs",
]


class Part:
    """A learner's function, and how often the engine has called it."""

    def __init__(self, fn: Callable):
        self.fn = fn
        self.calls = 0

    def ask(self, *inputs):
        self.calls += 1
        return self.fn(*inputs)

    def tensor(self, shape: tuple[int, ...], *inputs) -> torch.Tensor:
        """The function's answer, which must be a tensor of this shape: a wrong one could be broadcast unseen."""
        out = self.ask(*inputs)
        if not isinstance(out, torch.Tensor) or tuple(out.shape) != tuple(shape):
            found = f"shape {list(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
            raise GradeError(f"{self.fn.__name__} returned {found}; the engine needs a tensor of shape {list(shape)}")
        return out


# ---- attention -----------------------------------------------------------------------------------


class _Attention(Part):
    def __init__(self, fn: Callable, one_sequence: Callable):
        super().__init__(fn)
        self._body = PerRequest(None, output=lambda *inputs: one_sequence(self, *inputs))

    def __call__(self, q, k, v, kv_layer, batch) -> torch.Tensor:
        return self._body(q, k, v, kv_layer, batch)


def attention(fn: Callable, mask: Callable | None = None) -> _Attention:
    """An attention body out of dense causal attention of one sequence.

    fn    (q [n, H, D], k [S, Hkv, D], v [S, Hkv, D]) -> out [n, H, D]; the last query sees every key
    mask  (n, S, window) -> bool [n, S], a function or a Part; when given, fn gets the mask as its fourth argument
    """
    if mask is not None and not isinstance(mask, Part):
        mask = Part(mask)

    def one_sequence(part: Part, q, k, v, window):
        n, num_keys = q.shape[0], k.shape[0]
        if mask is not None:
            seen = mask.tensor((n, num_keys), n, num_keys, window).to(q.device)
            return part.tensor(q.shape, q, k, v, seen)
        if window is not None and window < num_keys:
            raise GradeError(f"{fn.__name__} sees all keys, but this layer has a window of {window}: give a mask too")
        return part.tensor(q.shape, q, k, v)

    return _Attention(fn, one_sequence)


def merge(fn: Callable, num_keys: int = 32) -> _Attention:
    """An attention body that cuts the keys into pieces of `num_keys` and joins the results with `fn`.

    fn  (out_a [n, H, D], lse_a [n, H], out_b, lse_b) -> (out, lse): attention over the keys of a and b together.
        Where a piece shows a row no key, its out is 0 and its lse -inf.
    """

    def one_sequence(part: Part, q, k, v, window):
        n, total = q.shape[0], k.shape[0]
        queries = torch.arange(total - n, total, device=q.device)
        out = lse = None
        for start in range(0, total, num_keys):
            piece = slice(start, min(start + num_keys, total))
            seen = visible(queries, torch.arange(piece.start, piece.stop, device=q.device), window)
            more = _piece(q, k[piece], v[piece], seen)
            out, lse = more if out is None else part.ask(out, lse, *more)
        if out.shape != q.shape:
            raise GradeError(f"{fn.__name__} returned out of shape {list(out.shape)}, expected {list(q.shape)}")
        return out.to(q.dtype)

    return _Attention(fn, one_sequence)


def _piece(q, k, v, seen) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a part of the keys: (out [n, H, D], lse [n, H]) in float32, float64 for float64 inputs."""
    q = q if q.dtype == torch.float64 else q.float()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).to(q.dtype) for x in (k, v))
    scores = torch.einsum("nhd,shd->nhs", q, k) / math.sqrt(q.shape[2])
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return torch.einsum("nhs,shd->nhd", weights, v), lse


# ---- pages, prefix cache, scheduler ----------------------------------------------------------------


class _SlotMapping(Part):
    def __call__(self, step, block_size: int, device: torch.device | str = "cpu") -> Batch:
        """Batch.from_step, with the slots that the learner's function gives, request by request."""
        batch = Batch.from_step(step, block_size, device)
        rows, slots = batch.positions.split(batch.query_lens), list(batch.slot_mapping.split(batch.query_lens))
        for i in range(len(step.scheduled)):  # behind them stands padding, which has no slots
            table = batch.block_tables[i].long()
            slots[i] = self.tensor(rows[i].shape, table, rows[i], block_size).to(device, torch.int64)
        return replace(batch, slot_mapping=torch.cat(slots))


def slot_mapping(fn: Callable) -> _SlotMapping:
    """A `make_batch` of the engine whose rows go where `fn` says.

    fn  (block_table [blocks] int64, positions [n] int64, block_size) -> slots [n]: block x block_size + row
    """
    return _SlotMapping(fn)


def slots_of_runs(fn: Callable) -> Callable:
    """What `slot_mapping` takes, out of a function that tells where a chunk lies.

    fn  (block table as a list, first position, number of tokens, block_size) -> [(first slot, rows), ...], in order
    """

    def slots(block_table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
        runs = fn(block_table.tolist(), int(positions[0]), len(positions), block_size)
        return torch.cat([torch.arange(slot, slot + rows) for slot, rows in runs])

    return slots


class _HashBlock(Part):
    def __call__(self, parent_hash: int, tokens: tuple[int, ...]) -> int:
        key = self.ask(parent_hash, tokens)
        if not isinstance(key, int):
            raise GradeError(f"{self.fn.__name__} returned {type(key).__name__}; the block pool needs an int")
        return key


def hash_block(fn: Callable) -> _HashBlock:
    """A `hash_fn` of the block pool: fn (parent's hash, tokens of one full block) -> int; the first parent is 0."""
    return _HashBlock(fn)


class _PrefixTable(Part):
    """Its calls are lookups; `blocks_found` counts the blocks that they gave."""

    def __init__(self, make_table: Callable):
        super().__init__(make_table)
        self.blocks_found = 0

    def __call__(self, num_blocks: int, block_size: int, hash_fn: Callable | None = None) -> PrefixPool:
        return PrefixPool(self.fn, num_blocks, block_size, hash_fn, self._count)

    def _count(self, blocks: list[int]) -> None:
        self.calls += 1
        self.blocks_found += len(blocks)


def prefix_table(make_table: Callable) -> _PrefixTable:
    """What builds a BlockPool that finds beginnings with an object of the learner's.

    make_table  (block_size, hash_fn) -> the object: find(ids) -> blocks of the longest listed beginning, the last token
                left out; add(ids, blocks) whose K and V are computed, whole blocks of the text from its first token
                on; forget(block), which may never have been added
    """
    return _PrefixTable(make_table)


class _Schedule(Part):
    def __call__(self, config, block_pool, max_model_len: int) -> PluggedScheduler:
        return PluggedScheduler(self.ask, config, block_pool, max_model_len)


def schedule(fn: Callable) -> _Schedule:
    """What builds a Scheduler that plans each step with a pure function: `schedule(fn)(config, pool, max_model_len)`.

    fn  (waiting, running, budget, free_blocks) -> [(id, n), ...]; see plug_schedule.py for what it sees and may answer
    """
    return _Schedule(fn)
