"""What EngineConfig leaves open, chosen for this machine: device, dtype, length, KV blocks.

Each function takes the config and returns its choice with the reason that `minillm doctor` prints.
`open_engine.py` calls them in this order; the attention body is chosen in `attention/choose.py`.
"""

from __future__ import annotations

import os

import torch

from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.kv_cache import kv_bytes_per_block
from minillm.model_config import ModelConfig
from minillm.option_words import DTYPES, KV_CACHE_DTYPES

CPU_CACHE_SHARE = 0.25  # of the free memory
CPU_CACHE_LIMIT = 1 << 30  # bytes


def choose_device(config: EngineConfig) -> tuple[torch.device, str]:
    """cuda where there is one, else the CPU. Raises ConfigError for a device that cannot be used."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        reason = f"{name}: " + ("a CUDA GPU is there" if name == "cuda" else "no CUDA GPU is there")
    else:
        reason = f"{name}: asked for"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={name!r} is not a device PyTorch knows; use cpu or cuda") from error
    if device.type == "mps":
        raise ConfigError("device='mps' is not supported (no paged attention there); use device='cpu'")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} but PyTorch sees no CUDA GPU; use device='cpu'")
    if config.overlap_copies and device.type != "cuda":
        raise ConfigError(f"overlap_copies is for a GPU; on a {device.type} nothing is copied, so drop it")
    return device, reason


def choose_dtype(config: EngineConfig, device: torch.device) -> tuple[torch.dtype, str]:
    """bfloat16 where it is multiplied natively, else float16 on a GPU and float32 on a CPU."""
    if config.dtype != "auto":
        dtype = DTYPES[config.dtype]
        if device.type == "cpu" and dtype is torch.float16:
            raise ConfigError("dtype='float16' is not supported on a CPU; use bfloat16 or float32")
        if device.type == "cuda" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
            raise ConfigError("dtype='bfloat16' is only emulated below compute capability 8.0; use float16")
        return dtype, f"{config.dtype}: asked for"
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
        dtype = torch.bfloat16 if native else torch.float16
        return dtype, f"{dtype}: compute capability " + ("8.0 or newer" if native else "below 8.0")
    native = cpu_multiplies_bfloat16()
    dtype = torch.bfloat16 if native else torch.float32
    what = "multiplies bfloat16 natively" if native else "has no bfloat16 dot product"
    return dtype, f"{dtype}: this processor {what}"


def choose_kv_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """What rows of K and V are kept in: the model's dtype, or eight bits. Raises ConfigError for fp8 on a GPU without.

    Never chosen by itself: eight bits change the answers a little, and what they save is the user's to weigh.
    """
    kv_dtype = KV_CACHE_DTYPES[config.kv_cache_dtype]
    if kv_dtype is None:
        return dtype, f"{dtype}: that of the model, exact"
    if kv_dtype.is_floating_point and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise ConfigError(
                f"kv_cache_dtype={config.kv_cache_dtype!r} needs compute capability 8.9 (L4, RTX 40, H100), this GPU "
                "has {}.{}; use 'int8', or 'auto'".format(*capability)
            )
    return kv_dtype, f"{kv_dtype}: asked for; with the scales 1 + 4 / head size bytes per value, not {dtype.itemsize}"


def why_embedding(config: EngineConfig, device: torch.device, num_bytes: int) -> str:
    """Where the embedding table of so many bytes lies, for `minillm doctor`."""
    if device.type == "cpu":
        asked = "embedding_device='cpu' changes nothing: " if config.embedding_device == "cpu" else ""
        return f"cpu: {asked}the whole model is there"
    if config.embedding_device == "cpu":
        return f"cpu: asked for; its {num_bytes:,} bytes lie in CPU memory, and each step's rows are sent to the GPU"
    return f"{device.type}: beside the layers, {num_bytes:,} bytes"


def why_schedule(config: EngineConfig, scheduler) -> str:
    """What a step may hold, for `minillm doctor`."""
    limits = [f"at most {scheduler.max_num_batched_tokens} tokens and {scheduler.max_num_seqs} sequences in a step"]
    if not scheduler.enable_chunked_prefill:
        limits.append("every prompt in one step" + ", filled up to the longest beside it" * config.pad_batches)
    elif scheduler.chunk_limit:
        limits.append(f"prompts in chunks of at most {scheduler.chunk_limit}")
    else:
        limits.append("prompts in chunks where they do not fit")
    if scheduler.align_prefill_tokens:
        limits.append(f"cut where a step holds a multiple of {scheduler.align_prefill_tokens} tokens")
    return f"{config.scheduling_policy}: {', '.join(limits)}"


def why_prefix_cache(config: EngineConfig) -> str:
    """Whether K and V of earlier prompts are found again, for `minillm doctor`."""
    return "on: full blocks are found by their tokens" if config.enable_prefix_caching else "off: asked for"


def why_copies(config: EngineConfig, device: torch.device) -> str:
    """When a step's token ids and block tables go to the device, for `minillm doctor`."""
    if device.type == "cpu":
        return "none: a step's numbers are where they are needed"
    return "ahead, as asked: while the step before is computed" if config.overlap_copies else "as each step begins"


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """As asked, or all the positions that the model was trained for; more than those is refused."""
    wanted, trained = config.max_model_len, model.max_position_embeddings
    if wanted is not None and wanted > trained:
        raise ConfigError(f"max_model_len={wanted} is more than the {trained} positions the model was trained for")
    return wanted or trained


def choose_num_blocks(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> tuple[int, str]:
    """KV blocks that fit: as asked, or a share of what memory is free. They fit once the weights are loaded.

    kv_dtype is what rows are kept in, if not `dtype`. With several ranks `model` is the share of one, and
    kv_cache_memory_bytes is what each of them may use.
    """
    per_block = kv_bytes_per_block(model, config.block_size, kv_dtype or dtype)
    if config.num_kv_blocks is not None:
        check_memory("num_kv_blocks", config.num_kv_blocks, per_block, device)
        return config.num_kv_blocks, f"{config.num_kv_blocks} blocks: asked for"
    if config.kv_cache_memory_bytes is not None:
        check_memory("kv_cache_memory_bytes", config.kv_cache_memory_bytes, 1, device)
        budget, why = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1 - config.gpu_memory_utilization) * total - activation_bytes(config, model, dtype))
        why = f"gpu_memory_utilization={config.gpu_memory_utilization}"
    else:
        import psutil  # a GPU tells its free memory itself

        budget = min(CPU_CACHE_LIMIT, int(CPU_CACHE_SHARE * psutil.virtual_memory().available))
        why = "25% of free memory, at most 1 GiB"
        if config.num_ranks > 1:
            budget, why = budget // config.num_ranks, f"{why}, shared by the ranks"
    num_blocks = budget // per_block
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache may use {budget:,} bytes ({why}), but one block of {config.block_size} tokens takes "
            f"{per_block:,}; raise that limit or choose a smaller block_size"
        )
    return num_blocks, f"{num_blocks} blocks of {per_block} bytes: {why}"


def check_memory(name: str, value: int, num_bytes: int, device: torch.device) -> None:
    """Raises ConfigError when an option asks for so many times `num_bytes` and the device has less in all."""
    on_gpu = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] if on_gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if value * num_bytes > total:
        raise ConfigError(
            f"{name}={value} takes {value * num_bytes:,} bytes and this {device.type} device has {total:,} in all; "
            f"lower it"
        )


def activation_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """A generous bound on one step's activations: the widest tensors alive at once, for a full budget.

    Weights of int8 or int4 are written out for a product of many rows: the largest matrix is alive beside them.
    """
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    per_token = 4 * model.hidden_size + 3 * model.intermediate_size + 2 * heads
    logits = 3 * config.max_num_seqs * model.vocab_size * 4
    largest = max(2 * model.intermediate_size, model.vocab_size) * model.hidden_size
    widened = largest * dtype.itemsize if config.quantization in ("int8", "int4") else 0
    return config.max_num_batched_tokens * per_token * dtype.itemsize + logits + widened


def cpu_multiplies_bfloat16() -> bool:
    """Does this processor have bf16 dot products (AVX512-BF16 or AMX)? Elsewhere bf16 is emulated and slower."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in probes)
