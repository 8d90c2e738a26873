"""The Llama family's forward pass over one flat ragged batch: token ids in, logits out.

RMSNorm, RoPE, grouped-query attention, SwiGLU; with the biases of Qwen2, the q/k norms of Qwen3 and, through
`KVLayer.window`, the sliding window of Mistral. It does not know which request a row belongs to: that is the
business of the attention body it is handed. Built in lesson 03, after Llama 2 (Touvron et al. 2023,
arXiv 2307.09288).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from minillm.batch import Batch
from minillm.embedding import Embedding, HostEmbedding, PCIe
from minillm.errors import CheckpointError, ConfigError
from minillm.kv_cache import KVCache
from minillm.linear import Forms, PlainLinear, choose_forms
from minillm.model_config import ModelConfig
from minillm.norm import RMSNorm
from minillm.ops import choose_ops
from minillm.profiler import NO_PARTS
from minillm.rope import Rope
from minillm.weights import Weight, check_finite, expected_shapes

ALL_LAYERS = slice(None)


class Transformer:
    """A decoder with its weights, ready to multiply.

    weights       tensors or 4-bit codes under Hugging Face names
    quantization  what the matrices are rounded to, as EngineConfig has it; see `linear/choose.py`
    forms         how matrices are held; None: whatever `choose_forms` finds best
    ops           the steps between the matrices, plain or fused; None: whatever `choose_ops` finds best
    host_table    the embedding table stays in CPU memory; on a CPU that is where it is anyway

    Raises CheckpointError when a tensor is missing, unknown, of the wrong shape or not finite.
    Call it under `torch.inference_mode()`, as the engine does.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        quantization: str = "none",
        forms: Forms | None = None,
        ops=None,
        host_table: bool = False,
    ):
        weights = CheckedWeights(config, weights)
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.forms = forms or choose_forms(dtype, self.device, quantization)
        self.ops = ops or choose_ops(self.device)

        self.host_table = host_table and self.device.type != "cpu"
        home = replace(self.forms, device=torch.device("cpu")) if self.host_table else self.forms
        self.embedding = home.tensor(weights["model.embed_tokens.weight"])  # [V, E]
        self.embed = HostEmbedding(self.embedding, PCIe(self.device)) if self.host_table else Embedding(self.embedding)
        self.head = self.make_head(weights)
        if self.host_table:
            self._check_that_it_saves_memory()
        self.layers = [DecoderLayer(config, index, weights, self.forms) for index in range(config.num_hidden_layers)]
        self.norm = RMSNorm(self.forms.tensor(weights["model.norm.weight"]), config.rms_norm_eps)
        self.rope = Rope(config, dtype, device)

    def make_head(self, weights: CheckedWeights):
        """What turns normed rows [n, E] into logits [n, V]."""
        matrix = self.embedding if self.config.tie_word_embeddings else weights["lm_head.weight"]
        return self.forms.make([matrix], head=True)

    def forward(
        self, batch: Batch, kv: KVCache, attend, parts=NO_PARTS, embedded: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B', V] in float32 of the rows `batch.logits_indices`; K and V of all rows go into `kv`.

        embedded  [T, E] of the batch's tokens, where they have been looked up before
        """
        x = self._residual_stream(batch, kv, attend, parts, embedded)
        with parts("lm_head"):
            return self.lm_head(self.norm(x[batch.logits_indices]))

    def hidden(self, batch: Batch, kv: KVCache, attend, parts=NO_PARTS) -> torch.Tensor:
        """The rows [T, E] that `lm_head` takes: all of them, after the final norm."""
        x = self._residual_stream(batch, kv, attend, parts)
        with parts("linear"):
            return self.norm(x)

    def lm_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] in float32 of normed rows [n, E]."""
        return self.head(rows).float()

    def _check_that_it_saves_memory(self) -> None:
        if self.config.tie_word_embeddings and isinstance(self.head, PlainLinear):
            raise ConfigError(
                f"embedding_device='cpu' saves nothing here: the LM head of this model is its embedding table "
                f"({self.embedding.nbytes:,} bytes), which multiplies on the {self.device.type} device; drop the option"
            )

    def _residual_stream(self, batch: Batch, kv: KVCache, attend, parts, embedded=None) -> torch.Tensor:
        """[T, E] after the last layer, before the final norm."""
        with parts("linear"):
            rows = [self.embed(batch) if embedded is None else embedded]
        return self.through_layers(rows.pop(), batch, kv, attend, parts)  # kept here, they would outlive their use

    def through_layers(
        self, x: torch.Tensor, batch: Batch, kv: KVCache, attend, parts=NO_PARTS, which: slice = ALL_LAYERS
    ) -> torch.Tensor:
        """[T, E] after these layers of what came into the first of them: x [T, E], which may be overwritten."""
        with parts("linear"):
            angles = self.rope.at(batch.positions)
        update = None  # what the last block adds to x; added where x is next normed, so both can be one kernel
        for layer, kv_layer in zip(self.layers[which], kv.layers[which], strict=True):
            with parts("linear"):
                x, heads = layer.project(x, update, self.ops)
            q, k, v = self.ops.turn_and_write(heads, layer.qk_norms, angles, kv_layer, batch.slot_mapping, parts)
            with parts("attention"):
                attended = attend(q, k, v, kv_layer, batch)  # [T, H, D]
            with parts("linear"):
                x, update = layer.mix(x, attended, self.ops)
        with parts("linear"):
            return x + update

    @property
    def num_table_bytes(self) -> int:
        """Bytes of the embedding table, wherever it lies."""
        return self.embedding.nbytes

    @property
    def num_weight_bytes(self) -> dict[str, int]:
        """Bytes of the weights by the form they are held in; a matrix held twice counts twice."""
        size = Counter({"embedding in CPU memory" if self.host_table else "embedding": self.embedding.nbytes})
        for layer in self.layers:
            for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj):
                size += linear.num_weight_bytes
        if getattr(self.head, "weight", None) is not self.embedding:
            size += self.head.num_weight_bytes
        return dict(size)


class DecoderLayer:
    """x = x + O(attention(norm(x)));  x = x + mlp(norm(x))"""

    def __init__(self, config: ModelConfig, index: int, weights: CheckedWeights, forms: Forms):
        def get(name: str) -> Weight:
            return weights[f"model.layers.{index}.{name}"]

        def norm(name: str) -> RMSNorm:
            return RMSNorm(forms.tensor(get(name)), config.rms_norm_eps)

        self.head_dim = config.head_dim

        # q, k and v read the same x, so their matrices are stacked and x is read once; so are gate and up.
        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        bias = torch.cat([get(f"{name}.bias") for name in qkv]) if config.qkv_bias else None
        self.input_norm = norm("input_layernorm.weight")
        self.qkv_proj = forms.make([get(f"{name}.weight") for name in qkv], bias)
        self.qk_norms = tuple(norm(f"self_attn.{x}_norm.weight") for x in "qk") if config.qk_norm else None
        self.o_proj = forms.make([get("self_attn.o_proj.weight")])

        self.post_attention_norm = norm("post_attention_layernorm.weight")
        self.gate_up_proj = forms.make([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])
        self.down_proj = forms.make([get("mlp.down_proj.weight")])

    def project(self, x: torch.Tensor, update: torch.Tensor | None, ops) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + update [T, E], its q, k and v as stacked heads [T, H + 2 Hkv, D])."""
        x, normed = ops.add_norm(x, update, self.input_norm)
        return x, self.qkv_proj(normed).unflatten(1, (-1, self.head_dim))

    def mix(self, x: torch.Tensor, attended: torch.Tensor, ops) -> tuple[torch.Tensor, torch.Tensor]:
        """(x with attention's answer [T, H, D] added, what the feed-forward block adds to that): both [T, E]."""
        x, normed = ops.add_norm(x, self.o_proj(attended.flatten(1)), self.post_attention_norm)
        return x, self.down_proj(ops.silu_mul(self.gate_up_proj(normed)))


class CheckedWeights:
    """The checkpoint's weights by name, compared with the config: names now, shapes and values as each one is read.

    Files decode a tensor when it is asked for, so it is asked for once. A tensor that nobody would read is
    refused too: a bias silently left out gives a model that talks nonsense.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]):
        self.weights = weights
        self.shapes = expected_shapes(config)
        for name, shape in self.shapes.items():
            if name not in weights:
                raise CheckpointError(f"tensor {name!r} of shape {list(shape)} is missing from the weights")
        for name in weights:
            # A tied head may be stored again, and old files hold the rotary frequencies: both repeat something.
            repeats = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
            if name not in self.shapes and not repeats:
                raise CheckpointError(
                    f"tensor {name!r} has no place in a {config.architecture} of {config.num_hidden_layers} layers, "
                    f"qkv_bias={config.qkv_bias}, qk_norm={config.qk_norm}; leaving it out would change the answers"
                )

    def __getitem__(self, name: str) -> Weight:
        weight = self.weights[name]
        if tuple(weight.shape) != self.shapes[name]:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(weight.shape)}, but the config asks for {list(self.shapes[name])}"
            )
        check_finite(name, weight)
        return weight
