"""The tensors that hold K and V of every computed token, one per layer.

`KVCache` is cut into blocks of `block_size` rows; which request owns which block is the business of
`block_pool.py`, never of this file. `ContiguousKV` is the older layout, one row of `max_model_len`
tokens per slot: the same tensor with a single block as long as the longest possible sequence, kept as
the dense baseline for tests and for the waste that lesson 06 draws. Rows may be kept in eight bits, see
`eight_bit.py`; what is read back is then what every later step sees, the prompt's own step included.
Built in lessons 05 and 06, after PagedAttention (Kwon et al. 2023, arXiv 2309.06180).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minillm.eight_bit import LARGEST, bytes_per_value, quantize_rows, restore_rows
from minillm.errors import ConfigError
from minillm.model_config import ModelConfig

log = logging.getLogger(__name__)


@dataclass
class KVLayer:
    """One layer's pages, as attention sees them.

    k, v              [P, block_size, Hkv, D]
    window            visible keys per query, the query's own included; None means all of them
    k_scale, v_scale  [P, block_size, Hkv] float32 where k and v are 8-bit codes: the value of one step; else None
    restored          the dtype that rows of 8-bit codes are read back in
    write_rows        (k, v, layer, slots): how rows are quantised and written; None: by PyTorch
    """

    k: torch.Tensor
    v: torch.Tensor
    window: int | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    restored: torch.dtype = torch.float32
    write_rows: Callable | None = None

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def in_eight_bits(self) -> bool:
        return self.k_scale is not None

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that are read back."""
        return self.restored if self.in_eight_bits else self.k.dtype

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
        if self.write_rows is not None:
            self.write_rows(k, v, self, slot_mapping)
            return
        if self.in_eight_bits:
            (k, v), scales = quantize_rows(torch.stack([k, v]), self.k.dtype)
            write(self.k_scale, scales[0], slot_mapping)
            write(self.v_scale, scales[1], slot_mapping)
        write(self.k, k, slot_mapping)
        write(self.v, v, slot_mapping)

    def gather(self, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` rows of a request whose blocks are `blocks`: two copies [length, Hkv, D]."""
        needed = -(-length // self.block_size)
        k, v = self.read_blocks(blocks[:needed])
        return k[:length], v[:length]

    def read_blocks(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of N blocks, one block after another: two copies [N x block_size, Hkv, D]."""
        return self._restored(lambda pages: pages.index_select(0, blocks).flatten(0, 1))

    def read_rows(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows at `slots` [...] (block id x block_size + row): two copies [..., Hkv, D]."""
        return self._restored(lambda pages: pages.flatten(0, 1)[slots])

    def _restored(self, pick) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.in_eight_bits:
            return pick(self.k), pick(self.v)
        kinds = (self.k, self.k_scale), (self.v, self.v_scale)
        k, v = (restore_rows(pick(pages), pick(scale), self.restored) for pages, scale in kinds)
        return k, v


def copy_rows(pages: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Rows [T, Hkv, D] into pages [P, block_size, Hkv, D]; no slot [T] is -1. The same for scales, without D."""
    if pages.dtype == torch.float8_e4m3fn:  # a type that PyTorch does not copy by index
        pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
    pages.flatten(0, 1).index_copy_(0, slots, rows)


def copy_rows_and_padding(pages: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """The same where slots, but for the first one, may be -1: those rows go where the first one goes, before it."""
    copy_rows(pages, rows, torch.where(slots < 0, slots[:1], slots))
    copy_rows(pages, rows[:1], slots[:1])


class KVCache:
    """A list of L tensors [2, P, block_size, Hkv, D]; a list, so that writing one never copies the others.

    dtype     of the rows that are written and read
    kv_dtype  that they are kept in: `dtype`, or int8 or float8_e4m3fn, and then there is a list of L `scales`
              [2, P, block_size, Hkv] float32 beside

    Raises ConfigError when there is not that much memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_dtype: torch.dtype | None = None,
    ):
        self.block_size = block_size
        self.num_blocks = num_blocks
        kv_dtype = kv_dtype or dtype
        num_layers = config.num_hidden_layers
        # Not zeroed: memory is touched when a block is first used, and no row may be read before it is written.
        shape = (2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.scales = []
        try:
            self.tensors = [torch.empty(shape, dtype=kv_dtype, device=device) for _ in range(num_layers)]
            if kv_dtype in LARGEST:
                self.scales = [torch.empty(shape[:-1], dtype=torch.float32, device=device) for _ in range(num_layers)]
        except RuntimeError as error:
            num_bytes = num_blocks * kv_bytes_per_block(config, block_size, kv_dtype)
            raise ConfigError(
                f"{num_blocks:,} KV blocks of {block_size:,} tokens take {num_bytes:,} bytes, which {device} does not "
                f"have; lower num_kv_blocks or kv_cache_memory_bytes"
            ) from error
        writer = find_row_writer(dtype, kv_dtype, device)
        self.layers = [
            KVLayer(*pages, config.layer_window(i), *(self.scales[i] if self.scales else (None, None)), dtype, writer)
            for i, pages in enumerate(self.tensors)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.tensors, *self.scales))

    def copy_blocks(self, block_copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst) in every layer: the second half of copy-on-write."""
        if not block_copies:
            return
        src, dst = torch.tensor(block_copies, device=self.tensors[0].device).unbind(1)
        for tensor in (*self.tensors, *self.scales):
            tensor[:, dst] = tensor[:, src]


def find_row_writer(dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device | str) -> Callable | None:
    """The quick way to write 8-bit rows of `dtype` on a processor, or None where PyTorch has to."""
    if kv_dtype not in LARGEST or torch.device(device).type != "cpu":
        return None
    try:
        from minillm.cpu_rows import RowWriter

        return RowWriter(dtype, kv_dtype)
    except (ImportError, KeyError):  # numba is missing, or knows no such type
        return None
    except Exception:  # the compiler refused: a machine or version we do not know must still answer
        log.warning("numba is installed but cannot compile the KV writer", exc_info=True)
        return None


class ContiguousKV(KVCache):
    """`num_slots` rows of `max_model_len` tokens each, reserved whether they are used or not.

    Use it with `BlockPool(num_slots, block_size=max_model_len)`: one block per request.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_dtype: torch.dtype | None = None,
    ):
        super().__init__(config, num_slots, max_model_len, dtype, device, kv_dtype)

    def wasted_bytes(self, seq_lens: list[int]) -> int:
        """Bytes reserved but unused while the slots hold sequences of these lengths."""
        bytes_per_token = self.num_bytes // (self.num_blocks * self.block_size)
        return self.num_bytes - bytes_per_token * sum(seq_lens)


def kv_bytes_per_block(config: ModelConfig, block_size: int, kv_dtype: torch.dtype) -> int:
    """2 (K and V) x layers x block_size x Hkv x D x bytes per value, scales of 8-bit rows included."""
    values = 2 * config.num_hidden_layers * block_size * config.num_key_value_heads * config.head_dim
    return round(values * bytes_per_value(kv_dtype, config.head_dim))
