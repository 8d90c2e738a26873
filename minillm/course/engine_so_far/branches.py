"""Several questions about one text, which is read once: tables that share its pages, and one step for all answers.

    told = branches(llm).answers(text, questions, 16, stop)   # reads my_minillm/; own={...} takes these functions
    told.answers, told.num_blocks, told.num_copies

Three parts can be exchanged: a pool of pages that texts share, one step of several texts over their pages, and the
runs of memory that a chunk fills. The layers are those of `textbook.py`. It is there for reading and for a learner's
functions; the engine shares pages through its prefix cache, and sees to many requests that come and end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minillm.attention import naive
from minillm.course import mine
from minillm.course.engine_so_far import textbook
from minillm.course.plug import Part, slots_of_runs
from minillm.errors import GradeError


class SharedPages:
    """Which blocks belong to which table, where texts share them until one of them writes."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.unused = list(range(num_blocks))
        self.readers = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self.unused)

    def grow(self, table: list[int], length: int, n: int) -> list[tuple[int, int]]:
        """Room for n tokens behind the `length` that `table` holds, in place; returns the copies (src, dst) due before.

        Raises ValueError, and changes nothing, where more blocks are needed than are free.
        """
        torn = length % self.block_size > 0 and self.readers[table[-1]] > 1
        needed = -(-(length + n) // self.block_size) - len(table) + torn
        if needed > self.num_free:
            raise ValueError(f"{needed} blocks are needed and {self.num_free} are free: end a text first")
        new = [self.unused.pop() for _ in range(needed)]
        for block in new:
            self.readers[block] = 1
        copies = []
        if torn:
            copies = [(table[-1], new[0])]
            self.readers[table.pop()] -= 1
        table += new
        return copies

    def fork(self, table: list[int]) -> list[int]:
        """A table of the same text in the same blocks."""
        for block in table:
            self.readers[block] += 1
        return list(table)

    def free(self, table: list[int]) -> None:
        """This table ends. Raises ValueError, and frees nothing, if one of its blocks is free already."""
        if any(self.readers[block] < 1 for block in table):
            raise ValueError(f"a block of {table} is free already: each table is freed once")
        for block in table:
            self.readers[block] -= 1
            if self.readers[block] == 0:
                self.unused.append(block)


def decode_pages(q, k, v, memory, tables, lengths) -> torch.Tensor:
    """One new token of each of B texts: q [B, H, D], k and v [B, Hkv, D] -> out [B, H, D].

    memory   [2, P, block_size, Hkv, D], keys and values; the new rows are written into it
    tables   [B, width] blocks of each text; what stands behind a text's last block is not followed
    lengths  [B] rows of each text that are there before
    """
    B, heads, size = q.shape
    at = tables[torch.arange(B, device=q.device), lengths // memory.shape[2]], lengths % memory.shape[2]
    memory[0, *at], memory[1, *at] = k, v
    keys, values = (pages[tables].flatten(1, 2) for pages in memory)  # [B, S, Hkv, D]
    hidden = torch.arange(keys.shape[1], device=q.device) > lengths[:, None]
    values = values.masked_fill(hidden[:, :, None, None], 0.0)  # a weight of 0 does not remove NaN
    scores = torch.einsum("bkgd,bskd->bkgs", q.unflatten(1, (k.shape[1], -1)), keys) / math.sqrt(size)
    weights = scores.masked_fill(hidden[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("bkgs,bskd->bkgd", weights, values).reshape(B, heads, size)


def slot_runs(table: list[int], start: int, n: int, block_size: int) -> list[tuple[int, int]]:
    """Where positions start..start+n-1 of a text lie: (first slot, rows) of each run of memory, as few as there are.

    Raises ValueError for positions that the table does not reach.
    """
    runs, end, reach = [], start + n, len(table) * block_size
    if end > reach:
        raise ValueError(f"positions up to {end - 1} do not fit: the table reaches {reach} rows, so grow it first")
    for i in range(start // block_size, -(-end // block_size)):
        first, last = max(start, i * block_size), min(end, (i + 1) * block_size)
        slot, rows = table[i] * block_size + first % block_size, last - first
        if runs and sum(runs[-1]) == slot:
            slot, before = runs.pop()
            rows += before
        runs.append((slot, rows))
    return runs


REFERENCE = {"SharedPages": SharedPages, "decode_pages": decode_pages, "slot_runs": slot_runs}


class Told(NamedTuple):
    """Greedy answers, one per question; blocks in use at the end of the last one; blocks copied before a write."""

    answers: list[list[int]]
    num_blocks: int
    num_copies: int


class Branches:
    """The weights of a loaded model, multiplied by the blocks of the textbook, over pages of `block_size` rows.

    own  functions by name, also those of the textbook; the reference stands in where one is missing or None

    Raises GradeError for a model that the textbook does not describe, or that has a window.
    """

    def __init__(self, model, own: Mapping[str, Callable | None], num_blocks: int = 64, block_size: int = 16):
        config, reason = model.config, textbook.not_in_the_textbook(model)
        if any(config.layer_window(i) for i in range(len(model.layers))):
            reason = reason or "it has a window, and decode_pages sees all of a text"
        if reason:
            raise GradeError(f"the textbook model cannot stand in for this one: {reason}")
        self._model, self._weights = model, [textbook.layer_weights(layer) for layer in model.layers]
        self.parts = {name: Part(own.get(name) or fn) for name, fn in {**textbook.REFERENCE, **REFERENCE}.items()}
        self._yours = [name for name in self.parts if own.get(name)]
        self._slots = slots_of_runs(self.parts["slot_runs"].ask)
        self._pages = self.parts["SharedPages"].ask(num_blocks, block_size)
        self._num_blocks, self._size = num_blocks, block_size
        shape = (2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self._memories = [torch.full(shape, math.nan, dtype=model.dtype, device=model.device) for _ in self._weights]

    def describe(self) -> str:
        """Which parts are yours, in one line."""
        others = [name for name in self.parts if name not in self._yours]
        return f"yours {', '.join(self._yours) or 'nothing yet'}; reference {', '.join(others) or 'nothing'}"

    @torch.inference_mode()
    def answers(self, text: list[int], questions: list[list[int]], max_tokens: int, stop: int) -> Told:
        """The greedy answer to each question behind `text`, up to `stop` or max_tokens; all pages are free again."""
        pages, trunk = self._pages, []
        num_copies = self._grow(trunk, 0, len(text))
        self._read(trunk, 0, text)
        tables = [pages.fork(trunk) for _ in questions]
        pages.free(trunk)
        lengths, answers = [len(text)] * len(questions), []
        for i, ids in enumerate(questions):
            num_copies += self._grow(tables[i], lengths[i], len(ids))
            answers.append([int(self._read(tables[i], lengths[i], ids)[-1].argmax())])
            lengths[i] += len(ids)
        while going := [i for i, told in enumerate(answers) if len(told) < max_tokens and told[-1] != stop]:
            num_copies += sum(self._grow(tables[i], lengths[i], 1) for i in going)
            newest = [answers[i][-1] for i in going]
            logits = self._step(newest, [tables[i] for i in going], [lengths[i] for i in going])
            for i, row in zip(going, logits, strict=True):
                answers[i].append(int(row.argmax()))
                lengths[i] += 1
        num_blocks = self._num_blocks - pages.num_free
        for table in tables:
            pages.free(table)
        return Told(answers, num_blocks, num_copies)

    def _grow(self, table: list[int], length: int, n: int) -> int:
        """Make room in the table, and the copies that are due; returns their number."""
        copies = self._pages.grow(table, length, n)
        for source, target in copies:
            for memory in self._memories:
                memory[:, target] = memory[:, source]
        return len(copies)

    def _read(self, table: list[int], start: int, ids: list[int]) -> torch.Tensor:
        """Logits of a chunk of one text."""
        end, blocks = start + len(ids), torch.tensor(table)
        new = self._slots(blocks, torch.arange(start, end), self._size)
        seen = self._slots(blocks, torch.arange(end), self._size)

        def attend(memory, q, k, v):
            rows = memory.flatten(1, 2)
            rows[0, new], rows[1, new] = k, v
            return naive.attention(q, rows[0, seen], rows[1, seen])[0]

        return self._logits(ids, torch.arange(start, end), attend)

    def _step(self, tokens: list[int], tables: list[list[int]], lengths: list[int]) -> torch.Tensor:
        """Logits of the newest token of each text."""
        width = max(map(len, tables))
        padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], device=self._model.device)
        positions = torch.tensor(lengths, device=self._model.device)

        def attend(memory, q, k, v):
            return self.parts["decode_pages"].tensor(q.shape, q, k, v, memory, padded, positions)

        return self._logits(tokens, positions, attend)

    def _logits(self, ids: list[int], positions: torch.Tensor, attend: Callable) -> torch.Tensor:
        model, config = self._model, self._model.config
        positions = positions.to(model.device)

        def norm(rows, weight):
            return self.parts["rms_norm"].tensor(rows.shape, rows, weight, config.rms_norm_eps)

        def turn(heads):
            return self.parts["rotate"].tensor(heads.shape, heads, positions, config.rope_theta)

        x = F.embedding(torch.tensor(ids, device=model.device), model.embedding)
        for w, memory in zip(self._weights, self._memories, strict=True):

            def look(q, k, v, memory=memory):
                return attend(memory, q, k, v)

            x = self.parts["block"].tensor(x.shape, x, w, config.head_dim, norm, turn, look)
        return model.lm_head(norm(x, model.norm.weight))


def branches(llm, own: Mapping[str, Callable | None] | None = None) -> Branches:
    """Branches on the weights of `llm`; own None: what my_minillm/ holds. Raises GradeError as `boot` does."""
    names = (*textbook.REFERENCE, *REFERENCE)
    return Branches(llm.engine.model, {name: mine.load(name) for name in names} if own is None else own)
