"""The equivalence ladder: however a prompt is computed, its logits and its greedy tokens are the same.

Every rung compares an engine under some regime with the plainest one there is: one request at a time, the
whole sequence recomputed for every token, no cache, naive attention. fp32, so tokens must be equal.
"""

import pytest

from minillm.checkpoint import load
from minillm.model import Transformer
from minillm.sampling_params import SamplingParams
from tests.tolerances import LOGITS_FP32
from tests.unit.engines import (
    GREEDY,
    MAX_LEN,
    NEW,
    B,
    chunked_logits,
    make_engine,
    note_preemptions,
    random_prompts,
    run,
    sure_prompts,
    whole,
)

LENGTHS = [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 53]
FAMILIES = ["random:tiny", "random:tiny-mistral", "random:tiny-qwen2", "random:tiny-qwen3"]
WHOLE_BUDGETS = ["sliding_window(128)", "dynamic_blocks(mass=1, block=16)", "lsh(rounds=1, bucket=128, buckets=1)"]
BODIES = ["naive", "flash", "sdpa", "cpu", *WHOLE_BUDGETS]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    checkpoint = load(request.param)
    model = Transformer(checkpoint.config, checkpoint.weights)
    return checkpoint, model


@pytest.fixture(scope="module")
def solo(family, session_seed):
    """Prompts and the tokens that recomputation without a cache gives for them."""
    return sure_prompts(family, LENGTHS, session_seed)


@pytest.mark.parametrize("body", BODIES)
def test_cached_generation_equals_recomputing_everything(family, solo, body):
    prompts, expected = solo
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert run(make_engine(family, body), [prompt]) == [tokens]


@pytest.mark.parametrize("body", BODIES)
def test_batched_equals_solo(family, solo, body):
    prompts, expected = solo
    assert run(make_engine(family, body), prompts) == expected


@pytest.mark.parametrize("chunk", [1, 3, B - 1, B, B + 1, 64])
def test_chunked_prefill_equals_one_shot(family, solo, chunk):
    prompts, expected = solo
    assert run(make_engine(family, prefill_chunk_size=chunk), prompts) == expected


@pytest.mark.parametrize("chunk", [1, 3, B - 1, B, B + 1, 61])
@pytest.mark.parametrize("body", BODIES)
def test_chunked_logits_equal_one_shot_logits(family, session_seed, body, chunk):
    (tokens,) = random_prompts(family, [61], session_seed + 1)
    expected = whole(family, tokens)
    difference = (chunked_logits(family, tokens, body, chunk) - expected).abs().max() / expected.abs().max()
    assert difference < LOGITS_FP32


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_paged_equals_dense(family, solo, block_size):
    prompts, expected = solo
    assert run(make_engine(family, num_blocks=8, contiguous=True, max_num_seqs=8), prompts) == expected
    assert run(make_engine(family, num_blocks=1024 // block_size, block_size=block_size), prompts) == expected


def test_a_prefix_hit_equals_a_cold_run(family, solo):
    prompts, expected = solo
    engine = make_engine(family)
    assert run(engine, prompts) == expected
    assert run(engine, prompts) == expected
    for prompt, tokens in zip(prompts, expected, strict=True):
        request = engine.make_request(prompt, GREEDY)
        engine.add(request)
        while engine.has_work:
            engine.step()
        assert request.num_cached_tokens == (len(prompt) - 1) // B * B
        assert request.output_token_ids == tokens


def test_prompts_that_share_a_prefix_equal_their_cold_runs(tiny, session_seed):
    (head,) = random_prompts(tiny, [2 * B + 3], session_seed + 2)
    tails = random_prompts(tiny, [1, B - 3, B - 2, 5], session_seed + 3)
    prompts = [head[:cut] + tail for tail in tails for cut in (B, 2 * B, 2 * B + 3)]
    expected = [run(make_engine(tiny), [p])[0] for p in prompts]
    engine = make_engine(tiny)
    assert run(engine, prompts) == expected
    assert run(engine, prompts[::-1]) == expected[::-1]


@pytest.mark.parametrize("num_blocks", [5, 7, 12])
def test_preempted_equals_not_preempted(family, solo, num_blocks):
    prompts, expected = solo
    engine = make_engine(family, num_blocks=num_blocks)
    preempted = note_preemptions(engine)
    assert run(engine, prompts) == expected
    assert preempted, "the pool was meant to be too small"


@pytest.mark.parametrize("max_num_seqs", [1, 3, 20, 33])
def test_any_number_of_sequences_at_once_gives_the_same_tokens(tiny, session_seed, max_num_seqs):
    prompts, expected = sure_prompts(tiny, [1 + 3 * i % 40 for i in range(33)], session_seed + 4, 3)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    assert run(make_engine(tiny, num_blocks=128, max_num_seqs=max_num_seqs), prompts, params) == expected


def test_whole_prompts_without_chunking_equal_chunked_ones(family, solo):
    prompts, expected = solo
    engine = make_engine(family, enable_chunked_prefill=False, max_num_batched_tokens=MAX_LEN)
    assert run(engine, prompts) == expected


def test_a_sequence_may_reach_exactly_max_model_len(tiny, session_seed):
    (prompt,), (expected,) = sure_prompts(tiny, [MAX_LEN - 5], session_seed + 5, 5)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    (tokens,) = run(make_engine(tiny), [prompt], params)
    assert len(prompt) + len(tokens) == MAX_LEN
    assert tokens == expected


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("length", [B - 1, B, B + 1])
def test_n_completions_equal_n_requests_with_their_seeds(tiny, session_seed, n, length):
    (prompt,) = random_prompts(tiny, [length], session_seed + 6)
    base = {"temperature": 1.0, "max_tokens": NEW, "ignore_eos": True}
    alone = [run(make_engine(tiny), [prompt], SamplingParams(seed=7 + i, **base))[0] for i in range(n)]
    assert len({tuple(tokens) for tokens in alone}) > 1
    for num_blocks in (64, 8):
        engine = make_engine(tiny, num_blocks=num_blocks)
        request = engine.make_request(prompt, SamplingParams(seed=7, n=n, **base))
        engine.add(request)
        output = None
        while engine.has_work:
            for chunk in engine.step():
                output = chunk.output or output
            engine.scheduler.block_pool.check([r.block_table for r in engine.scheduler.running])
        assert [c.token_ids for c in output.outputs] == alone


def test_a_seed_gives_the_same_tokens_alone_batched_and_after_a_preemption(tiny, session_seed):
    prompts = random_prompts(tiny, LENGTHS, session_seed + 7)
    params = SamplingParams(seed=3, temperature=0.8, top_p=0.9, max_tokens=NEW, ignore_eos=True)
    alone = [run(make_engine(tiny), [prompt], params)[0] for prompt in prompts]
    assert run(make_engine(tiny), prompts, params) == alone
    assert run(make_engine(tiny, num_blocks=7), prompts, params) == alone
