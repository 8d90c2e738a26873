"""Options in random combinations: each one has tests of its own, and here they meet each other.

A combination is refused exactly where the rules below say so, with a message that names one of the options. Any other
one answers: with the tokens of the plainest engine where all of its options are exact, with finite numbers elsewhere,
and it leaves nothing behind.
"""

import math
import random
from functools import cache

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError, PromptError

MODELS = ("random:tiny", "random:tiny-mistral", "random:tiny-qwen2", "random:tiny-qwen3")
MAX_LEN, NEW = 96, 8
NEAR_TIE = 1e-3  # nats between the first two candidates, far above what another order of sums changes
CHUNKING = ("prefill_first", "chunked", "interleaved", "speculative_prefill")
RARE = {  # each drawn one time in four; of exact ones and of those that change the answers
    "attention": ("naive", "flash", "sdpa", "cpu", "sliding_window(16, sinks=2)", "dynamic_blocks(mass=0.9)", "lsh"),
    "scheduling_policy": (*CHUNKING, "static", "iteration", "similar_length"),
    "enable_prefix_caching": (False,),
    "enable_chunked_prefill": (False,),
    "long_prefill_token_threshold": (1, 5, 32),
    "align_prefill_tokens": (1, 8, 16, 40),
    "pad_batches": (True,),
    "embedding_device": ("cpu",),
    "quantization": ("auto", "int8", "int4", "fp8"),
    "kv_cache_dtype": ("int8", "fp8", "fp8_e4m3"),
    "dtype": ("bfloat16",),
    "early_exit_layer": (1, 2, 3),
    "max_overtaken_steps": (1, 3),
    "speculative_predictor": ("frequent", "conversation"),
}
INEXACT = {"quantization": ("int8", "int4", "fp8"), "kv_cache_dtype": RARE["kv_cache_dtype"], "dtype": ("bfloat16",)}
INEXACT |= {"early_exit_layer": (1,), "attention": RARE["attention"][4:]}


def draw():
    """(options, prompts as token ids, n): a pool that holds hardly more than the longest sequence, and half the time
    a budget that holds less.
    """
    options = {name: random.choice(values) for name, values in RARE.items() if random.random() < 0.25}
    options |= {"model": random.choice(MODELS), "block_size": random.choice((1, 5, 16, 33)), "max_model_len": MAX_LEN}
    options["max_num_batched_tokens"] = random.choice((7, 40, MAX_LEN, 200))
    options["max_num_seqs"] = random.randint(1, 5)
    options["num_kv_blocks"] = math.ceil(MAX_LEN / options["block_size"]) + random.choice((0, 1, 20))
    start = [random.randrange(320) for _ in range(40)]
    prompts = [start[: random.randint(0, 40)] + [random.randrange(320)] * random.randint(1, 40) for _ in range(4)]
    return options, prompts, random.choice((1, 1, 3))


def whole_prompts(options):
    policy = options.get("scheduling_policy", "chunked")
    return policy not in CHUNKING or options.get("enable_chunked_prefill") is False


def why_refused(options):
    """Names of options whose combination is refused; empty for one that runs."""
    policy = options.get("scheduling_policy", "chunked")
    cuts = {"long_prefill_token_threshold", "align_prefill_tokens"} & options.keys()
    whole, budget = whole_prompts(options), options["max_num_batched_tokens"]
    problems = cuts if whole else set()
    if "pad_batches" in options and policy in CHUNKING:
        problems = problems | {"pad_batches"}
    if "max_overtaken_steps" in options and policy != "interleaved":
        problems = problems | {"max_overtaken_steps"}
    if "speculative_predictor" in options and policy != "speculative_prefill":
        problems = problems | {"speculative_predictor"}
    if options.get("align_prefill_tokens", 0) > budget:
        problems = problems | {"align_prefill_tokens"}
    if whole and (budget < MAX_LEN or policy == "interleaved"):
        problems = problems | {"enable_chunked_prefill", "scheduling_policy"}
    small = budget < options["block_size"] or "enable_prefix_caching" in options
    if policy == "speculative_prefill" and small:
        problems = problems | {"max_num_batched_tokens", "scheduling_policy"}
    if options.get("early_exit_layer") == 3:  # of two
        problems = problems | {"early_exit_layer"}
    return problems


@cache
def plain(model):
    return LLM(model, dtype="float32", quantization="none", attention="naive", num_kv_blocks=64)


def assert_same_tokens(model, prompt, tokens):
    """Equal to those of the plainest engine, up to a step at which two candidates are as good."""
    plainest = SamplingParams(temperature=0.0, max_tokens=len(tokens), ignore_eos=True, logprobs=2)
    [expected] = plain(model).generate(prompt, plainest, use_tqdm=False)[0].outputs
    for token, other, candidates in zip(tokens, expected.token_ids, expected.logprobs, strict=True):
        first, second = sorted((c.logprob for c in candidates.values()), reverse=True)[:2]
        if first - second < NEAR_TIE:
            return
        assert token == other, f"{tokens} instead of {expected.token_ids}"


def ask(llm, prompts, params, way):
    if way == "stream":
        return [[chunk.output for chunk in llm.stream(prompt, params) if chunk.output][0] for prompt in prompts]
    return llm.generate(prompts, params, use_tqdm=False, profile=way == "profile")


def check_answers(llm, options, prompts, n, way):
    """Ask twice, the second time with a warm cache, and look at all that comes back and at what is left."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=1, n=n)
    exact = not any(options.get(name) in values for name, values in INEXACT.items())
    pool = llm.engine.scheduler.block_pool
    for _ in range(2):
        outputs = ask(llm, prompts, params, way)
        assert not llm.engine.has_work and pool.num_free == pool.num_blocks
        pool.check([])
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output.outputs) == n and (way != "profile" or "attention" in output.metrics.ttft_parts)
            for completion in output.outputs:
                assert completion.finish_reason == "length"
                assert len(completion.token_ids) == NEW
                assert all(math.isfinite(c.logprob) for step in completion.logprobs for c in step.values())
                if exact:
                    assert_same_tokens(options["model"], prompt, completion.token_ids)
    scores = llm.score(prompts[0])
    assert len(scores) == len(prompts[0]) - 1 and all(map(math.isfinite, scores))
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("number", range(60))
def test_a_combination_is_refused_by_name_or_answers(number):
    options, prompts, n = draw()
    while number % 5 and why_refused(options):  # mostly such as run
        options, prompts, n = draw()
    if problems := why_refused(options):
        with pytest.raises(ConfigError) as refused:
            LLM(**{"dtype": "float32", **options})
        assert any(name in str(refused.value) for name in problems), f"{refused.value} does not name {problems}"
        return
    with LLM(**{"dtype": "float32", **options}) as llm:
        if n > min(options["max_num_seqs"], options["max_num_batched_tokens"]):
            with pytest.raises(PromptError, match=f"n={n}.*max_num_seqs"):
                llm.generate(prompts, SamplingParams(n=n), use_tqdm=False)
            n = 1
        check_answers(llm, options, prompts, n, random.choice(("generate", "stream", "profile")))


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_combination_on_two_ranks_answers(size):
    options, prompts, n = draw()
    while why_refused(options) or n > options["max_num_seqs"] or "early_exit_layer" in options:
        options, prompts, n = draw()
    with LLM(**{"dtype": "float32", size: 2, **options}) as llm:
        check_answers(llm, options, prompts, n, "generate")
