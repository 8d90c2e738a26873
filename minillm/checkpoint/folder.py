"""A Hugging Face style folder: config.json, safetensors in one file or in shards, tokenizer.json.

`download` fetches such a folder from the hub, and only when a hub id was given. Weights in pickle files
(.bin, .pt, .pth) are refused: loading them can run code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from minillm.checkpoint.hf_config import PICKLE_SUFFIXES, eos_ids, generation_defaults, model_config, read_json
from minillm.errors import CheckpointError
from minillm.model_config import ModelConfig
from minillm.tokenizer import Tokenizer
from minillm.weights import LazyWeights, Shape, check_shapes

SUPPORTED = ("F32", "F16", "BF16")
WANTED_FROM_HUB = ("*.json", "*.jinja", "*.safetensors")
UNWANTED_FROM_HUB = ("*/*", "consolidated*")  # other forms of the same weights


def read_folder(folder: Path) -> tuple[ModelConfig, LazyWeights, Tokenizer, dict[str, Any]]:
    """Config, weights, tokenizer and sampling defaults of a folder.

    Weights keep the dtype of the file. Raises CheckpointError naming the file, field or tensor.
    """
    weight_files = _weight_files(folder)
    config_path, generation_path = folder / "config.json", folder / "generation_config.json"
    values = read_json(config_path)
    config = model_config(values, config_path)
    generation = read_json(generation_path) if generation_path.exists() else {}

    shards = {file: _open(file) for file in dict.fromkeys(weight_files.values())}
    shapes = {name: _shape(shards[file], name, file) for name, file in weight_files.items()}
    found = {name: shape for name, shape in shapes.items() if not _is_redundant(name, config)}
    expected = check_shapes(config, found, folder)

    tokenizer = Tokenizer.from_tokenizer_json(
        folder,
        vocab_size=config.vocab_size,
        extra_eos_ids=[*eos_ids(values, config_path), *eos_ids(generation, generation_path)],
    )
    weights = LazyWeights(expected, lambda name: shards[weight_files[name]].get_tensor(name))
    return config, weights, tokenizer, generation_defaults(generation, generation_path)


def download(hub_id: str) -> Path:
    """The folder of a model on the Hugging Face hub, fetched or from its cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"there is no folder {hub_id!r}, and to fetch it from the hub huggingface_hub is needed: "
            "pip install huggingface_hub, or download the model yourself and give its folder"
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=WANTED_FROM_HUB, ignore_patterns=UNWANTED_FROM_HUB))
    except Exception as error:  # the hub's errors, its HTTP library's and the file system's share no base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"there is no folder {hub_id!r}, and the hub did not deliver a model of that name: {reason}"
        ) from error


def _weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _shard_files(index)
    files = sorted(folder.glob("*.safetensors"))
    single = folder / "model.safetensors"
    if single not in files and len(files) > 1:
        raise CheckpointError(f"{folder} holds {len(files)} safetensors files, but no model.safetensors.index.json")
    if not files:
        raise CheckpointError(_no_weights(folder))
    file = single if single in files else files[0]
    return dict.fromkeys(_open(file).keys(), file)


def _shard_files(index: Path) -> dict[str, Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {file!r}; a shard is a .safetensors file in the same folder")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index} names {file!r}, which is missing from {index.parent}")
    return {name: index.parent / file for name, file in weight_map.items()}


def _no_weights(folder: Path) -> str:
    pickles = [file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES]
    ggufs = sorted(file for file in folder.iterdir() if file.suffix == ".gguf")
    if ggufs:
        return f"{folder} holds no safetensors; for the GGUF file in it give its path, {ggufs[0]}"
    if pickles:
        return (
            f"{folder} holds its weights as pickle only ({pickles[0]}), which can run code while it loads; "
            "save them as safetensors, for example with transformers' save_pretrained"
        )
    return f"{folder} holds no model: there is no .safetensors file in it"


def _open(file: Path):
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or cut short: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


def _shape(shard, name: str, file: Path) -> Shape:
    try:
        header = shard.get_slice(name)
    except SafetensorError as error:
        raise CheckpointError(f"{file} does not hold tensor {name!r}, which the index places there") from error
    if header.get_dtype() not in SUPPORTED:
        raise CheckpointError(
            f"{file}: tensor {name!r} is stored as {header.get_dtype()}; supported: {', '.join(SUPPORTED)}"
        )
    return tuple(header.get_shape())


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that repeat something: RoPE tables of old files, and the head of a model whose head is tied."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)
