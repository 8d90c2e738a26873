"""A memory guard for interpreted kernels: which addresses they read and write, and whether those were theirs.

The interpreter follows any pointer, as a GPU does. Under the guard an access outside the watched tensors is left
out and remembered, so a test can demand that there was none, or look at where a kernel wanted to go.
"""

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


class MemoryGuard:
    """Watches every tensor given to `watch` and every one that torch.empty makes meanwhile.

    outside  addresses outside all of them that a kernel accessed
    """

    def __init__(self, monkeypatch):
        self._ranges = []
        self._alive = []  # an address must not be given to another tensor meanwhile
        self.outside = []
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: self._watched(empty(*args, **kwargs)))
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def guarded_load(builder, ptrs, mask, *rest):
            return load(builder, ptrs, self._inside(ptrs, mask), *rest)

        def guarded_store(builder, ptrs, value, mask, *rest):
            return store(builder, ptrs, value, self._inside(ptrs, mask), *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", guarded_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", guarded_store)

    def watch(self, *tensors):
        for tensor in tensors:
            self._watched(tensor)

    def _watched(self, tensor):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel():
            first = tensor.data_ptr()
            self._ranges.append((first, first + (last + 1) * tensor.element_size()))
            self._alive.append(tensor)
        return tensor

    def _inside(self, ptrs, mask):
        inside = np.zeros(ptrs.data.shape, dtype=bool)
        for first, end in self._ranges:
            inside |= (ptrs.data >= first) & (ptrs.data < end)
        self.outside += np.asarray(ptrs.data[mask.data & ~inside]).ravel().tolist()
        return TensorHandle(mask.data & inside, mask.dtype)
