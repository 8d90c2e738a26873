"""Steps as CUDA graphs: the launches of a whole forward pass recorded once and sent to the GPU as one.

A step is a few hundred kernels, and Python needs some 50 microseconds to start one: half a millisecond per layer. A
decode, or the prompt of a small model, is computed in less. A graph fixes addresses and shapes, so a step is copied
into the buffers of the next larger `Shape`, whose remaining rows are padding: slot -1, which the writer skips, and
requests of no queries, for which attention does nothing. A long prompt keeps the GPU busy for longer than its launches
take: it runs eagerly, as do sampling and everything outside the model. Built in lesson 17, after PyTorch's and vLLM's
CUDA graphs.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minillm.attention.triton import TritonAttention
from minillm.batch import Batch
from minillm.config import EngineConfig
from minillm.cuda_capture import CudaCapture, Replay
from minillm.devices import by_gpu_name
from minillm.embedding import HostEmbedding
from minillm.model_config import ModelConfig

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PROMPT_SIZES = (*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 4096 + 1, 256))
PROMPT_REQUESTS = (1, 8, 32, 128)

MOST_DECODED = 16
"""A request of 2 to 16 tokens may belong to the decode tiles or to the prefill tiles, by the model: it runs eagerly."""

LAUNCH_SECONDS = 0.5e-3
"""What the host takes to start one layer; 0.53 to 0.58 ms beside an H200."""

REACHED = 0.7
"""Share of a GPU's peak at which the products of a few hundred rows run."""

logger = logging.getLogger(__name__)


class Shape(NamedTuple):
    """What a graph is recorded for: so many rows in all, of at most so many requests."""

    num_tokens: int
    num_requests: int


@dataclass
class Graph:
    """One recorded forward pass: the buffers that it reads, and what runs it again.

    embedded  [T, E] of the tokens where the embedding table lies in CPU memory, which no graph reaches; else None
    """

    batch: Batch
    replay: Replay  # -> logits [num_requests, V], the same memory for every graph and every time
    embedded: torch.Tensor | None = None


class StepGraphs:
    """Runs steps by replaying recorded ones; what fits no shape is left to the caller.

    model, kv_cache, attend  as the engine has them; `attend` must not read lengths on the host
    max_num_seqs             most requests of one step
    max_model_len            most tokens of one context
    max_prompt_tokens        most rows of a step with a prompt in it; 0: only decodes are recorded
    capture                  records a forward pass and returns what replays it; tests run it directly instead

    A shape is recorded when it is first needed. Once that fails, as it does where memory ends, all graphs are dropped
    with a warning and every step is left to the caller.
    """

    def __init__(
        self,
        model,
        kv_cache,
        attend,
        max_num_seqs: int,
        max_model_len: int,
        max_prompt_tokens: int = 0,
        capture: Callable[[Replay], Replay] | None = None,
    ):
        self.model, self.kv_cache, self.attend = model, kv_cache, attend
        self.max_model_len = max_model_len
        self.decode_sizes = _up_to(DECODE_SIZES, max_num_seqs)
        self.prompt_sizes = [size for size in PROMPT_SIZES if size <= max_prompt_tokens]
        self.prompt_requests = _up_to(PROMPT_REQUESTS, max_num_seqs)
        self.graphs: dict[Shape, Graph] = {}
        self.failed = False
        self._logits: torch.Tensor | None = None  # [max_num_seqs, V]: one for all, as each graph would keep its own
        self._capture = capture or CudaCapture()

    def __call__(self, batch: Batch) -> torch.Tensor | None:
        """Logits [B', V] of the rows `batch.logits_indices`, valid until the next call.

        None: there is no graph for such a step.
        """
        shape = self.shape_of(batch)
        graph = None if shape is None else self._graph(shape)
        if graph is None:
            return None
        fill(graph.batch, batch)
        if graph.embedded is not None:
            graph.embedded[: len(batch.token_ids)].copy_(self.model.embed(batch))
        return graph.replay()[: len(batch.logits_indices)]

    def shape_of(self, batch: Batch) -> Shape | None:
        """The smallest shape that holds a step of decodes, or of decodes and chunks of prompts."""
        num_tokens, num_requests = len(batch.token_ids), batch.num_requests
        if num_requests == 0 or num_requests > self.decode_sizes[-1]:
            return None
        if max(batch.query_lens) == 1:
            if not self.prompt_sizes and len(batch.logits_indices) < num_requests:
                return None  # one token of a prompt
            size = _at_least(self.decode_sizes, num_requests)
            return Shape(size, size)
        if any(1 < n <= MOST_DECODED for n in batch.query_lens):
            return None
        requests = _at_least(self.prompt_requests, num_requests)
        rows = _at_least(self.prompt_sizes, max(num_tokens, requests + MOST_DECODED))
        return None if rows is None else Shape(rows, requests)

    def _graph(self, shape: Shape) -> Graph | None:
        if shape not in self.graphs and not self.failed:
            try:
                self.graphs[shape] = self._record(shape)
            except RuntimeError as error:  # the end of memory is one
                self.failed = True
                self.graphs.clear()
                self._logits = None
                logger.warning(
                    "a step of %d rows was not recorded, so from here on all steps run eagerly, which is slower; with "
                    "a lower gpu_memory_utilization there is more memory for graphs, with enforce_eager none is "
                    "recorded: %s", shape.num_tokens, error,
                )  # fmt: skip
        return self.graphs.get(shape)

    def _record(self, shape: Shape) -> Graph:
        """A graph over buffers that hold nothing but padding: recording it leaves the cache as it is."""
        batch, embedded, model = self._padding(shape), None, self.model
        if self._logits is None:
            size = self.decode_sizes[-1], model.config.vocab_size
            self._logits = torch.empty(size, dtype=torch.float32, device=model.device)
        logits = self._logits[: shape.num_requests]
        if isinstance(model.embed, HostEmbedding):
            size = shape.num_tokens, model.config.hidden_size
            embedded = torch.zeros(size, dtype=model.dtype, device=model.device)

        def run() -> torch.Tensor:
            return logits.copy_(model.forward(batch, self.kv_cache, self.attend, embedded=embedded))

        return Graph(batch, self._capture(run), embedded)

    def _padding(self, shape: Shape) -> Batch:
        device = self.model.device
        num_tokens, num_requests = shape

        def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        return Batch(
            token_ids=zeros(num_tokens),
            positions=zeros(num_tokens),
            query_start_loc=zeros(num_requests + 1, dtype=torch.int32),
            seq_lens=zeros(num_requests, dtype=torch.int32),
            block_tables=zeros(num_requests, -(-self.max_model_len // self.kv_cache.block_size), dtype=torch.int32),
            slot_mapping=zeros(num_tokens) - 1,
            logits_indices=zeros(num_requests),
            # What is launched must do for every step of this shape: a chunk beside decodes, each at its longest.
            query_lens=[num_tokens - num_requests + 1] + [1] * (num_requests - 1),
            context_lens=[self.max_model_len] * num_requests,
        )


def fill(buffers: Batch, batch: Batch) -> None:
    """Copy a step into the first rows and requests of a graph's buffers; the others become padding."""
    num_tokens, num_requests, num_logits = len(batch.token_ids), batch.num_requests, len(batch.logits_indices)
    for name in ("token_ids", "positions", "slot_mapping"):
        getattr(buffers, name)[:num_tokens].copy_(getattr(batch, name))
    buffers.slot_mapping[num_tokens:] = -1
    buffers.seq_lens[:num_requests].copy_(batch.seq_lens)
    buffers.seq_lens[num_requests:] = 0
    buffers.query_start_loc[: num_requests + 1].copy_(batch.query_start_loc)
    buffers.query_start_loc[num_requests + 1 :] = num_tokens
    buffers.block_tables[:num_requests, : batch.block_tables.shape[1]].copy_(batch.block_tables)
    buffers.logits_indices[:num_logits].copy_(batch.logits_indices)
    buffers.logits_indices[num_logits:] = 0


def launch_bound_tokens(model: ModelConfig, gpu_name: str, dtype: torch.dtype) -> int:
    """Rows of a step up to which a GPU computes faster than a host starts kernels; 512 for a GPU that is not listed.

    Two FLOPs per row and parameter at `REACHED` of the GPU's peak, against `LAUNCH_SECONDS` per layer.
    """
    device = by_gpu_name(gpu_name)
    name = str(dtype).removeprefix("torch.")
    if device is None or not device.has(name):
        return 512
    rows_per_second = REACHED * device.peak(name) / (2 * model.num_parameters)
    return int(LAUNCH_SECONDS * model.num_hidden_layers * rows_per_second)


def choose_step_graphs(
    config: EngineConfig, model, kv_cache, attend, max_num_seqs: int, max_model_len: int
) -> tuple[StepGraphs | None, str]:
    """The graphs of an engine, or None where it records none, and why."""
    why = why_eager(config, model.device, attend)
    if why:
        return None, why
    most, prompts = 0, "prompts run eagerly, because lengths are read on the host"
    if type(attend) is TritonAttention and config.early_exit_layer is None:
        gpu_name = torch.cuda.get_device_name(model.device)
        most = launch_bound_tokens(model.config, gpu_name, model.dtype)
        prompts = f"up to {most} rows with prompts among them, which take less time than their launches"
    graphs = StepGraphs(model, kv_cache, attend, max_num_seqs, max_model_len, most)
    return graphs, f"one CUDA graph per shape, recorded when it is first needed: decodes; {prompts}"


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


def _up_to(sizes: tuple[int, ...], most: int) -> list[int]:
    """Those below `most`, and `most` itself."""
    return [*(size for size in sizes if size < most), most]


def _at_least(sizes: list[int], wanted: int) -> int | None:
    """The first of ascending sizes that is not smaller, or None."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
