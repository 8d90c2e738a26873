"""Chunked prefill with a step's numbers copied at once and ahead of the computation, and prompt tokens that exit early.

Chunks that sample nothing follow each other without a pause only if nothing makes the host wait: the smaller the model
and the chunk, the larger the share of time that starting kernels takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from benchmarks.gpu_check.attention import bodies
from benchmarks.gpu_check.measure import summary
from benchmarks.gpu_check.models import config_of, generate, make_engine, random_model, random_prompts
from benchmarks.gpu_check.sections import Check
from minillm.batch import Batch
from minillm.embedding import PCIe
from minillm.engine import Engine
from minillm.model import Transformer
from minillm.pipeline.early_exit import EarlyExit
from minillm.pipeline.side_stream import CopiedAhead

REPEATS = 4
NEW_TOKENS = 4


def rows(check: Check) -> Iterator[dict]:
    length = 40 if check.dry else 8192
    (attend,) = bodies(check, ("triton",)).values()
    for name, chunks in (("1b", (256, 1024)), ("8b", (512,))):
        config = config_of(check, name)
        needed = 2 * config.num_parameters * check.dtype.itemsize
        if needed > check.free_bytes:
            yield {"model": name, "note": f"does not fit: it takes {needed:,} bytes, {check.free_bytes:,} are free"}
            continue
        model = random_model(check, name)
        for chunk in (8,) if check.dry else chunks:
            yield from copies(check, name, model, attend, length, chunk)
        if name == "1b":
            yield from early(check, name, model, attend, length)


def copies(check: Check, name: str, model: Transformer, attend, length: int, chunk: int) -> Iterator[dict]:
    """A prompt in chunks, whose numbers are copied at once or ahead: equal tokens, and the time to the first."""
    options = {"prefill_chunk_size": chunk}
    engines = {way: make_engine(model, attend, length + NEW_TOKENS, **options) for way in ("at once", "ahead")}
    engines["ahead"].make_batch = CopiedAhead(PCIe(check.device) if check.device.type == "cuda" else SameMemory())
    prompts = random_prompts(model.config, 1, length)
    first, second = (generate(engine, prompts, NEW_TOKENS)[0].outputs[0].token_ids for engine in engines.values())
    what = {"model": name, "copies of chunks of": chunk}
    yield what | {"ok": first == second}
    yield what | {"prompt": length, "times": ttft(engines, length), "against": "at once"}


def early(check: Check, name: str, model: Transformer, attend, length: int) -> Iterator[dict]:
    """Exit after all layers but one, where logits are those of the whole model but for rounding, and after half."""
    num_layers = model.config.num_hidden_layers
    models = {"whole": model, "after all but one": EarlyExit(model, num_layers - 1)}
    models["after half"] = EarlyExit(model, num_layers // 2)
    engines = {name: make_engine(other, attend, length + NEW_TOKENS) for name, other in models.items()}
    (prompt,) = random_prompts(model.config, 1, length)
    logits = {name: next_logits(engine, prompt) for name, engine in engines.items()}
    error = {name: float((x - logits["whole"]).norm() / logits["whole"].norm()) for name, x in logits.items()}
    what = {"model": name, "early exit of": f"{num_layers} layers"}
    yield what | {
        "ok": error["after all but one"] < (1e-4 if check.dtype == torch.float32 else 5e-2),
        "relative_error": {name: round(value, 5) for name, value in error.items()},
    }
    yield what | {"prompt": length, "times": ttft(engines, length), "against": "whole"}


def next_logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """[V] in float32 for the token behind a prompt."""
    table = list(range(engine.kv_cache.num_blocks))
    batch = Batch.build([prompt], [len(prompt)], [table], engine.kv_cache.block_size, device=engine.model.device)
    return engine.model.forward(batch, engine.kv_cache, engine.attend)[0]


def ttft(engines: dict[str, Engine], length: int) -> dict:
    """Seconds to the first token of a fresh prompt, the engines in turns; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(REPEATS + 1):
        for name, engine in engines.items():
            prompts = random_prompts(engine.model.config, 1, length)
            start = time.perf_counter()
            generate(engine, prompts, 1)
            seconds[name].append(time.perf_counter() - start)
    return {name: summary(values[1:]) for name, values in seconds.items()}


class SameMemory:
    """A link to where everything is already."""

    def send(self, tensor: torch.Tensor):
        return tensor.clone(), lambda: None
