"""The numbers of a step reach a GPU while it still computes the step before: one pinned copy on a stream of its own.

`Batch.build` copies seven small tensors, and each copy waits until the GPU has done everything before it: the host can
begin no step before the last one has ended. Chunks of a prompt that sample nothing need no such wait. Here the seven
become one buffer of pinned memory that travels beside the computation, the computing stream waits for its arrival
only, and the host goes on to the next chunk: to its scheduling, its embedding rows where the table lies in CPU memory
(embedding.py), and the starting of its kernels. The gather of an embedding table that lies on the GPU stays where it
is: 17 MB for 2,048 tokens of an 8B model, some ten microseconds of a prefill of many milliseconds. Lesson 17.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minillm.batch import Batch

NAMES = ("token_ids", "positions", "query_start_loc", "seq_lens", "block_tables", "slot_mapping", "logits_indices")
ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew for a pointer that is not a multiple of this."""


class CopiedAhead:
    """`Batch.from_step` for a device at the end of a link; a part that `Engine` takes as `make_batch`.

    link  send(tensor) -> (a copy on the device, a function that waits for it), as `embedding.PCIe` has it
    """

    def __init__(self, link):
        self.link = link

    def __call__(self, step, block_size: int, device: torch.device | str = "cpu") -> Batch:
        """The same batch; its tensors lie in one buffer on the device."""
        batch = Batch.from_step(step, block_size)
        tensors = [getattr(batch, name) for name in NAMES]
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        pinned = torch.device(device).type == "cuda"  # PyTorch reuses such memory only once its copy has been made
        here = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        for part, tensor in zip(here.split(sizes), tensors, strict=True):
            as_tensor(part, tensor).copy_(tensor)
        there, _ = self.link.send(here)
        parts = zip(NAMES, there.split(sizes), tensors, strict=True)
        return replace(batch, **{name: as_tensor(part, tensor) for name, part, tensor in parts})


def as_tensor(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of a part, with the dtype and shape of another tensor."""
    return part[: like.nbytes].view(like.dtype).view(like.shape)
