"""Random models and engines in the shape of known ones, made on the device itself: an 8B model in about a second."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu_check.sections import Check
from minillm.block_pool import BlockPool
from minillm.checkpoint.random_weights import CONFIGS
from minillm.config import EngineConfig
from minillm.engine import Engine
from minillm.kv_cache import KVCache
from minillm.model import Transformer
from minillm.model_config import ModelConfig
from minillm.sampler import Sampler
from minillm.sampling_params import SamplingParams
from minillm.scheduler import make_scheduler
from minillm.step_graphs import StepGraphs, launch_bound_tokens
from minillm.tokenizer import Tokenizer
from minillm.weights import LazyWeights, expected_shapes

BLOCK_SIZE = 16


def config_of(check: Check, name: str) -> ModelConfig:
    return CONFIGS["tiny" if check.dry else name]


def random_model(check: Check, name: str, dtype: torch.dtype | None = None, **options) -> Transformer:
    """Noise scaled so that a product keeps the size of its input. `options` are Transformer's."""
    config = config_of(check, name)
    shapes = expected_shapes(config)

    def noise(tensor: str) -> torch.Tensor:
        shape = shapes[tensor]
        x = torch.empty(shape, dtype=dtype or check.dtype, device=check.device)
        if len(shape) == 1:
            return x.uniform_(0.5, 1.5)
        limit = (3 / shape[1]) ** 0.5
        return x.uniform_(-limit, limit)

    return Transformer(config, LazyWeights(shapes, noise), dtype or check.dtype, check.device, **options)


def make_engine(
    model: Transformer,
    attend: Callable,
    max_len: int,
    requests: int = 1,
    with_graphs: bool = False,
    kv_dtype: torch.dtype | None = None,
    **options,
) -> Engine:
    """An engine whose step takes all prompts, and whose cache holds `requests` sequences of `max_len` tokens.

    with_graphs  steps as CUDA graphs; on a CPU the same padded steps, run directly
    kv_dtype     what K and V are kept in, if not the model's dtype
    options      more of EngineConfig's, for the scheduler: a smaller max_num_batched_tokens, say
    """
    blocks = requests * -(-max_len // BLOCK_SIZE)
    options = {"max_num_batched_tokens": requests * max_len, **options}
    config = EngineConfig(max_num_seqs=requests, enable_prefix_caching=False, **options)
    pool = BlockPool(blocks, BLOCK_SIZE, enable_prefix_caching=False)
    tokenizer = Tokenizer.bytes_only(model.config.vocab_size)
    cache = KVCache(model.config, blocks, BLOCK_SIZE, model.dtype, model.device, kv_dtype)
    graphs = None
    if with_graphs:
        on_gpu = model.device.type == "cuda"
        gpu_name = torch.cuda.get_device_name(model.device) if on_gpu else "none"
        rows = launch_bound_tokens(model.config, gpu_name, model.dtype)
        graphs = StepGraphs(model, cache, attend, requests, max_len, rows, None if on_gpu else lambda run: run)
    return Engine(
        model=model,
        tokenizer=tokenizer,
        kv_cache=cache,
        scheduler=make_scheduler(config, pool, max_len),
        sampler=Sampler(eos_token_ids=tokenizer.eos_token_ids),
        attend=attend,
        max_model_len=max_len,
        step_graphs=graphs,
    )


def replays(engine: Engine, n: int) -> bool:
    """Whether a step with a prompt of n tokens is replayed; a longer one runs eagerly, graphs or not."""
    return engine.step_graphs is not None and n <= max(engine.step_graphs.prompt_sizes, default=0)


def generate(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list:
    """Greedy, past any end token: the outputs, with their metrics, in the order of the prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.add(request)
    outputs = {}
    while engine.has_work:
        for chunk in engine.step():
            if chunk.output is not None:
                outputs[chunk.request_id] = chunk.output
    return [outputs[request.request_id] for request in requests]


def random_prompts(config: ModelConfig, count: int, length: int) -> list[list[int]]:
    return torch.randint(config.vocab_size, (count, length)).tolist()
