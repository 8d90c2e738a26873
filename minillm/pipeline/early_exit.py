"""Prompt tokens that leave the model after some layers, and what the layers behind then find in the cache.

The layers that a token skips still need its K and V, because later tokens look for them there. They are made as CALM
makes them (Schuster et al. 2022, arXiv 2207.07061): each skipped layer projects the state with which the token left by
its own K and V matrices, as if the layers between had added nothing. Saved are attention, output projection and
feed-forward of those layers; paid is whatever the layers would have added. The last token of a prompt goes through all
layers, since its final state is the first new token, and so does every token that is generated. Leaving after layer
L - 1 is exact: the last layer's K and V are made of that very state, and nobody reads what it adds to those rows.

CALM exits where a trained classifier is confident and while decoding; here every token but the last leaves at one
layer, of a checkpoint that never learnt it. `minillm bench --compare pipeline` measures what that costs. Lesson 17.
"""

from __future__ import annotations

import torch

from minillm.batch import Batch
from minillm.errors import ConfigError
from minillm.kv_cache import KVCache
from minillm.model import Transformer
from minillm.profiler import NO_PARTS


class EarlyExit:
    """A part that stands where `Engine` expects its model.

    model  the whole one; what is not said here is its business
    layer  layers that every token goes through, 1 to L; L is the whole model

    In chunks, in batches and over pages the tokens are the same. They may differ after a preemption, when generated
    tokens are computed again as a prompt, and after a prefix hit, where some of what is found went through all layers.
    `hidden`, and with it `LLM.score`, is the whole model's. Raises ConfigError for a layer that the model lacks.
    """

    def __init__(self, model: Transformer, layer: int):
        check_layer(layer, model.config.num_hidden_layers)
        self.model = model
        self.layer = layer

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    @property
    def saved_share(self) -> float:
        """Of the layers' products with their weights, by parameters: what the tokens that leave do not multiply."""
        config = self.model.config
        q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        skipped, kept = q + 3 * config.intermediate_size, q + 2 * kv  # times E: o, gate, up, down; q, k, v
        return (1 - self.layer / config.num_hidden_layers) * skipped / (skipped + kept)

    @property
    def reason(self) -> str:
        """What was chosen, in a line."""
        num_layers = self.model.config.num_hidden_layers
        what = "exact" if self.layer >= num_layers - 1 else "another model"
        how = f"prompt tokens but the last leave after {self.layer} of {num_layers}"
        return f"{how}, which saves {self.saved_share:.0%} of their products; {what}"

    def forward(
        self, batch: Batch, kv: KVCache, attend, parts=NO_PARTS, embedded: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B', V] in float32 of the rows `batch.logits_indices`, the only ones that go through all layers."""
        model, staying = self.model, batch.logits_indices
        if len(staying) == batch.num_tokens:
            return model.forward(batch, kv, attend, parts, embedded)
        x = model.embed(batch) if embedded is None else embedded
        x = model.through_layers(x, batch, kv, attend, parts, slice(self.layer))  # [T, E]
        alone = rows_alone(batch)
        with parts("linear"):
            angles = model.rope.at(batch.positions)
        for layer, kv_layer in zip(model.layers[self.layer :], kv.layers[self.layer :], strict=True):
            with parts("linear"):
                _, heads = layer.project(x, None, model.ops)  # rows that have left keep the x they left with
            q, k, v = model.ops.turn_and_write(heads, layer.qk_norms, angles, kv_layer, batch.slot_mapping, parts)
            if not len(staying):
                continue
            with parts("attention"):
                attended = attend(q[staying], k[staying], v[staying], kv_layer, alone)
            with parts("linear"):
                rows, update = layer.mix(x[staying], attended, model.ops)
                x[staying] = rows + update
        with parts("lm_head"):
            return model.lm_head(model.norm(x[staying]))


def check_layer(layer: int, num_layers: int) -> None:
    """Raises ConfigError when a model of so many layers has no such one."""
    if not 1 <= layer <= num_layers:
        raise ConfigError(f"early_exit_layer={layer} is not one of this model's layers, 1 to {num_layers}")


def rows_alone(batch: Batch) -> Batch:
    """The rows `batch.logits_indices` as a step of their own: one query of each request, the others in the cache."""
    rows = batch.logits_indices
    owners = torch.searchsorted(batch.query_start_loc[1:].long(), rows, right=True)
    contexts = [batch.context_lens[owner] for owner in owners.tolist()]
    return Batch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        query_start_loc=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
        seq_lens=batch.seq_lens[owners],
        block_tables=batch.block_tables[owners],
        slot_mapping=batch.slot_mapping[rows],
        logits_indices=torch.arange(len(rows), device=rows.device),
        query_lens=[1] * len(rows),
        context_lens=contexts,
    )
