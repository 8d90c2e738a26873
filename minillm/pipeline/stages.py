"""The layers of one model on several processes, one behind the other: a stage each, and chunks that flow through them.

    stage 0   chunk 0 | chunk 1 | chunk 2 | chunk 3 |
    stage 1           | chunk 0 | chunk 1 | chunk 2 | chunk 3

Every stage knows the whole step beforehand, because rank 0 announces it (parallel/driver.py: a header of lengths, then
the numbers), and cuts its rows into the same chunks; what travels is the residual stream of a chunk, T x E values. A
chunk is sent while the next one is computed, and asked for before the one in front of it is computed. A step whose
chunks take equally long leaves each stage idle for (stages - 1) / (chunks + stages - 1) of its time. A decode step is
a single chunk, so decodes gain nothing. Lesson 17, after GPipe (Huang et al. 2019, arXiv 1811.06965).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import torch

from minillm.batch import Batch
from minillm.errors import ConfigError
from minillm.kv_cache import KVCache
from minillm.model import CheckedWeights, Transformer
from minillm.model_config import ModelConfig
from minillm.parallel.ranks import Ranks
from minillm.profiler import NO_PARTS
from minillm.weights import LazyWeights, Weight, expected_shapes

CHUNK_ROWS = 128


class StageTransformer(Transformer):
    """The layers that one rank holds; all ranks call `forward` with the same batch at the same time.

    config, weights  of the whole model
    ranks            the processes that hold the stages, in order
    chunk_rows       rows of a chunk; the last one of a step may be shorter
    others           as Transformer has them

    The first stage holds the embedding, the last one the LM head; rank 0 gets the logits. Raises ConfigError when there
    are more stages than layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        ranks: Ranks,
        chunk_rows: int = CHUNK_ROWS,
        **others,
    ):
        check_stages(config, ranks.size)
        self.ranks = ranks
        self.chunk_rows = chunk_rows
        self.is_first, self.is_last = ranks.rank == 0, ranks.rank == ranks.size - 1
        layers = layers_of_stage(config, ranks.rank, ranks.size)
        super().__init__(config_of_stage(config, layers), weights_of_stage(config, weights, layers), **others)
        if not self.is_first:
            self.embed = None
            self.embedding = self.embedding.new_empty(0)  # a head that is tied to it keeps it

    def make_head(self, weights: CheckedWeights):
        return super().make_head(weights) if self.is_last else NoHead()

    def forward(
        self, batch: Batch, kv: KVCache, attend, parts=NO_PARTS, embedded: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B', V] in float32 on rank 0, nothing elsewhere."""
        x = self._residual_stream(batch, kv, attend, parts, embedded)
        with parts("lm_head"):
            rows = self.norm(x[batch.logits_indices]) if self.is_last else x
            return self._to_first(rows, len(batch.logits_indices), logits=True)

    def hidden(self, batch: Batch, kv: KVCache, attend, parts=NO_PARTS) -> torch.Tensor:
        """The rows [T, E] that `lm_head` takes, on rank 0."""
        x = self._residual_stream(batch, kv, attend, parts)
        return self._to_first(self.norm(x) if self.is_last else x, batch.num_tokens, logits=False)

    def lm_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] in float32 of normed rows [n, E], which every rank has; on rank 0."""
        return self._to_first(rows, len(rows), logits=True)

    def _residual_stream(self, batch: Batch, kv: KVCache, attend, parts, embedded=None) -> torch.Tensor:
        """[T, E] after the last layer on the last stage, no rows elsewhere."""
        chunks, before = cut(batch, self.chunk_rows), 0
        arriving = None if self.is_first else self._receive(chunks[0])
        done, leaving = [], []
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            if self.is_first:
                with parts("linear"):
                    x = self.embed(chunk) if embedded is None else embedded[before : before + chunk.num_tokens]
                before += chunk.num_tokens
            else:
                x = self.ranks.wait_for(arriving)
                arriving = None if following is None else self._receive(following)
            x = self.through_layers(x, chunk, kv, attend, parts)
            if self.is_last:
                done.append(x)
            else:
                leaving.append(self.ranks.send(x, self.ranks.rank + 1))
        for sent in leaving:
            self.ranks.wait_for(sent)
        return torch.cat(done) if self.is_last else x[:0]

    def _receive(self, chunk: Batch):
        return self.ranks.receive((chunk.num_tokens, self.config.hidden_size), self.dtype, self.ranks.rank - 1)

    def _to_first(self, rows: torch.Tensor, count: int, logits: bool) -> torch.Tensor:
        """Rows of the last stage, or the logits of them, on rank 0; nothing on the others."""
        width = self.config.vocab_size if logits else self.config.hidden_size
        dtype = torch.float32 if logits else self.dtype
        if self.is_last and logits:
            rows = super().lm_head(rows)
        if self.is_first == self.is_last or count == 0:  # there is one stage, or this one is in the middle
            return rows if self.is_last else torch.empty(0, width, dtype=dtype, device=self.device)
        if self.is_last:
            self.ranks.wait_for(self.ranks.send(rows, 0))
            return rows[:0]
        return self.ranks.wait_for(self.ranks.receive((count, width), dtype, self.ranks.size - 1))


class NoHead:
    """What stands for the LM head on a stage that has none."""

    num_weight_bytes: Counter[str] = Counter()


def check_stages(config: ModelConfig, size: int) -> None:
    """Raises ConfigError when a model has fewer layers than stages."""
    if size > config.num_hidden_layers:
        raise ConfigError(
            f"pipeline_parallel_size={size} is more than the model's {config.num_hidden_layers} layers; each stage "
            f"needs one"
        )


def layers_of_stage(config: ModelConfig, rank: int, size: int) -> range:
    """Equal shares of the layers; the first stages hold one more where they do not divide, as the last has the head."""
    fewer, more = divmod(config.num_hidden_layers, size)
    first = rank * fewer + min(rank, more)
    return range(first, first + fewer + (rank < more))


def config_of_stage(config: ModelConfig, layers: range) -> ModelConfig:
    """The shape of these layers alone."""
    window = config.sliding_layers
    if window is not None:
        window = tuple(layer - layers.start for layer in window if layer in layers)
    return replace(config, num_hidden_layers=len(layers), sliding_layers=window)


def weights_of_stage(config: ModelConfig, weights: Mapping[str, Weight], layers: range) -> LazyWeights:
    """These layers under the names of a model that has no others. Raises CheckpointError as the whole model would."""
    whole = CheckedWeights(config, weights)

    def read(name: str) -> Weight:
        prefix, _, rest = name.partition(".layers.")
        if rest:
            number, _, rest = rest.partition(".")
            name = f"{prefix}.layers.{int(number) + layers.start}.{rest}"
        return whole[name]

    return LazyWeights(expected_shapes(config_of_stage(config, layers)), read)


def cut(batch: Batch, rows: int) -> list[Batch]:
    """The rows of a batch in chunks, the last one shorter; each finds the chunks before it in the cache.

    A request whose rows lie in several chunks appears in each of them, as in chunked prefill. None of them is sampled.
    """
    ends = list(accumulate(batch.query_lens))
    return [_rows_of(batch, ends, start, min(start + rows, ends[-1])) for start in range(0, ends[-1], rows)]


def _rows_of(batch: Batch, ends: list[int], start: int, stop: int) -> Batch:
    queries, contexts, owners = [], [], []
    for owner, (end, num_rows) in enumerate(zip(ends, batch.query_lens, strict=True)):
        first, last = max(start, end - num_rows), min(stop, end)
        if first < last:
            queries.append(last - first)
            contexts.append(batch.context_lens[owner] - (end - last))
            owners.append(owner)
    tables = batch.block_tables[owners[0] : owners[-1] + 1]
    host_ids = batch.host_token_ids
    int32 = {"dtype": torch.int32, "device": tables.device}
    return Batch(
        token_ids=batch.token_ids[start:stop],
        positions=batch.positions[start:stop],
        query_start_loc=torch.tensor([0, *accumulate(queries)], **int32),
        seq_lens=torch.tensor(contexts, **int32),
        block_tables=tables,
        slot_mapping=batch.slot_mapping[start:stop],
        logits_indices=batch.logits_indices[:0],
        query_lens=queries,
        context_lens=contexts,
        host_token_ids=None if host_ids is None else host_ids[start:stop],
    )
