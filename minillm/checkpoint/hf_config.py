"""From a Hugging Face folder's config.json and generation_config.json to our own dataclasses.

Both spellings of RoPE are read: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5). Fields that change the answers and that our model does not compute are refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm.errors import CheckpointError, ConfigError
from minillm.model_config import ARCHITECTURES, ModelConfig, RopeScaling
from minillm.sampling_params import SamplingParams

# What a field means when config.json leaves it out: the defaults of transformers' config classes.
COMMON_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "head_dim": None}
FAMILY_DEFAULTS = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
QWEN_WINDOW, QWEN_FULL_LAYERS = 4096, 28
MAX_LAYERS = 1000  # the deepest published model of these families has 126
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # never read


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def model_config(values: Mapping[str, Any], path: Path) -> ModelConfig:
    """The ModelConfig that a config.json describes. Raises CheckpointError naming the field."""
    architecture = values.get("model_type")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{path}: model_type {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    values = {**COMMON_DEFAULTS, **FAMILY_DEFAULTS[architecture], **values}

    def need(key: str, *kinds: type) -> Any:
        if type(values.get(key)) not in (kinds or (int,)):
            raise CheckpointError(f"{path}: {key}={values.get(key)!r} is missing or of the wrong type")
        return values[key]

    _refuse_unknown_parts(values, path)
    heads, layers = need("num_attention_heads"), need("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise CheckpointError(f"{path}: num_hidden_layers={layers} is more than {MAX_LAYERS}, so it must be a mistake")
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads
    if values["head_dim"] is None:
        values["head_dim"] = need("hidden_size") // max(heads, 1)
    theta, scaling = _rope(values, path)
    window, window_layers = _sliding_window(values, layers, path)
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=need("vocab_size"),
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=need("num_key_value_heads"),
            head_dim=need("head_dim"),
            max_position_embeddings=need("max_position_embeddings"),
            rms_norm_eps=float(need("rms_norm_eps", int, float)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=need("tie_word_embeddings", bool),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=window,
            sliding_layers=window_layers,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def generation_defaults(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The sampling defaults in a generation_config.json, under SamplingParams' names.

    `do_sample: false` means greedy, so temperature becomes 0 and the fields that shape sampling go.
    """
    found = {name: values[name] for name in SAMPLING_FIELDS if values.get(name) is not None}
    if values.get("do_sample") is False:
        found = {"temperature": 0.0} | {k: v for k, v in found.items() if k == "repetition_penalty"}
    try:
        SamplingParams(**found)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return found


def eos_ids(values: Mapping[str, Any], path: Path) -> list[int]:
    """`eos_token_id` of a config: absent, one id, or a list."""
    eos = values.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(i) is not int for i in ids):
        raise CheckpointError(f"{path}: eos_token_id={eos!r} is neither a token id nor a list of them")
    return ids


def _refuse_unknown_parts(values: Mapping[str, Any], path: Path) -> None:
    architecture = values["model_type"]
    if values["hidden_act"] != "silu":
        raise CheckpointError(f"{path}: hidden_act={values['hidden_act']!r} is not supported; supported: 'silu'")
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key) and not (key == "attention_bias" and architecture == "qwen2"):
            raise CheckpointError(f"{path}: {key}={values[key]!r} is not supported for {architecture}")
    if values.get("quantization_config"):
        raise CheckpointError(
            f"{path}: the weights are quantised, quantization_config={values['quantization_config']}; "
            "give the unquantised model, or a GGUF file for 4 bits"
        )


def _rope(values: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from either spelling; as in transformers, `rope_scaling` wins when both are there."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{path}: RoPE parameters {given!r} are not an object")
    rope = {"rope_theta": values.get("rope_theta", 10000.0), **given}
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"{path}: RoPE parameters that differ by layer are not supported")
    if kind not in ("default", "llama3"):
        raise CheckpointError(f"{path}: rope_type={kind!r} is not supported; supported: 'default', 'llama3'")
    if partial not in (None, 1):
        raise CheckpointError(f"{path}: partial_rotary_factor={partial} is not supported; whole heads turn here")
    try:
        theta = float(rope["rope_theta"])
        if not 0 < theta < math.inf:
            raise ValueError("rope_theta must be positive")
        if kind == "default":
            return theta, None
        return theta, RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: rope_type='llama3' needs {error} beside it") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: RoPE parameters {rope} are not usable numbers") from error


def _sliding_window(values: Mapping[str, Any], layers: int, path: Path) -> tuple[int | None, tuple[int, ...] | None]:
    """(window, layers that use it or None for all). Mistral: all layers. Qwen: chosen ones, if switched on."""
    if values["model_type"] == "llama":
        return None, None
    if values["model_type"] == "mistral":
        return values["sliding_window"], None
    if not values.get("use_sliding_window", False):
        return None, None
    full, kinds = values.get("max_window_layers", QWEN_FULL_LAYERS), values.get("layer_types")
    if kinds is None and type(full) is int:
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"{path}: layer_types={kinds!r} must name full_attention or sliding_attention for each of {layers} layers"
            f" (without it, max_window_layers={full!r} must be a number)"
        )
    chosen = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    return (values.get("sliding_window", QWEN_WINDOW), chosen) if chosen else (None, None)
