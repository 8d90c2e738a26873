"""What a model would cost on a device that need not be here: time, intensity, memory, what fits.

Puts the sums of `costs.py`, `roofline.py` and `memory.py` into one JSON-ready dict and one table; `minillm estimate`
prints them. Times are at the roof: no kernel is faster, real ones are slower. Lesson 04.
"""

from __future__ import annotations

from collections.abc import Iterable

from minillm import costs, memory, roofline
from minillm.devices import DEVICES, PCIE_BANDWIDTH, Device, find_device
from minillm.eight_bit import bytes_per_value
from minillm.errors import ConfigError
from minillm.model_config import ModelConfig
from minillm.option_words import KV_CACHE_DTYPES, QUANTIZATIONS
from minillm.quantize import HEAD, bytes_per_weight

HERE = "here"  # the device name that stands for this machine

ARTICLE_SHAPES = {  # Llama 2, the shapes that the article's numbers are about
    "7b": ModelConfig(32000, 4096, 11008, 32, 32, 32, 128, max_position_embeddings=4096),
    "70b": ModelConfig(32000, 8192, 28672, 80, 64, 8, 128, max_position_embeddings=4096),
}


def shape_of(model: str) -> ModelConfig:
    """A model's shape by name: "7b", "70b", a name of random weights ("8b"), or whatever `LLM(model)` takes."""
    from minillm.checkpoint import load
    from minillm.checkpoint.random_weights import CONFIGS

    shapes = ARTICLE_SHAPES | CONFIGS
    return shapes[model] if model in shapes else load(model).config


def device_and_dtype(device: str, dtype: str | None = None) -> tuple[Device, str]:
    """A datasheet row with float16, or this machine, measured if need be, with the type that its engine would use."""
    if device != HERE:
        return find_device(device), dtype or "float16"
    import torch

    from minillm.machine import this_device
    from minillm.resources import cpu_multiplies_bfloat16

    on_cpu = "bfloat16" if cpu_multiplies_bfloat16() else "float32"
    dtype = dtype or ("float16" if torch.cuda.is_available() else on_cpu)
    return this_device(dtype), dtype


def estimate(
    config: ModelConfig,
    device: Device,
    context: int,
    batch: int = 1,
    dtype: str = "float16",
    block_size: int = 16,
    kv_cache_dtype: str = "auto",
    quantization: str = "none",
) -> dict:
    """One prompt of `context` tokens computed alone, then `batch` requests of that context decoding together.

    Seconds, FLOPs and bytes. int8 and int4 weights are multiplied in `dtype`, once read; fp8 ones at the rate of fp8.
    Raises ConfigError for sizes below 1 and for a type that the device, the cache or the weights lack.
    """
    _at_least_one(context=context, batch=batch, block_size=block_size)
    size, kv_size = roofline.size_of(dtype), _kv_size(config, dtype, kv_cache_dtype)
    sizes = {"kv_bytes_per_value": kv_size, "weight_size": _weight_size(size, quantization)}
    layout = {"bytes_per_value": size, "block_size": block_size, **sizes}
    held = memory.estimate(config, [context] * batch, **layout)
    tiles = roofline.attention_tiles(config.num_attention_heads, context)
    products = "float8" if quantization == "fp8" else dtype
    return {
        "parameters": config.num_parameters,
        "device": device.name,
        "source": device.source,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": quantization,
        "context": context,
        "batch": batch,
        "ridge_flop_per_byte": device.ridge(dtype),
        "ridge_batch": roofline.ridge_batch(device, dtype),
        "prefill": _phase(config, [(context, context)], device, dtype, products, sizes),
        "decode": _phase(config, [(1, context)] * batch, device, dtype, products, sizes),
        "attention_share_of_prefill_flops": costs.attention_flops(config, [(context, context)])
        / costs.step_flops(config, [(context, context)]),
        "tiles": {
            "per_layer": tiles,
            "waves": roofline.waves(tiles, device),
            "sms_busy": roofline.busy(tiles, device),
        },
        "memory": {
            "parameters": held.parameters,
            "activations": held.activations,
            "kv": held.kv,
            "fragmentation": held.fragmentation,
            "total": held.total,
            "device": device.memory,
        },
        "embedding": {
            "table": config.vocab_size * config.hidden_size * size,
            "is_the_head": config.tie_word_embeddings,
            "rows": context * config.hidden_size * size,
            "pcie_s": context * config.hidden_size * size / PCIE_BANDWIDTH,
        },
        "fits": {
            "batch": memory.largest_batch(config, device.memory, context, **layout),
            "context": memory.largest_context(config, device.memory, batch, **layout),
            "context_naive_attention": memory.largest_context(config, device.memory, batch, naive=True, **layout),
        },
    }


def _kv_size(config: ModelConfig, dtype: str, kv_cache_dtype: str) -> float:
    """Bytes of a value in the cache, its share of a scale included."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype={kv_cache_dtype!r} is not one of {', '.join(KV_CACHE_DTYPES)}")
    kept_in = KV_CACHE_DTYPES[kv_cache_dtype]
    return roofline.size_of(dtype) if kept_in is None else bytes_per_value(kept_in, config.head_dim)


def _weight_size(size: float, quantization: str) -> costs.WeightSize | None:
    """Bytes per weight of each matrix; None where all have `size`."""
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization={quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    if quantization in ("auto", "none"):
        return None
    head = HEAD.get(quantization, quantization)
    return lambda name, k: bytes_per_weight(head if name == costs.LM_HEAD else quantization, k, size)


def _phase(
    config: ModelConfig, sequences: list[tuple[int, int]], device: Device, dtype: str, products: str, sizes: dict
) -> dict:
    """products  the type that the matrices of the layers are multiplied in"""
    size = roofline.size_of(dtype)
    rows = []
    for op in costs.operations(config, sequences, size, **sizes):
        time = roofline.operation_time(op, device, dtype if op.name in ("attention", costs.LM_HEAD) else products)
        rows.append({"name": op.name, "flops": op.flops, "bytes": op.bytes, "s": time.seconds, "bound": time.bound})
    flops, moved, seconds = (sum(row[key] for row in rows) for key in ("flops", "bytes", "s"))
    together = roofline.operation_time(costs.Operation("all", flops, weights=moved), device, products)
    return {
        "operations": rows,
        "flops": flops,
        "bytes": moved,
        "s": seconds,
        "bound": together.bound,
        "flop_per_byte": flops / moved,
        "uses_of_each_value": flops / moved * size / 2,
        "mfu_at_most": roofline.mfu(flops, seconds, device, products),
        "mbu_at_most": roofline.mbu(moved, seconds, device),
    }


def rank_devices(
    config: ModelConfig,
    context: int,
    batch: int = 1,
    dtype: str = "float16",
    devices: Iterable[Device] = tuple(DEVICES.values()),
) -> dict[str, list[dict]]:
    """{"prefill": rows, "decode": rows}, the fastest device first: its name, seconds, and whether the model fits.

    Devices without the type are left out.
    """
    _at_least_one(context=context, batch=batch)
    steps = {"prefill": [(context, context)], "decode": [(1, context)] * batch}
    size, ranked = roofline.size_of(dtype), {}
    held = memory.estimate(config, [context] * batch, size).total
    able = [device for device in devices if device.has(dtype)]
    for phase, sequences in steps.items():
        rows = [
            {
                "device": device.name,
                "s": roofline.step_seconds(config, sequences, device, dtype),
                "fits": held <= device.memory,
            }
            for device in able
        ]
        ranked[phase] = sorted(rows, key=lambda row: row["s"])
    return ranked


def _at_least_one(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name}={value}; give 1 or more")


# ---- tables --------------------------------------------------------------------------------------


def table(result: dict) -> str:
    """`estimate` as lines to read."""
    r, held, fits, tiles = result, result["memory"], result["fits"], result["tiles"]
    kept = "" if r["quantization"] in ("auto", "none") else f", weights in {r['quantization']},"
    kept += "" if r["kv_cache_dtype"] == "auto" else f", K and V in {r['kv_cache_dtype']},"
    lines = [
        f"{r['parameters'] / 1e9:.3g}B parameters in {r['dtype']}{kept} on {r['device']} ({r['source']})",
        f"ridge: {r['ridge_flop_per_byte']:.0f} FLOP per byte, reached by a matrix at a batch of {r['ridge_batch']}",
        "",
    ]
    for phase, title in (
        ("prefill", f"prefill of {r['context']:,} tokens"),
        ("decode", f"one decode step, batch {r['batch']}, context {r['context']:,}"),
    ):
        lines += [*_phase_lines(title, r[phase]), ""]
    share = r["attention_share_of_prefill_flops"]
    return "\n".join(
        [
            *lines,
            f"attention: {share:.1%} of the prefill's FLOPs; {tiles['per_layer']:,} tiles of 128 queries per layer, "
            f"{tiles['waves']} waves, SMs {tiles['sms_busy']:.0%} busy",
            "memory: " + " + ".join(f"{name} {_gb(held[name])}" for name in ("parameters", "activations", "kv"))
            + f" + fragmentation {_gb(held['fragmentation'])} = {_gb(held['total'])} of {_gb(held['device'])}",
            f"embedding table: {_gb(r['embedding']['table'])}" + _embedding_words(r["embedding"]),
            f"fits: {fits['batch']:,} requests of {r['context']:,} tokens, " + _fitting_words(r, fits, held),
        ]
    )  # fmt: skip


def _fitting_words(result: dict, fits: dict, held: dict) -> str:
    if not fits["context"] and held["parameters"] > held["device"]:
        return "because the parameters alone are more than the device has"
    return f"or {result['batch']} of {fits['context']:,} ({fits['context_naive_attention']:,} with naive attention)"


def _embedding_words(embedding: dict) -> str:
    if embedding["is_the_head"]:
        return ", which is the LM head as well and stays on the device"
    return (
        f", which embedding_device=cpu keeps off the device; the prompt's {embedding['rows'] / 1e6:,.1f} MB of rows "
        f"then take {embedding['pcie_s'] * 1e6:,.0f} us of PCIe at least, before the first layer"
    )


def _phase_lines(title: str, phase: dict) -> list[str]:
    lines = [f"{title:<44}{'GFLOP':>12}{'MB':>11}{'ms':>10}  bound by"]
    for row in [*phase["operations"], {"name": "all, one after another", **phase}]:
        numbers = f"{row['flops'] / 1e9:>12,.1f}{row['bytes'] / 1e6:>11,.1f}{row['s'] * 1e3:>10,.3f}"
        lines.append(f"  {row['name']:<42}{numbers}  {row['bound']}")
    uses = f"{phase['flop_per_byte']:,.1f} FLOP per byte, each value used {phase['uses_of_each_value']:,.1f} times"
    lines.append(f"  {uses}; MFU at most {phase['mfu_at_most']:.1%}, MBU at most {phase['mbu_at_most']:.1%}")
    return lines


def rank_table(ranked: dict[str, list[dict]]) -> str:
    """`rank_devices` as lines to read."""
    lines = [f"{'prefill':<14}{'ms':>10}    {'decode step':<14}{'ms':>10}"]
    for left, right in zip(ranked["prefill"], ranked["decode"], strict=True):
        cells = [
            f"{row['device'] + ('' if row['fits'] else ' *'):<14}{row['s'] * 1e3:>10,.2f}" for row in (left, right)
        ]
        lines.append("    ".join(cells))
    if any(not row["fits"] for row in ranked["prefill"]):
        lines.append("* the model and its cache do not fit into this device's memory")
    return "\n".join(lines)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
