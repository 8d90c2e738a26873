"""Engines built by hand from their parts, for tests that need to reach into them."""

import random

import torch

from minillm.attention.choose import choose_attention
from minillm.batch import Batch
from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.engine import Engine
from minillm.kv_cache import ContiguousKV, KVCache
from minillm.sampler import Sampler
from minillm.sampling_params import SamplingParams
from minillm.scheduler import make_scheduler

B = 16  # block size
MAX_LEN = 128
NEW = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
NEAR_TIE = 1e-4
"""Lead of a token over the next one, relative to the largest logit, below which another order of sums might choose the
other: a hundred times what that changes. One greedy token in a thousand has less."""
DRAWS = 20  # of prompts without a near tie; one in fifty has one


def attention(body):
    """A body by its name; one that is already there stays as it is."""
    return body if callable(body) else choose_attention(torch.device("cpu"), torch.float32, body)[0]


def make_engine(parts, body="cpu", num_blocks=64, block_size=B, contiguous=False, kv_dtype=None, **options):
    """An engine built by hand from its parts, its cache poisoned so that no unwritten row can be read unnoticed."""
    checkpoint, model = parts
    config = EngineConfig(block_size=block_size, **{"max_num_batched_tokens": 64, "max_num_seqs": 33, **options})
    if contiguous:
        cache = ContiguousKV(checkpoint.config, num_slots=num_blocks, max_model_len=MAX_LEN, kv_dtype=kv_dtype)
        pool = BlockPool(num_blocks, MAX_LEN, enable_prefix_caching=False)
    else:
        cache = KVCache(checkpoint.config, num_blocks, block_size, kv_dtype=kv_dtype)
        pool = BlockPool(num_blocks, block_size, config.enable_prefix_caching)
    poison(cache)
    scheduler = make_scheduler(config, pool, MAX_LEN)
    sampler = Sampler(eos_token_ids=checkpoint.tokenizer.eos_token_ids)
    return Engine(model, checkpoint.tokenizer, cache, scheduler, sampler, attention(body), MAX_LEN)


def poison(cache):
    """Fill a cache so that a row which nobody wrote reads back as NaN; with 8-bit codes its scale says so."""
    for tensor in cache.scales or cache.tensors:
        tensor.fill_(float("nan"))


def run(engine, prompts, params=GREEDY):
    """Every prompt to its end; token lists in order. The pool is checked after each step."""
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.add(request)
    outputs, steps = {}, 0
    while engine.has_work:
        for chunk in engine.step():
            if chunk.output:
                outputs[chunk.request_id] = chunk.output
        running = engine.scheduler.running
        engine.scheduler.block_pool.check([r.block_table for r in running])
        steps += 1
        assert steps < 100 * len(prompts) * NEW, "no progress"
    pool = engine.scheduler.block_pool
    assert pool.num_free == pool.num_blocks
    return [outputs[r.request_id].outputs[0].token_ids for r in requests]


def random_prompts(parts, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    size = parts[0].config.vocab_size
    return [torch.randint(0, size, (n,), generator=generator).tolist() for n in lengths]


def whole(parts, tokens, body="naive", kv_dtype=None):
    """Logits of every row, computed in one go in a fresh cache: [n, V]."""
    checkpoint, model = parts
    cache = KVCache(checkpoint.config, -(-len(tokens) // B), B, kv_dtype=kv_dtype)
    batch = Batch.build([tokens], [len(tokens)], [list(range(cache.num_blocks))], B)
    with torch.inference_mode():
        return model.lm_head(model.hidden(batch, cache, attention(body)))


def recomputed(parts, prompt, n=NEW, body="naive"):
    """The bottom of every ladder: n greedy tokens, for each of them the whole sequence run again without a cache.

    None where one of them is a near tie.
    """
    tokens = list(prompt)
    for _ in range(n):
        logits = whole(parts, tokens, body)[-1]
        first, second = logits.topk(2).values
        if first - second < NEAR_TIE * logits.abs().max():
            return None
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def sure_prompts(parts, lengths, seed, n=NEW, body="naive"):
    """(random prompts, the n greedy tokens of each); a prompt that leads to a near tie is drawn again."""
    rng, prompts, answers = random.Random(seed), [], []
    for length in lengths:
        for _ in range(DRAWS):
            (prompt,) = random_prompts(parts, [length], rng.getrandbits(32))
            tokens = recomputed(parts, prompt, n, body)
            if tokens is not None:
                break
        assert tokens is not None, f"{DRAWS} prompts in a row lead to a near tie: this model does not choose"
        prompts.append(prompt)
        answers.append(tokens)
    return prompts, answers


def chunked_logits(parts, tokens, body, chunk, kv_dtype=None):
    """Logits of every row, computed in chunks over pages out of order that were NaN before: [n, V]. At most 64 rows."""
    checkpoint, model = parts
    cache = KVCache(checkpoint.config, 4, B, kv_dtype=kv_dtype)
    poison(cache)
    rows = []
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            batch = Batch.build([piece], [start + len(piece)], [[2, 0, 3, 1]], B)
            rows.append(model.lm_head(model.hidden(batch, cache, attention(body))))
    return torch.cat(rows)


def note_preemptions(engine):
    """A list to which every request is added that the engine preempts from now on."""
    preempted, schedule = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda now: preempted.extend((step := schedule(now)).preempted) or step
    return preempted
