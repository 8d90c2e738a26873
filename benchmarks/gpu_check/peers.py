"""Our engine beside `transformers`, where that is installed: one model of 1B shape, the same random weights in both."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu_check.attention import bodies
from benchmarks.gpu_check.measure import summary
from benchmarks.gpu_check.models import config_of, generate, make_engine, random_prompts
from benchmarks.gpu_check.sections import Check
from minillm.batch import Batch
from minillm.kv_cache import KVCache
from minillm.model import Transformer

MOST_NATS = 1e-2
"""Kullback-Leibler divergence per token between two half-precision forwards of one model."""


def rows(check: Check) -> Iterator[dict]:
    try:
        theirs = _their_model(check)
    except ImportError as error:
        yield {"note": f"transformers is not installed, so there is nothing to compare with ({error})"}
        return
    found = bodies(check, ("sdpa", "triton"))
    name, attend = list(found.items())[-1]  # Triton's where it runs
    config = config_of(check, "1b")
    ours = Transformer(config, theirs.state_dict(), check.dtype, check.device)
    lengths, new_tokens = ((20,), 3) if check.dry else ((512, 2048), 33)

    (prompt,) = random_prompts(config, 1, 24 if check.dry else 256)
    expected = theirs(torch.tensor([prompt], device=check.device)).logits[0].float()
    cache = KVCache(config, -(-len(prompt) // 16), 16, check.dtype, check.device)
    batch = Batch.build([prompt], [len(prompt)], [list(range(cache.num_blocks))], 16, device=check.device)
    logits = ours.lm_head(ours.hidden(batch, cache, attend))
    same = int((logits.argmax(-1) == expected.argmax(-1)).sum())
    ours_log, theirs_log = logits.log_softmax(-1), expected.log_softmax(-1)
    nats = F.kl_div(ours_log, theirs_log, log_target=True, reduction="batchmean").item()
    yield {"tokens": len(prompt), "same_argmax": same, "nats_per_token": nats, "ok": nats < MOST_NATS}

    for n in lengths:
        engine = make_engine(ours, attend, n + new_tokens, with_graphs=name == "triton")
        prompts = random_prompts(config, 1, n)
        inputs = torch.tensor(prompts, device=check.device)

        def their_seconds(tokens: int, inputs=inputs) -> float:
            return _seconds(
                check, lambda: theirs.generate(inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            )

        def our_seconds(tokens: int, engine=engine, prompts=prompts) -> float:
            return _seconds(check, lambda: generate(engine, prompts, tokens))

        engines = {"minillm": our_seconds, "transformers": their_seconds}
        ttft: dict[str, list[float]] = {peer: [] for peer in engines}
        tpot: dict[str, list[float]] = {peer: [] for peer in engines}
        for repeat in range(-1, 1 if check.dry else 3):
            for peer, seconds in engines.items():
                first, whole = seconds(1), seconds(new_tokens)
                if repeat >= 0:
                    ttft[peer].append(first)
                    tpot[peer].append((whole - first) / (new_tokens - 1))
        for metric, values in (("ttft", ttft), ("tpot", tpot)):
            times = {peer: summary(seconds) for peer, seconds in values.items()}
            yield {"metric": metric, "prompt": n, "attention": name, "times": times, "against": "transformers"}


def _their_model(check: Check):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = config_of(check, "1b")
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps tie_word_embeddings"
    )
    options = {name: getattr(config, name) for name in names.split()}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3"} | vars(config.rope_scaling)
    before = torch.get_default_dtype()
    torch.set_default_dtype(check.dtype)
    try:
        with check.device, torch.inference_mode(False):
            model = LlamaForCausalLM(LlamaConfig(**options, rope_parameters=rope, attn_implementation="sdpa")).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def _seconds(check: Check, run) -> float:
    check.wait()
    start = time.perf_counter()
    run()
    check.wait()
    return time.perf_counter() - start
