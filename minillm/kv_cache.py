"""The tensors that hold K and V of every computed token, one per layer.

`KVCache` is cut into blocks of `block_size` rows; which request owns which block is the business of
`block_pool.py`, never of this file. `ContiguousKV` is the older layout, one row of `max_model_len`
tokens per slot: the same tensor with a single block as long as the longest possible sequence, kept as
the dense baseline for tests and for the waste that lesson 06 draws. Built in lessons 05 and 06,
after PagedAttention (Kwon et al. 2023, arXiv 2309.06180).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minillm.config import ModelConfig


@dataclass
class KVLayer:
    """One layer's pages, as attention sees them.

    k, v    [P, block_size, Hkv, D]
    window  visible keys per query, the query's own included; None means all of them
    """

    k: torch.Tensor
    v: torch.Tensor
    window: int | None = None

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    def write(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Put k, v [T, Hkv, D] into the rows `slot_mapping` [T] (block id x block_size + row).

        Padding rows have slot -1, stand behind the others and are not written. Only a CPU looks whether there are
        any: elsewhere that would wait for the device.
        """
        write = copy_rows
        if slot_mapping.device.type != "cpu":
            write = copy_rows_and_padding
        elif len(slot_mapping) and slot_mapping.numpy()[-1] < 0:
            slot_mapping = slot_mapping[slot_mapping >= 0]
            k, v = k[: len(slot_mapping)], v[: len(slot_mapping)]
        write(self.k, k, slot_mapping)
        write(self.v, v, slot_mapping)

    def gather(self, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` rows of a request whose blocks are `blocks`: two copies [length, Hkv, D]."""
        needed = -(-length // self.block_size)
        k = self.k.index_select(0, blocks[:needed]).flatten(0, 1)[:length]
        v = self.v.index_select(0, blocks[:needed]).flatten(0, 1)[:length]
        return k, v


def copy_rows(pages: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Rows [T, Hkv, D] into pages [P, block_size, Hkv, D]; no slot [T] is -1."""
    pages.flatten(0, 1).index_copy_(0, slots, rows)


def copy_rows_and_padding(pages: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """The same where slots, but for the first one, may be -1: those rows go where the first one goes, before it."""
    copy_rows(pages, rows, torch.where(slots < 0, slots[:1], slots))
    copy_rows(pages, rows[:1], slots[:1])


class KVCache:
    """A list of L tensors [2, P, block_size, Hkv, D]; a list, so that writing one never copies the others."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.block_size = block_size
        self.num_blocks = num_blocks
        # Not zeroed: memory is touched when a block is first used, and no row may be read before it is written.
        shape = (2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.tensors = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.layers = [KVLayer(t[0], t[1], config.layer_window(i)) for i, t in enumerate(self.tensors)]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def copy_blocks(self, block_copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst) in every layer: the second half of copy-on-write."""
        if not block_copies:
            return
        src, dst = torch.tensor(block_copies, device=self.tensors[0].device).unbind(1)
        for tensor in self.tensors:
            tensor[:, dst] = tensor[:, src]


class ContiguousKV(KVCache):
    """`num_slots` rows of `max_model_len` tokens each, reserved whether they are used or not.

    Use it with `BlockPool(num_slots, block_size=max_model_len)`: one block per request.
    """

    def __init__(self, config: ModelConfig, num_slots: int, max_model_len: int, dtype=torch.float32, device="cpu"):
        super().__init__(config, num_slots, max_model_len, dtype, device)

    def wasted_bytes(self, seq_lens: list[int]) -> int:
        """Bytes reserved but unused while the slots hold sequences of these lengths."""
        bytes_per_token = self.num_bytes // (self.num_blocks * self.block_size)
        return self.num_bytes - bytes_per_token * sum(seq_lens)


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """2 (K and V) x layers x block_size x Hkv x D x bytes per value."""
    values = 2 * config.num_hidden_layers * block_size * config.num_key_value_heads * config.head_dim
    return values * dtype.itemsize
