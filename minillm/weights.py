"""Which tensors a model needs, and the mapping through which it gets them.

The names and shapes follow from the config alone, so every source of weights (GGUF, safetensors, random)
is checked against the same table before one byte of a tensor is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from minillm.errors import CheckpointError
from minillm.model_config import ModelConfig
from minillm.quantize import GroupQuantized

Weight = torch.Tensor | GroupQuantized
Shape = tuple[int, ...]


class LazyWeights(Mapping[str, Weight]):
    """name -> weight, read anew each time it is asked for: keep what you need, the mapping keeps nothing."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Weight]):
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> Weight:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model under Hugging Face's name, in the order of the forward pass."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, e)}
    for i in range(config.num_hidden_layers):
        layer, attention = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        shapes[layer + "input_layernorm.weight"] = (e,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{attention}{name}_proj.weight"] = (rows, e)
            if config.qkv_bias:
                shapes[f"{attention}{name}_proj.bias"] = (rows,)
        if config.qk_norm:
            shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (d,)
        shapes[attention + "o_proj.weight"] = (e, q)
        shapes[layer + "post_attention_layernorm.weight"] = (e,)
        shapes[layer + "mlp.gate_proj.weight"] = shapes[layer + "mlp.up_proj.weight"] = (f, e)
        shapes[layer + "mlp.down_proj.weight"] = (e, f)
    shapes["model.norm.weight"] = (e,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, e)
    return shapes


def check_shapes(
    config: ModelConfig,
    found: Mapping[str, Shape],
    source: object,
    file_name: Callable[[str], str] = lambda name: name,
) -> dict[str, Shape]:
    """`expected_shapes(config)`, after making sure that a file holds exactly these tensors.

    found      shape of every tensor in the file, under the file's own names
    file_name  the file's own name of a Hugging Face name

    Raises CheckpointError naming the first tensor that is missing, misshapen or unknown.
    """
    if config.num_hidden_layers > len(found):
        raise CheckpointError(f"{source}: {config.num_hidden_layers} layers, but only {len(found)} tensors")
    expected = expected_shapes(config)
    wanted = {file_name(name): shape for name, shape in expected.items()}
    for name, shape in wanted.items():
        if found.get(name, shape) != shape:
            raise CheckpointError(
                f"{source}: tensor {name!r} has shape {list(found[name])}, but the config asks for {list(shape)}"
            )
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(
            f"{source}: tensor {missing[0]!r} of shape {list(wanted[missing[0]])} is missing{_and_more(missing)}; "
            f"the config asks for {len(wanted)} tensors, the file holds {len(found)}"
        )
    unknown = [name for name in found if name not in wanted]
    if unknown:
        raise CheckpointError(
            f"{source}: tensor {unknown[0]!r} of shape {list(found[unknown[0]])} has no place in the model that the "
            f"config describes{_and_more(unknown)}; leaving it out would change the answers"
        )
    return expected


def check_finite(name: str, weight: Weight) -> None:
    """Raises CheckpointError for a weight that holds NaN or an infinity: every answer would be NaN, and where weights
    are rounded it would be the scale of all its neighbours."""
    parts = (weight.scale, weight.minimum) if isinstance(weight, GroupQuantized) else (weight,)
    for part in parts:
        if part.numel() and not all(bound.isfinite() for bound in part.aminmax()):
            raise CheckpointError(f"tensor {name!r} holds NaN or an infinity; load another copy of the model")


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
