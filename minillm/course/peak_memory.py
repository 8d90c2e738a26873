"""How many bytes of tensors some code holds at once: counted as they are made and dropped, on any device.

    with PeakMemory() as memory:
        out = attention(q, k, v)
    memory.peak                                           bytes, without q, k and v

What an operation uses inside itself and gives back before it returns is not seen. Lesson 08.
"""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the memory behind each tensor that an operation returns, until the last tensor on it is gone.

    now, peak  bytes at this moment, and the most there were; memory that was there before does not count
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._counted = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {pointer for pointer, _ in _memory((args, kwargs))}
        for pointer, storage in _memory(result):
            if pointer not in given and storage not in self._counted:
                self._counted.add(storage)
                size = storage.nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, size)
        return result

    def _drop(self, size: int) -> None:
        self.now -= size


def _memory(tree) -> list[tuple[int, torch.UntypedStorage]]:
    """(address, storage) behind each tensor in nested containers."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [(storage.data_ptr(), storage) for storage in storages]
