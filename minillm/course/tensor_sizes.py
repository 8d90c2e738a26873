"""How large the largest tensor is that some code makes: what a copy costs, counted instead of timed.

    with TensorSizes() as sizes:
        out = attention(q, k, v)
    sizes.largest                                         numbers in it

It stands outside of the checks that use it, because it runs under a learner's code, and that cannot reach into those.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorSizes(TorchDispatchMode):
    """Notes the largest piece of memory that an operation returns, in numbers; a view counts as what it looks at."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result
