"""One ragged forward pass, as flat tensors: the scheduler's plan in the form the model reads.

Prefill chunks and decodes stand one after another in the same `T` rows, without padding; where one
request ends and the next begins is written in `query_start_loc`. Nothing here computes attention.
Built in lesson 11. The layout follows vLLM's "ragged" input batch.

Two requests, `block_size` 4. Request a continues its prompt (tokens 4..6), request b decodes token 9:

    row               0    1    2    3
    request           a    a    a    b
    token_ids         t4   t5   t6   t9        [T]
    positions         4    5    6    9         [T]
    query_start_loc   0              3    4    [B+1]  a owns rows 0..2, b owns row 3
    seq_lens          7, 10                    [B]    context after this step
    block_tables      [[2, 5, 0], [7, 1, 3]]   [B, max_blocks], zero-padded
    slot_mapping      20   21   22   13        [T]    a: block 5, rows 0..2; b: block 3, row 1
    logits_indices    2    3                   [B']   only rows that will be sampled

Padding, where a policy asks for a rectangle: behind the requests stand sequences of nobody, computed like fresh
prompts, with slot -1 in every row: they cost what rows cost and leave nothing in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch


@dataclass
class Batch:
    """Flat tensors for one forward pass; shapes stand in the module's drawing.

    `query_lens` and `context_lens` repeat the same facts as Python ints, because choosing a code path
    must not read a tensor back from the device.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [B+1] int32
    seq_lens: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, max_blocks] int32
    slot_mapping: torch.Tensor  # [T] int64, -1 for padding
    logits_indices: torch.Tensor  # [B'] int64
    query_lens: list[int]  # B ints: rows of each request in this step
    context_lens: list[int]  # B ints: equal to seq_lens
    host_token_ids: torch.Tensor | None = None  # [T] int64, token_ids on the CPU; None: only the device has them

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return len(self.query_lens)

    @classmethod
    def build(
        cls,
        token_ids: list[list[int]],
        context_lens: list[int],
        block_tables: list[list[int]],
        block_size: int,
        sampled: list[bool] | None = None,
        device: torch.device | str = "cpu",
        padding: list[int] | None = None,
    ) -> Batch:
        """Flatten B requests into one batch.

        token_ids     B lists: the tokens each request computes now, the last ones of its context
        context_lens  B ints: tokens in the cache after this step, so positions are
                      `context_len - len(tokens) .. context_len - 1`
        block_tables  B lists of block ids, each covering at least `context_len` rows
        sampled       B flags: does the last row of this request need logits? (default: all do)
        padding       numbers of rows of sequences that nobody owns, to stand behind the requests
        """
        num_padding = sum(padding or ())
        if padding:
            sampled = (sampled or [True] * len(token_ids)) + [False] * len(padding)
            token_ids = token_ids + [[0] * n for n in padding]
            context_lens = context_lens + padding
            block_tables = block_tables + [[0] * -(-n // block_size) for n in padding]
        query_lens = [len(tokens) for tokens in token_ids]
        width = max((len(table) for table in block_tables), default=0)
        padded = [table + [0] * (width - len(table)) for table in block_tables]

        queries = torch.tensor(query_lens, dtype=torch.int64)
        seq_lens = torch.tensor(context_lens, dtype=torch.int64)
        ends = queries.cumsum(0)  # [B] first row after each request
        tables = torch.tensor(padded, dtype=torch.int64).view(len(query_lens), width)

        # A row's position is its index within the batch, shifted so that the request's last row
        # lands on its last context token.
        request_of_row = torch.repeat_interleave(torch.arange(len(query_lens)), queries)  # [T]
        positions = torch.arange(int(queries.sum())) + (seq_lens - ends)[request_of_row]  # [T]
        blocks = tables[request_of_row, positions // block_size]  # [T]
        slots = blocks * block_size + positions % block_size
        slots[len(slots) - num_padding :] = -1

        last_rows = ends - 1
        if sampled is not None:
            last_rows = last_rows[torch.tensor(sampled, dtype=torch.bool)]
        start_loc = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        flat = torch.tensor(list(chain.from_iterable(token_ids)), dtype=torch.int64)
        return cls(
            token_ids=flat.to(device),
            positions=positions.to(device),
            query_start_loc=start_loc.to(device, torch.int32),
            seq_lens=seq_lens.to(device, torch.int32),
            block_tables=tables.to(device, torch.int32),
            slot_mapping=slots.to(device),
            logits_indices=last_rows.to(device),
            query_lens=query_lens,
            context_lens=list(context_lens),
            host_token_ids=flat,
        )

    @classmethod
    def from_step(cls, step, block_size: int, device: torch.device | str = "cpu") -> Batch:
        """The batch of a scheduler `Step`: for each (request, n) its next n uncomputed tokens."""
        tokens, contexts, tables, sampled = [], [], [], []
        for request, n in step.scheduled:
            start = request.num_computed_tokens
            tokens.append(request.token_ids[start : start + n])
            contexts.append(start + n)
            tables.append(request.block_table)
            sampled.append(request.is_sampled_after(n))
        return cls.build(tokens, contexts, tables, block_size, sampled, device, step.padding)
