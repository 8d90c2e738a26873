"""A scheduler as an engine on that GPU would have it: how many KV blocks fit, and how long a sequence may be.

The sum of `resources.choose_num_blocks`, from the datasheet instead of the device.
"""

from __future__ import annotations

from minillm import costs
from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.devices import Device
from minillm.errors import ConfigError
from minillm.memory import activations
from minillm.model_config import ModelConfig
from minillm.roofline import size_of
from minillm.scheduler import Scheduler, make_scheduler


def kv_blocks(
    model: ModelConfig, config: EngineConfig, device: Device, dtype: str = "float16", tensor_parallel_size: int = 1
) -> int:
    """Blocks that fit beside weights and activations, over all GPUs together.

    Raises ConfigError, naming what is short, when there is no room for a single one.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    size = size_of(dtype)
    usable = device.memory * config.gpu_memory_utilization * tensor_parallel_size
    weights = costs.weight_bytes(model, size)
    rows = activations(model, config.max_num_batched_tokens, size, config.max_num_seqs)
    per_block = costs.kv_bytes_per_token(model, size) * config.block_size
    blocks = int((usable - weights - rows) // per_block)
    if blocks < 1:
        raise ConfigError(
            f"{tensor_parallel_size} x {device.name} offer {usable / 1e9:.1f} GB, and weights ({weights / 1e9:.1f} GB) "
            f"and activations ({rows / 1e9:.1f} GB) leave no room for a KV block; use more or larger GPUs"
        )
    return blocks


def make_simulated_scheduler(model: ModelConfig, config: EngineConfig, num_blocks: int) -> Scheduler:
    """A new scheduler with an empty pool of `num_blocks`. A sequence is as long as the model was trained for."""
    pool = BlockPool(num_blocks, config.block_size, config.enable_prefix_caching)
    return make_scheduler(config, pool, config.max_model_len or model.max_position_embeddings)
