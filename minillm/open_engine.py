"""From an EngineConfig to an Engine: what the options leave open is chosen here, each choice with its reason.

Device, dtypes and attention first; then the checkpoint, whose weights become a model on this device or in parts on
several ranks; what memory is left becomes the KV cache. `LLM` opens its engine so; who wants other parts makes an
`Engine` of them directly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minillm.attention.choose import choose_attention
from minillm.batch import Batch
from minillm.block_pool import BlockPool
from minillm.checkpoint import Checkpoint, load
from minillm.config import EngineConfig
from minillm.embedding import PCIe
from minillm.engine import Engine
from minillm.kv_cache import KVCache
from minillm.model import Transformer
from minillm.model_config import ModelConfig
from minillm.pipeline.early_exit import EarlyExit, check_layer
from minillm.pipeline.side_stream import CopiedAhead
from minillm.quantize import int4_group
from minillm.resources import (
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    choose_max_model_len,
    choose_num_blocks,
    why_copies,
    why_embedding,
    why_prefix_cache,
    why_schedule,
)
from minillm.sampler import Sampler
from minillm.scheduler import POLICIES, make_scheduler
from minillm.sparse_options import check_model
from minillm.step_graphs import choose_step_graphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedEngine:
    """An engine, the checkpoint that it was made of, and why it was made so.

    reasons      what was chosen -> why
    close_ranks  ends the other ranks; None where there are none
    """

    engine: Engine
    checkpoint: Checkpoint
    reasons: dict[str, str]
    close_ranks: Callable[[], object] | None


def open_engine(config: EngineConfig) -> OpenedEngine:
    """Load the model and build the parts of its engine.

    Raises ConfigError for options, CheckpointError for the model's files, RankError when a rank does not start.
    """
    reasons: dict[str, str] = {}
    device, reasons["device"] = choose_device(config)
    dtype, reasons["dtype"] = choose_dtype(config, device)
    kv_dtype, reasons["kv_cache_dtype"] = choose_kv_dtype(config, dtype, device)
    attend, reasons["attention"] = choose_attention(device, dtype, config.attention, kv_dtype)

    checkpoint = load(config.model, seed=config.seed)  # its weights are read when they are asked for
    max_model_len = choose_max_model_len(config, checkpoint.config)
    check_shape(config, checkpoint.config, max_model_len)
    close_ranks = None
    if config.num_ranks > 1:
        from minillm.parallel.start import open_ranks

        model, kv_cache, reasons["kv_cache"], reasons["ranks"] = open_ranks(config, checkpoint, dtype, device)
        close_ranks = model.close
    else:
        model, kv_cache, reasons["kv_cache"] = _open_model(config, checkpoint, dtype, kv_dtype, device)
        reasons["ranks"] = "1: this process alone"
    try:
        engine = _engine(config, checkpoint, model, kv_cache, attend, max_model_len, reasons)
    except BaseException:
        if close_ranks:
            close_ranks()
        raise
    return OpenedEngine(engine, checkpoint, reasons, close_ranks)


def check_shape(config: EngineConfig, shape: ModelConfig, max_model_len: int) -> None:
    """Raises ConfigError for options that a model of this shape rules out: before the first of its weights is read."""
    check_model(config.attention, shape.sliding_window)
    POLICIES[config.scheduling_policy].check_budget(config, max_model_len)
    if config.early_exit_layer is not None:
        check_layer(config.early_exit_layer, shape.num_hidden_layers)
    if config.quantization == "int4":
        inner = (shape.num_attention_heads * shape.head_dim, shape.intermediate_size)  # which ranks share
        for row in (shape.hidden_size, *(size // config.tensor_parallel_size for size in inner)):
            int4_group(row)


def _open_model(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> tuple[Transformer | EarlyExit, KVCache, str]:
    """The model, then a cache of what memory it leaves, and why it is that large."""
    options = {"quantization": config.quantization, "host_table": config.embedding_device == "cpu"}
    sizes = (config, checkpoint.config, dtype, device, kv_dtype)
    choose_num_blocks(*sizes)  # what does not fit into memory without weights is refused before they are read
    model = Transformer(checkpoint.config, checkpoint.weights, dtype, device, **options)
    if config.early_exit_layer is not None:
        model = EarlyExit(model, config.early_exit_layer)
    num_blocks, why = choose_num_blocks(*sizes)
    return model, KVCache(checkpoint.config, num_blocks, config.block_size, dtype, device, kv_dtype), why


def _engine(
    config: EngineConfig, checkpoint: Checkpoint, model, kv_cache, attend, max_model_len: int, reasons: dict[str, str]
) -> Engine:
    device = model.device
    reasons["weights"] = model.forms.reason
    exits = config.early_exit_layer is not None
    reasons["layers"] = model.reason if exits else f"all {checkpoint.config.num_hidden_layers} for every token"
    reasons["layer_steps"] = model.ops.reason
    reasons["embedding"] = why_embedding(config, device, model.num_table_bytes)
    if config.embedding_device == "cpu":
        logger.info("embedding on %s", reasons["embedding"])
    pool = BlockPool(kv_cache.num_blocks, config.block_size, config.enable_prefix_caching)
    reasons["prefix_cache"] = why_prefix_cache(config)
    scheduler = make_scheduler(config, pool, max_model_len)
    reasons["schedule"] = why_schedule(config, scheduler)
    sizes = scheduler.max_num_seqs, max_model_len
    graphs, reasons["step_graphs"] = choose_step_graphs(config, model, kv_cache, attend, *sizes)
    reasons["copies"] = why_copies(config, device)
    tokenizer = checkpoint.tokenizer
    return Engine(
        model=model,
        tokenizer=tokenizer,
        kv_cache=kv_cache,
        scheduler=scheduler,
        sampler=Sampler(eos_token_ids=tokenizer.eos_token_ids, seed=config.seed),
        attend=attend,
        max_model_len=max_model_len,
        make_batch=CopiedAhead(PCIe(device)) if config.overlap_copies else Batch.from_step,
        step_graphs=graphs,
    )
