"""Decode steps as CUDA graphs: the launches of a whole forward pass recorded once and sent to the GPU as one.

A decode step of a small model is a few hundred kernels of some microseconds each, and starting them one by one from
Python takes longer than they run. A graph fixes addresses and shapes, so there is one per batch size of `SIZES`: a
step of B decodes is copied into the buffers of the next larger size, whose remaining rows are padding (slot -1, which
the writer skips; seq_len 0, for which attention gives 0). Prefill chunks have too many shapes and run eagerly, as do
sampling and everything outside the model. Built in lesson 17, after PyTorch's and vLLM's CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minillm.attention.triton import TritonAttention
from minillm.batch import Batch
from minillm.config import EngineConfig
from minillm.embedding import HostEmbedding

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Replay = Callable[[], torch.Tensor]


@dataclass
class Graph:
    """One recorded forward pass: the buffers that it reads, and what runs it again.

    embedded  [size, E] of the tokens where the embedding table lies in CPU memory, which no graph reaches; else None
    """

    batch: Batch
    replay: Replay  # -> logits [size, V], the same memory every time
    embedded: torch.Tensor | None = None


class DecodeGraphs:
    """Runs steps of decodes by replaying recorded ones; anything else is left to the caller.

    model, kv_cache, attend  as the engine has them; `attend` must not read context lengths on the host
    max_num_seqs             most requests of one step
    max_model_len            most tokens of one context
    capture                  records a forward pass and returns what replays it; tests run it directly instead

    A size is recorded when it is first needed.
    """

    def __init__(
        self,
        model,
        kv_cache,
        attend,
        max_num_seqs: int,
        max_model_len: int,
        capture: Callable[[Replay], Replay] | None = None,
    ):
        self.model, self.kv_cache, self.attend = model, kv_cache, attend
        self.max_model_len = max_model_len
        self.sizes = [*(size for size in SIZES if size < max_num_seqs), max_num_seqs]
        self.graphs: dict[int, Graph] = {}
        self._capture = capture or CudaCapture()

    def __call__(self, batch: Batch) -> torch.Tensor | None:
        """Logits [B, V] of a step in which each of B requests decodes one token, valid until the next call.

        None: there is no graph for such a step.
        """
        num = batch.num_requests
        if num == 0 or num > self.sizes[-1] or len(batch.logits_indices) != num or max(batch.query_lens) > 1:
            return None
        size = self.sizes[bisect_left(self.sizes, num)]
        if size not in self.graphs:
            self.graphs[size] = self._record(size)
        graph = self.graphs[size]
        fill(graph.batch, batch)
        if graph.embedded is not None:
            graph.embedded[:num].copy_(self.model.embed(batch))
        return graph.replay()[:num]

    def _record(self, size: int) -> Graph:
        """A graph over buffers that hold nothing but padding: recording it leaves the cache as it is."""
        batch, embedded, model = self._padding(size), None, self.model
        if isinstance(model.embed, HostEmbedding):
            embedded = torch.zeros(size, model.config.hidden_size, dtype=model.dtype, device=model.device)
        replay = self._capture(lambda: model.forward(batch, self.kv_cache, self.attend, embedded=embedded))
        return Graph(batch, replay, embedded)

    def _padding(self, size: int) -> Batch:
        device = self.model.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return Batch(
            token_ids=zeros(size),
            positions=zeros(size),
            query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=device),
            seq_lens=zeros(size, dtype=torch.int32),
            block_tables=zeros(size, -(-self.max_model_len // self.kv_cache.block_size), dtype=torch.int32),
            slot_mapping=zeros(size) - 1,
            logits_indices=torch.arange(size, device=device),
            query_lens=[1] * size,
            context_lens=[self.max_model_len] * size,  # what is launched must do for the longest
        )


def why_eager(config: EngineConfig, device: torch.device, attend) -> str:
    """Why an engine records no graphs, or "" if it does."""
    if device.type != "cuda":
        return f"none: a {device.type} has no launches to save"
    if config.enforce_eager:
        return "none: enforce_eager"
    if config.num_ranks > 1:
        return "none: each step of several ranks begins with its announcement"
    if not isinstance(attend, TritonAttention):
        return "none: this attention reads context lengths on the host"
    return ""


def fill(buffers: Batch, batch: Batch) -> None:
    """Copy a step of decodes into the first rows of a graph's buffers; the others become padding."""
    num, width = batch.block_tables.shape
    for name in ("token_ids", "positions", "seq_lens", "slot_mapping"):
        getattr(buffers, name)[:num].copy_(getattr(batch, name))
    buffers.block_tables[:num, :width].copy_(batch.block_tables)
    buffers.seq_lens[num:] = 0
    buffers.slot_mapping[num:] = -1


class CudaCapture:
    """Records on a GPU. All graphs share one pool of memory, because only one of them runs at a time."""

    def __init__(self):
        self.pool = None

    def __call__(self, run: Replay) -> Replay:
        side = torch.cuda.Stream()  # what compiles or allocates at its first call must do so before the recording
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay
