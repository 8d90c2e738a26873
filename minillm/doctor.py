"""What this machine offers, what the engine chose on it, and why. Prints nothing; `cli.py` shows it."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import psutil
import torch


def report(llm) -> dict:
    """Versions, processor or GPU, memory, the engine's choices with their reasons, and its sizes in bytes."""
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
        **llm.reasons,
        "max_model_len": llm.max_model_len,
        "weight_bytes": network.num_weight_bytes,
        "kv_cache_bytes": cache.num_bytes,
        "sampling": _changed(llm.default_sampling_params),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _changed(params) -> dict:
    """The sampling defaults that differ from SamplingParams(), as the model's own files ask for."""
    plain = type(params)()
    return {name: value for name, value in vars(params).items() if value != getattr(plain, name)}
