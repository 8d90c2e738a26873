"""Points and roofs for figure F9: what a measured step reached, at the FLOPs and bytes that were counted for it.

The fastest of several runs counts, as it does for the peaks that the roofs are made of. Lesson 04.
"""

from __future__ import annotations

import torch

from minillm import costs
from minillm.batch import Batch
from minillm.costs import Sequences
from minillm.course.figures.roofline import Roof, Work
from minillm.course.timing import clocked, rounds, synchronizer
from minillm.devices import Device, by_gpu_name, find_device
from minillm.model_config import ModelConfig

COMPARED_WITH = "A100-80GB"  # on a machine without a datasheet


def step_point(label: str, config: ModelConfig, step: Sequences, seconds: float, bytes_per_value: float) -> Work:
    """A whole forward pass of `step`, as in `costs.py`, that took `seconds`."""
    step = list(step)
    return Work(label, costs.intensity(config, step, bytes_per_value), costs.step_flops(config, step) / seconds)


def attention_point(engine, batch: int, context: int = 512, repeats: int = 3) -> Work:
    """Measure one decode step's attention alone, all layers, for `batch` requests of `context` tokens.

    Overwrites the engine's cache with noise, so the engine must hold no request.
    """
    model, cache = engine.model, engine.kv_cache
    config, blocks = model.config, -(-context // cache.block_size)
    for pages in cache.tensors:
        pages[:, : batch * blocks].normal_()
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(batch)]
    step = Batch.build([[1]] * batch, [context] * batch, tables, cache.block_size, device=model.device)
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    q, k, v = (torch.randn(batch, n, config.head_dim).to(model.device, model.dtype) for n in heads)

    @torch.inference_mode()
    def all_layers(_) -> None:
        for layer in cache.layers:
            engine.attend(q, k, v, layer, step)

    timed = rounds(clocked(all_layers, synchronizer(model.device)), [batch], repeats)[batch]
    operation = costs.operations(config, [(1, context)] * batch, model.dtype.itemsize)[1]
    return Work(f"batch {batch}", operation.flops / operation.bytes, operation.flops / timed.low)


def roofs(here: Device, dtype: str) -> list[Roof]:
    """The measured roof of this machine, then its GPU's datasheet, or that of an A100 to compare with."""
    sheet = by_gpu_name(here.name) or find_device(COMPARED_WITH)
    return [
        Roof(here.name, here.peak(dtype), here.bandwidth, measured=True),
        Roof(sheet.name, sheet.peak("float16"), sheet.bandwidth, measured=False),
    ]
