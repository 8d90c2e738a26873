"""From options to a rank that is connected: the same steps on every rank, so that all of them hold matching parts.

`open_ranks` is what `LLM` calls. Under torchrun each process calls it, and only rank 0 comes back: the others follow
until it closes its LLM, and then end. Children of this process come here through worker.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict

import torch

from minillm.attention.choose import choose_attention
from minillm.checkpoint import Checkpoint
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.kv_cache import KVCache
from minillm.model import Transformer
from minillm.model_config import ModelConfig
from minillm.parallel.driver import DrivenCache, Driver, follow
from minillm.parallel.model import ParallelTransformer
from minillm.parallel.processes import Others, find_others
from minillm.parallel.ranks import Ranks
from minillm.parallel.split import check_split
from minillm.pipeline.stages import CHUNK_ROWS, StageTransformer, check_stages
from minillm.resources import choose_kv_dtype, choose_num_blocks


def open_ranks(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> tuple[Driver, DrivenCache, str, str]:
    """(model, cache, why so many blocks, how many ranks) for the engine on rank 0.

    Raises ConfigError before anything is started when the model cannot be split, when torchrun started another number
    of processes, or when GPUs are missing; RankError when a rank fails to start. On other ranks of torchrun it raises
    SystemExit when the work is done.
    """
    size, staged = config.num_ranks, config.pipeline_parallel_size > 1
    (check_stages if staged else check_split)(checkpoint.config, size)
    others = find_others(size, "pipeline_parallel_size" if staged else "tensor_parallel_size")
    check_device(device, size if others.local else others.local_rank + 1)
    try:
        others.start(config)
        with others.noting_failure():
            if others.rank > 0:
                run_rank(others, config, checkpoint, dtype, device)
                raise SystemExit(0)
            model, ranks, num_blocks, why = _connect(others, config, checkpoint, dtype, device)
            driver = Driver(checkpoint.config, model, ranks, others)
            kv_dtype, _ = choose_kv_dtype(config, dtype, model.device)
            cache = DrivenCache(driver, model.config, num_blocks, config.block_size, dtype, model.device, kv_dtype)
    except BaseException:
        others.kill()
        raise
    whose = "processes started here" if others.local else "processes of torchrun"
    held = f"{model.config.num_hidden_layers} of the layers here" if staged else f"each with 1/{size} of every layer"
    return driver, cache, why, f"{size} over {ranks.backend}: {whose}, {held}; bytes are rank 0's"


def run_rank(
    others: Others, config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> None:
    """A rank above 0, from its start to its end."""
    model, ranks, num_blocks, _ = _connect(others, config, checkpoint, dtype, device)
    kv_dtype, _ = choose_kv_dtype(config, dtype, model.device)
    cache = KVCache(model.config, num_blocks, config.block_size, dtype, model.device, kv_dtype)
    attend, _ = choose_attention(model.device, dtype, config.attention, kv_dtype)
    follow(model, cache, attend, ranks)


def check_device(device: torch.device, needed: int) -> None:
    """Raises ConfigError unless each of the ranks on this machine can have a GPU of its own."""
    if device.type != "cuda":
        return
    if device.index is not None:
        raise ConfigError(f"device='{device}' is one GPU and each rank takes its own; use device='cuda'")
    if torch.cuda.device_count() < needed:
        raise ConfigError(
            f"{needed} ranks on this machine need {needed} GPUs and it has {torch.cuda.device_count()}; use a smaller "
            "tensor_parallel_size or pipeline_parallel_size, or device='cpu'"
        )


def _connect(
    others: Others, config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> tuple[Transformer, Ranks, int, str]:
    """This rank's part of the model, its connection, and a number of KV blocks that all ranks can hold."""
    if device.type == "cuda":
        device = torch.device("cuda", others.local_rank)
        torch.cuda.set_device(device)
    ranks = Ranks(others.rank, others.size, device)
    host_table = config.embedding_device == "cpu"
    options = {"dtype": dtype, "device": device, "quantization": config.quantization, "host_table": host_table}
    if config.pipeline_parallel_size > 1:
        options["chunk_rows"] = config.pipeline_chunk_size or CHUNK_ROWS
        model = StageTransformer(checkpoint.config, checkpoint.weights, ranks, **options)
    else:
        model = ParallelTransformer(checkpoint.config, checkpoint.weights, ranks, **options)
    others.wait_until_ready()
    ranks.connect(others.store, loopback=others.local)
    if not ranks.agree(fingerprint(config, checkpoint.config, dtype)):
        raise ConfigError("the ranks were started with different options, models or types; start all of them alike")
    kv_dtype, _ = choose_kv_dtype(config, dtype, device)
    num_blocks, why = choose_num_blocks(config, model.config, dtype, device, kv_dtype)
    return model, ranks, ranks.least(num_blocks), why


def fingerprint(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """A number that differs where options, the seed among them, the model's shape or the type differ."""
    said = repr((sorted(asdict(config).items()), model, dtype))
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:7])
