"""A step as plain numbers, so that rank 0 can tell the others what to compute without sending objects.

First a header of five integers, what to do and how long the rest is; then the rest, all int64:

    work | token_ids positions slot_mapping [T] | query_lens context_lens [B] | block_tables [B, width] | rows [B']

`query_start_loc` and `seq_lens` repeat the two lists and are made again on arrival.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from minillm.batch import Batch


class Work(IntEnum):
    """What the ranks do next, together."""

    STOP = 0
    FORWARD = 1  # a batch: logits of its sampled rows
    HIDDEN = 2  # a batch: all rows before the LM head
    LM_HEAD = 3  # a number of rows, which follow as a tensor
    COPY_BLOCKS = 4  # pairs (src, dst) of KV blocks


HEADER = 5  # integers: the work, and up to four lengths


def header(work: Work, *lengths: int) -> torch.Tensor:
    """[HEADER] int64, filled up with zeros."""
    return torch.tensor([work, *lengths, *[0] * (HEADER - 1 - len(lengths))])


def lengths_of(batch: Batch) -> tuple[int, int, int, int]:
    """T, B, width and B' of a batch: what `unpack` needs to find its parts again."""
    return batch.num_tokens, batch.num_requests, batch.block_tables.shape[1], len(batch.logits_indices)


def num_integers(lengths: tuple[int, int, int, int]) -> int:
    return sum(_sizes(lengths))


def pack(batch: Batch) -> torch.Tensor:
    """The numbers of a batch, one after another: int64 on the CPU."""
    rows = [batch.token_ids, batch.positions, batch.slot_mapping]
    lists = [torch.tensor(batch.query_lens), torch.tensor(batch.context_lens)]
    parts = [*rows, *lists, batch.block_tables.flatten(), batch.logits_indices]
    return torch.cat([part.cpu().long() for part in parts])


def unpack(numbers: torch.Tensor, lengths: tuple[int, int, int, int], device: torch.device | str = "cpu") -> Batch:
    """The batch that `pack` was given, on this rank's device."""
    tokens, positions, slots, queries, contexts, tables, sampled = numbers.split(_sizes(lengths))
    ends = queries.cumsum(0)
    return Batch(
        token_ids=tokens.to(device),
        positions=positions.to(device),
        query_start_loc=torch.cat([ends.new_zeros(1), ends]).to(device, torch.int32),
        seq_lens=contexts.to(device, torch.int32),
        block_tables=tables.view(lengths[1], lengths[2]).to(device, torch.int32),
        slot_mapping=slots.to(device),
        logits_indices=sampled.to(device),
        query_lens=queries.tolist(),
        context_lens=contexts.tolist(),
        host_token_ids=tokens,
    )


def _sizes(lengths: tuple[int, int, int, int]) -> list[int]:
    num_tokens, num_requests, width, num_sampled = lengths
    return [num_tokens] * 3 + [num_requests] * 2 + [num_requests * width, num_sampled]
