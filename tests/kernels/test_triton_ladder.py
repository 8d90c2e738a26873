"""The equivalence ladder with attention='triton': however a prompt is computed, its greedy tokens are the same.

The bottom of the ladder is the whole sequence recomputed for every token with naive attention. fp32, so tokens must
be equal.
"""

import pytest

from minillm.checkpoint import load
from minillm.model import Transformer
from minillm.sampling_params import SamplingParams
from tests.tolerances import LOGITS_FP32
from tests.unit.engines import (
    B,
    chunked_logits,
    make_engine,
    note_preemptions,
    random_prompts,
    run,
    sure_prompts,
    whole,
)

LENGTHS = [1, B - 1, B, B + 1, 2 * B, 53]
NEW = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module", params=["random:tiny", "random:tiny-mistral"])  # the second one has a sliding window
def family(request):
    checkpoint = load(request.param)
    return checkpoint, Transformer(checkpoint.config, checkpoint.weights)


@pytest.fixture(scope="module")
def solo(family, session_seed):
    """Prompts, and the tokens that recomputation without a cache gives for them."""
    return sure_prompts(family, LENGTHS, session_seed, NEW)


def test_cached_generation_equals_recomputing_everything(family, solo):
    prompts, expected = solo
    for prompt, tokens in zip(prompts[1::2], expected[1::2], strict=True):
        assert run(make_engine(family, "triton"), [prompt], GREEDY) == [tokens]


def test_batched_equals_solo(family, solo):
    prompts, expected = solo
    assert run(make_engine(family, "triton"), prompts, GREEDY) == expected


@pytest.mark.parametrize("chunk", [3, B - 1, B + 1])
def test_chunked_prefill_equals_one_shot(family, solo, chunk):
    prompts, expected = solo
    engine = make_engine(family, "triton", prefill_chunk_size=chunk)
    assert run(engine, prompts[-2:], GREEDY) == expected[-2:]


@pytest.mark.parametrize("chunk", [1, 3, B - 1, B, B + 1, 61])
def test_chunked_logits_equal_one_shot_logits(family, session_seed, chunk):
    (tokens,) = random_prompts(family, [61], session_seed + 1)
    expected = whole(family, tokens)
    difference = (chunked_logits(family, tokens, "triton", chunk) - expected).abs().max() / expected.abs().max()
    assert difference < LOGITS_FP32


@pytest.mark.parametrize("block_size", [4, 32])
def test_paged_equals_dense(family, solo, block_size):
    prompts, expected = solo
    engine = make_engine(family, "triton", num_blocks=8, contiguous=True, max_num_seqs=8)
    assert run(engine, prompts[2:4], GREEDY) == expected[2:4]
    engine = make_engine(family, "triton", num_blocks=1024 // block_size, block_size=block_size)
    assert run(engine, prompts[2:4], GREEDY) == expected[2:4]


def test_a_prefix_hit_equals_a_cold_run(family, solo):
    prompts, expected = solo
    engine = make_engine(family, "triton")
    assert run(engine, prompts[-3:], GREEDY) == expected[-3:]
    request = engine.make_request(prompts[-1], GREEDY)
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert request.num_cached_tokens == 3 * B
    assert request.output_token_ids == expected[-1]


def test_preempted_equals_not_preempted(family, solo):
    prompts, expected = solo
    engine = make_engine(family, "triton", num_blocks=5)
    preempted = note_preemptions(engine)
    assert run(engine, prompts, GREEDY) == expected
    assert preempted, "the pool was meant to be too small"
