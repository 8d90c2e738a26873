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

NAMES = (
    "token_ids", "positions", "slot_mapping", "logits_indices", "query_start_loc", "seq_lens", "block_tables",
)  # fmt: skip
"""The tensors of a batch, those of eight bytes per number first, so that each lies where its dtype allows."""


class CopiedAhead:
    """`Batch.from_step` for a device at the end of a link; a part that `Engine` takes as `make_batch`.

    link  send(tensor) -> (a copy on the device, a function that waits for it), as `embedding.PCIe` has it
    """

    def __init__(self, link):
        self.link = link

    def __call__(self, step, block_size: int, device: torch.device | str = "cpu") -> Batch:
        """The same batch; its tensors share one buffer on the device."""
        batch = Batch.from_step(step, block_size)
        tensors = [getattr(batch, name) for name in NAMES]
        numbers = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        if torch.device(device).type == "cuda":
            numbers = numbers.pin_memory()  # memory that PyTorch keeps, and reuses once the copy has been made
        there, _ = self.link.send(numbers)
        parts = there.split([tensor.nbytes for tensor in tensors])
        there = {
            name: part.view(tensor.dtype).view(tensor.shape)
            for name, part, tensor in zip(NAMES, parts, tensors, strict=True)
        }
        return replace(batch, **there)
