"""Which attention body runs: one function, and the reason that `minillm doctor` prints."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minillm.attention import flash, naive, sdpa
from minillm.attention.cpu import CPUAttention
from minillm.attention.per_request import PerRequest
from minillm.attention.sparse import make_sparse
from minillm.attention.triton import TritonAttention, compute_capability, why_not
from minillm.errors import ConfigError
from minillm.option_words import ATTENTION_BODIES
from minillm.sparse_options import is_sparse, parse


def choose_attention(
    device: torch.device | str, dtype: torch.dtype, name: str = "auto", kv_dtype: torch.dtype | None = None
) -> tuple[Callable, str]:
    """(attend, reason) for a device and a dtype. `name` is one of ATTENTION_BODIES, or a sparse method.

    kv_dtype  what the pages hold, if not `dtype`: every body reads all of them, but some have to be made ready for it
    Raises ConfigError for a device without a body, and for a name that is unknown or does not run there.
    """
    kind = torch.device(device).type
    if kind == "mps":
        raise ConfigError("device='mps' has no attention body here; use device='cpu', which is what macOS runs on")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device={kind!r} has no attention body; use 'cpu' or 'cuda'")
    if is_sparse(name):
        return make_sparse(parse(name), device, dtype, *choose_attention(device, dtype, kv_dtype=kv_dtype))
    if name not in ATTENTION_BODIES:
        raise ConfigError(f"attention={name!r} is not one of {', '.join(ATTENTION_BODIES)}")
    if name == "cpu" and kind != "cpu":
        raise ConfigError(f"attention='cpu' runs on CPU tensors only, and the device is {kind!r}; use 'auto' or 'sdpa'")

    if name == "naive":
        return PerRequest(naive.attention), "naive, as asked: the whole n x n matrix, slow"
    if name == "flash":
        return PerRequest(flash.attention), "flash, as asked: the tiled online softmax in PyTorch, slow"
    if name == "sdpa":
        return PerRequest(sdpa.attention, sdpa.output), "sdpa, as asked: PyTorch's own attention, one call per request"
    if name == "triton":
        return TritonAttention(dtype, device), "triton, as asked: our own kernels over the paged cache"
    if kind == "cuda":
        problem = why_not(kind, dtype, compute_capability(torch.device(device)))
        if problem:
            return PerRequest(
                sdpa.attention, sdpa.output
            ), f"sdpa: PyTorch's own attention; attention='triton' {problem}"
        return TritonAttention(dtype, device), "triton: our own kernels over the paged cache, the default on a GPU"
    attend = CPUAttention(dtype, kv_dtype=kv_dtype)
    return attend, f"cpu: {'as asked' if name == 'cpu' else 'the default on processors'}; {attend.reason}"
