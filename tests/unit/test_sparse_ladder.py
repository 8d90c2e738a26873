"""Which rungs of the ladder of equalities hold under sparse attention, in fp32, and which ones do not.

A window holds on all of them: every regime is compared with recomputing the whole sequence for each token, by naive
attention under the mask. Blocks and hashes are for prefill and decode densely, so they are compared with themselves.
"""

import math

import pytest
import torch

from minillm.attention import PerRequest
from minillm.attention.sparse.blocks import DynamicBlockAttention
from minillm.checkpoint import load
from minillm.model import Transformer
from minillm.sparse_options import DynamicBlocks
from tests.tolerances import LOGITS_FP32
from tests.unit.attention_cases import assert_close
from tests.unit.engines import (
    GREEDY,
    B,
    chunked_logits,
    make_engine,
    note_preemptions,
    random_prompts,
    run,
    sure_prompts,
    whole,
)

LENGTHS = [1, B - 1, B, B + 1, 2 * B + 1, 53]
WINDOW = "sliding_window(11, sinks=3)"
BLOCKS = "dynamic_blocks(top=2, block=16)"
HASHES = "lsh(rounds=2, bucket=4, buckets=4)"
WHOLE = ["sliding_window(128)", "sliding_window(128, sinks=4)", "dynamic_blocks(mass=1, block=16)"]
WHOLE += ["lsh(rounds=1, bucket=128, buckets=1)"]


@pytest.fixture(scope="module", params=["random:tiny", "random:tiny-mistral"])
def family(request):
    checkpoint = load(request.param)
    return checkpoint, Transformer(checkpoint.config, checkpoint.weights)


def under_the_mask(q, k, v, window):
    """Naive attention of a whole prompt, each row over its last keys and the first three."""
    window = min(11, window or 11)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,shd->hns", q.double(), k.double()) / math.sqrt(q.shape[2])
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) & ((distance < window) | (torch.arange(len(k)) < 3))
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("hns,shd->nhd", scores.softmax(-1), v.double()).to(q.dtype), scores.logsumexp(-1).T


@pytest.fixture(scope="module")
def answered(family, session_seed):
    """Prompts, and the tokens that recomputing everything under the window's mask gives for them."""
    return sure_prompts(family, LENGTHS, session_seed, body=PerRequest(under_the_mask))


# -- a window: every rung


@pytest.mark.parametrize(
    "regime",
    [
        {},
        {"prefill_chunk_size": 1},
        {"prefill_chunk_size": 3},
        {"prefill_chunk_size": B - 1},
        {"prefill_chunk_size": B + 1},
        {"num_blocks": 8, "contiguous": True, "max_num_seqs": 8},
        {"num_blocks": 1024, "block_size": 1},
        {"num_blocks": 32, "block_size": 32},
    ],
    ids=str,
)
def test_a_window_chunked_paged_or_batched_equals_recomputing_under_its_mask(family, answered, regime):
    prompts, expected = answered
    assert run(make_engine(family, WINDOW, **regime), prompts) == expected


def test_a_window_solo_equals_batched(family, answered):
    for prompt, tokens in zip(*answered, strict=True):
        assert run(make_engine(family, WINDOW), [prompt]) == [tokens]


def test_a_window_with_a_prefix_hit_equals_a_cold_run(family, answered):
    prompts, expected = answered
    engine = make_engine(family, WINDOW)
    assert run(engine, prompts) == expected
    for prompt, tokens in zip(prompts, expected, strict=True):
        request = engine.make_request(prompt, GREEDY)
        engine.add(request)
        while engine.has_work:
            engine.step()
        assert request.num_cached_tokens == (len(prompt) - 1) // B * B
        assert request.output_token_ids == tokens


def test_a_window_preempted_equals_not_preempted(family, answered):
    prompts, expected = answered
    engine = make_engine(family, WINDOW, num_blocks=6)
    preempted = note_preemptions(engine)
    assert run(engine, prompts) == expected
    assert preempted, "the pool was meant to be too small"


def test_the_window_is_not_dense_attention(family, session_seed):
    (tokens,) = random_prompts(family, [53], session_seed)
    sparse = whole(family, tokens, WINDOW)
    dense = whole(family, tokens)
    assert (sparse - dense).abs().max() > 10 * LOGITS_FP32 * dense.abs().max()


# -- a whole budget: dense


@pytest.mark.parametrize("text", WHOLE)
def test_a_whole_budget_generates_what_dense_attention_generates(tiny, session_seed, text):
    prompts, expected = sure_prompts(tiny, LENGTHS, session_seed)
    assert run(make_engine(tiny, text), prompts) == expected
    assert run(make_engine(tiny, text, prefill_chunk_size=B + 1), prompts) == expected
    assert run(make_engine(tiny, text, num_blocks=6), prompts) == expected


# -- blocks and hashes: some rungs


@pytest.mark.parametrize("text", [BLOCKS, HASHES])
def test_blocks_and_hashes_batched_or_paged_otherwise_equal_solo(family, session_seed, text):
    """The budget of a step holds all prompts, so none is cut."""
    prompts = random_prompts(family, LENGTHS, session_seed)
    whole_prompts = {"max_num_batched_tokens": 512, "num_blocks": 64}
    expected = [run(make_engine(family, text, **whole_prompts), [prompt])[0] for prompt in prompts]
    assert run(make_engine(family, text, **whole_prompts), prompts) == expected
    contiguous = {**whole_prompts, "num_blocks": 8, "max_num_seqs": 8, "contiguous": True}
    assert run(make_engine(family, text, **contiguous), prompts) == expected
    small_pages = {**whole_prompts, "num_blocks": 256, "block_size": 4}
    assert run(make_engine(family, text, **small_pages), prompts) == expected


@pytest.mark.parametrize("text, chunks", [(HASHES, (2, 3, 17, 31)), (BLOCKS, (16, 32, 48))])
def test_chunks_of_two_rows_under_hashes_or_of_whole_blocks_equal_one_shot(family, session_seed, text, chunks):
    (tokens,) = random_prompts(family, [62], session_seed)
    expected = whole(family, tokens, text)
    for chunk in chunks:
        assert len(tokens) % chunk != 1  # a single row would be a decode, and dense
        difference = (chunked_logits(family, tokens, text, chunk) - expected).abs().max() / expected.abs().max()
        assert difference < LOGITS_FP32, chunk


@pytest.mark.parametrize("text", [BLOCKS, HASHES])
def test_a_prefix_hit_that_leaves_two_rows_equals_a_cold_run(family, session_seed, text):
    prompts = random_prompts(family, [2 * B + 2, 3 * B, 53], session_seed)
    options = {"max_num_batched_tokens": 512}
    expected = [run(make_engine(family, text, **options), [prompt])[0] for prompt in prompts]
    engine = make_engine(family, text, **options)
    for _ in range(2):
        assert [run(engine, [prompt])[0] for prompt in prompts] == expected
    request = engine.make_request(prompts[0], GREEDY)
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert request.num_cached_tokens == 2 * B and request.output_token_ids == expected[0]


@pytest.mark.parametrize("text", [BLOCKS, HASHES])
def test_chunks_of_a_single_row_are_dense(family, session_seed, text):
    (tokens,) = random_prompts(family, [53], session_seed)
    expected = whole(family, tokens)
    difference = (chunked_logits(family, tokens, text, 1) - expected).abs().max() / expected.abs().max()
    assert difference < LOGITS_FP32
    sparse = whole(family, tokens, text)
    assert (sparse - expected).abs().max() > 10 * LOGITS_FP32 * expected.abs().max()


def test_a_chunk_that_ends_within_a_block_of_queries_may_choose_otherwise():
    """The first half of the last block asks for block 1, the second half, louder, for block 2: one block is free."""
    q, k = torch.zeros(16, 1, 8), torch.zeros(64, 1, 8)
    q[:8, 0, 0], q[8:, 0, 1] = 4.0, 8.0
    k[16:32, 0, 0], k[32:48, 0, 1] = 4.0, 4.0
    v = torch.randn(64, 1, 8)
    attend = DynamicBlockAttention(DynamicBlocks(top=3, block=16))
    together = attend.seen_keys(q, k)[0]
    apart = torch.cat([attend.seen_keys(q[:8], k[:56])[0], attend.seen_keys(q[8:], k)[0, :, :56]])
    assert not together[:8, 16:32].any() and apart[:8, 16:32].all()
    assert together[8:, 32:48].all() and apart[8:, 32:48].all()
    first, second = attend(q, k, v)[0], attend(q[8:], k, v)[0]
    assert_close(first[8:], second.double(), torch.float32)
