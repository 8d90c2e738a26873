"""How many bytes of tensors some code holds at once: counted as they are made and dropped, on any device.

    with PeakMemory() as memory:
        out = attention(q, k, v)
    memory.peak                                           bytes, without q, k and v

What an operation uses inside itself and gives back before it returns is not seen. Lesson 08.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory(TorchDispatchMode):
    """Counts the memory behind each tensor that an operation returns, until the last tensor on it is gone.

    now, peak  bytes at this moment, and the most there were; memory that was there before does not count
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}  # by address

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if size and address not in self._alive and not _holds(address, (*args, *(kwargs or {}).values())):
                self._alive[address] = weakref.ref(storage, functools.partial(self._drop, address, size))
                self.now += size
                self.peak = max(self.peak, self.now)
        return result

    def _drop(self, address: int, size: int, _) -> None:
        del self._alive[address]
        self.now -= size


def _holds(address: int, values: Iterable) -> bool:
    """Whether a result lies in memory that came in: a view, or something that was written in place."""
    return any(tensor.untyped_storage().data_ptr() == address for tensor in _tensors(values))


def _tensors(values: Iterable) -> Iterator[torch.Tensor]:
    """Those among some arguments or results, also inside lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
