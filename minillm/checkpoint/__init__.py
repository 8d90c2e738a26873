"""A model by name: its shape, its weights, its tokenizer and its sampling defaults, from three kinds of places.

GGUF files (the embedded default model is one), Hugging Face folders with safetensors, and seeded random
weights of any size. Everything is checked before anything is handed out, and weights are decoded one by
one when the model asks for them, so no model stands in memory twice. Pickle is never read: it can run code.
The readers of files are imported at the first file: random weights need neither gguf nor safetensors.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.checkpoint import embedded
from minillm.checkpoint.hf_config import PICKLE_SUFFIXES
from minillm.checkpoint.random_weights import CONFIGS, PREFIX, random_weights
from minillm.errors import CheckpointError
from minillm.model_config import ModelConfig
from minillm.tokenizer import Tokenizer
from minillm.weights import Weight

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Checkpoint:
    """All that a model file says. `weights` stand under Hugging Face's names, matrices as [out, in]."""

    name: str
    config: ModelConfig
    weights: Mapping[str, Weight]
    tokenizer: Tokenizer
    generation: dict[str, Any] = field(default_factory=dict)  # sampling defaults, under SamplingParams' names


def load(model: str | os.PathLike, *, seed: int = 0) -> Checkpoint:
    """Find and check a model; its weights are read when they are asked for.

    model   "smollm2-135m-instruct" (the embedded model), a .gguf file, a folder with config.json and
            safetensors, a hub id "owner/name" (downloaded), or "random:<config>"
    seed    of random weights

    Raises CheckpointError naming the file or tensor, what was expected and what was found.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise CheckpointError(f"model={model!r} is neither a name nor a path")
    model = os.fspath(model)
    if model.lower() == embedded.NAME:
        return _gguf(embedded.NAME, embedded.path())
    if model.startswith(PREFIX):
        config, weights = random_weights(model.removeprefix(PREFIX), seed)
        return Checkpoint(model, config, weights, Tokenizer.bytes_only(config.vocab_size))
    path = Path(model).expanduser()
    try:
        is_folder, is_file = bool(model) and path.is_dir(), path.is_file()
    except OSError as error:  # no right to look there, or a name that no file can have
        raise CheckpointError(f"model={model!r:.200} cannot be looked at: {error.strerror}") from error
    if is_folder:
        return _folder(path.resolve().name, path)
    if is_file:
        return _gguf(path.stem, _must_be_gguf(path))
    if HUB_ID.fullmatch(model) and path.suffix not in (".gguf", ".safetensors", *PICKLE_SUFFIXES):
        return _folder(model)
    raise CheckpointError(_not_found(model))


def _gguf(name: str, path: Path) -> Checkpoint:
    from minillm.checkpoint.gguf_file import read_gguf

    return Checkpoint(name, *read_gguf(path))


def _folder(name: str, path: Path | None = None) -> Checkpoint:
    """Without a path, `name` is a hub id."""
    from minillm.checkpoint.folder import download, read_folder

    return Checkpoint(name, *read_folder(path or download(name)))


def _must_be_gguf(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return path
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path} is a pickle file, which can run code while it loads; give safetensors or GGUF")
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{path} is one file of a model; give the folder it stands in, {path.resolve().parent}")
    raise CheckpointError(f"{path} is not a model: a file must be a .gguf, anything else is given as its folder")


def _not_found(model: str) -> str:
    names = [embedded.NAME, *(PREFIX + name for name in CONFIGS)]
    near = difflib.get_close_matches(model.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known names: {', '.join(names)}"
    return f"no model {model!r}: there is no such file or folder, and it is not a hub id like 'owner/name'; {hint}"
