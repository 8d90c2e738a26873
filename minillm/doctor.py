"""What this machine offers, what the engine chose on it, and why. Prints nothing; `cli.py` shows it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re

import psutil
import torch

from minillm.config import EngineConfig
from minillm.sampling_params import SamplingParams


def report(llm) -> dict:
    """Versions, processor or GPU, memory, the engine's choices with their reasons, and its sizes in bytes.

    options   those that are not what they would be by default
    sampling  defaults of the model's own files
    """
    network, cache = llm.engine.model, llm.engine.kv_cache
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "numba", "transformers")},
        "processor": f"{torch.backends.cpu.get_cpu_capability()}, {cores}",
        "free_memory": psutil.virtual_memory().available,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "model": llm.model_name,
        "options": _changed(llm.config),
        **llm.reasons,
        "max_model_len": llm.max_model_len,
        "weight_bytes": network.num_weight_bytes,
        "kv_cache_bytes": cache.num_bytes,
        "sampling": _changed(llm.default_sampling_params),
        "warnings": [warning for warning in (_interpreter_warning(),) if warning],
    }


def interpreter_warning(triton: str, numpy: str, interpreted: bool) -> str | None:
    """Why kernels will not run under TRITON_INTERPRET=1 with these versions, or None when they do.

    NumPy 2.4 no longer turns arrays of one element into numbers, which the interpreter counted on before Triton 3.7.
    """
    if not interpreted or not triton[0].isdigit() or _numbers(triton) >= (3, 7) or _numbers(numpy) < (2, 4):
        return None
    return f"the interpreter of triton {triton} fails with numpy {numpy}: pip install 'numpy<2.4', or triton 3.7"


def _interpreter_warning() -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
    return interpreter_warning(_version("triton"), _version("numpy"), interpreted)


def _numbers(version: str) -> tuple[int, int]:
    """(major, minor) of "3.7.1" or "2.4.0rc1"."""
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    return int(major), int(minor)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _changed(chosen: EngineConfig | SamplingParams) -> dict:
    """The fields that are not at their defaults."""
    plain = type(chosen)()
    return {name: value for name, value in vars(chosen).items() if value != getattr(plain, name)}
