"""The memory estimate: activations against what PyTorch's profiler sees alive, the rest against sums by hand."""

import random

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from minillm import costs, memory
from minillm.batch import Batch
from minillm.checkpoint import load
from minillm.checkpoint.random_weights import CONFIGS
from minillm.devices import find_device
from minillm.errors import ConfigError
from minillm.kv_cache import ContiguousKV, KVCache
from minillm.model import Transformer
from tests.unit.engines import attention

B = 16


def peak_of_a_forward(model, body, n):
    """The most bytes alive at once during a prefill of n tokens, beyond those alive before."""
    cache = KVCache(model.config, -(-n // B), B)
    batch = Batch.build([[1] * n], [n], [list(range(-(-n // B)))], B)
    attend = attention(body)
    with torch.inference_mode():
        model.forward(batch, cache, attend)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            model.forward(batch, cache, attend)
    alive = peak = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


@pytest.fixture(scope="module", params=["random:tiny", "random:tiny-qwen2"])
def model(request):
    checkpoint = load(request.param)
    return Transformer(checkpoint.config, checkpoint.weights)


@pytest.mark.parametrize("body", ["naive", "flash"])
def test_activations_are_what_a_real_forward_has_alive(model, body):
    n = random.randrange(200, 300)
    expected = memory.activations(model.config, n, 4, naive_context=n if body == "naive" else 0)
    assert peak_of_a_forward(model, body, n) == pytest.approx(expected, rel=0.01)


def test_naive_attention_grows_with_the_square_and_flash_with_the_length():
    config = CONFIGS["8b"]
    flash = [memory.activations(config, n) for n in (8192, 16384)]
    naive = [memory.activations(config, n, naive_context=n) for n in (8192, 16384)]
    assert flash[1] == pytest.approx(2 * flash[0])
    assert naive[1] == pytest.approx(4 * naive[0], rel=0.02)
    assert naive[1] > 3 * costs.score_bytes(config, 16384, 4) > find_device("H100").memory


def test_the_logits_of_many_rows_can_be_the_largest_tensor():
    config = CONFIGS["8b"]
    assert memory.activations(config, 256, num_sampled=256) > 256 * config.vocab_size * 4
    assert memory.activations(config, 256, num_sampled=1) < 256 * config.vocab_size * 4


def test_the_total_is_the_sum_of_its_parts():
    config, contexts = CONFIGS["8b"], [random.randrange(1, 5000) for _ in range(9)]
    held = memory.estimate(config, contexts, block_size=B)
    assert held.parameters == 2 * config.num_parameters
    assert held.kv == 2 * 32 * 8 * 128 * 2 * sum(contexts)
    assert held.total == held.parameters + held.activations + held.kv + held.fragmentation


def test_pages_waste_less_than_a_block_each_and_reservations_all_that_is_not_used():
    config, contexts = CONFIGS["tiny"], [random.randrange(1, 128) for _ in range(9)]
    pages = sum(-(-context // B) for context in contexts)
    used = costs.kv_bytes_per_token(config, 4) * sum(contexts)
    wasted = memory.estimate(config, contexts, 4, block_size=B).fragmentation
    assert used + wasted == KVCache(config, pages, B).num_bytes
    wasted = memory.estimate(config, contexts, 4, reserved=128).fragmentation
    assert wasted == ContiguousKV(config, len(contexts), 128).wasted_bytes(contexts)


def test_a_reservation_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match="reserved=100.*101"):
        memory.estimate(CONFIGS["tiny"], [7, 101], reserved=100)


@pytest.mark.parametrize("how", [{}, {"block_size": 256}, {"reserved": 8192}, {"bytes_per_value": 1}])
def test_the_largest_batch_fits_and_one_more_does_not(how):
    config, room, context = CONFIGS["8b"], find_device("A100-40GB").memory, random.randrange(100, 8000)
    batch = memory.largest_batch(config, room, context, **how)
    assert batch > 0
    assert memory.estimate(config, [context] * batch, **how).total <= room
    assert memory.estimate(config, [context] * (batch + 1), **how).total > room


@pytest.mark.parametrize("naive", [False, True])
def test_the_largest_context_fits_and_one_token_more_does_not(naive):
    config, room, batch = CONFIGS["8b"], find_device("A100-40GB").memory, random.randrange(1, 9)
    context = memory.largest_context(config, room, batch, naive=naive)
    assert memory.estimate(config, [context] * batch, naive=naive).total <= room
    assert memory.estimate(config, [context + 1] * batch, naive=naive).total > room


def test_a_model_that_does_not_fit_leaves_room_for_nothing():
    t4 = find_device("T4").memory
    assert memory.largest_batch(CONFIGS["8b"], t4, 1) == memory.largest_context(CONFIGS["8b"], t4) == 0


def test_a_batch_of_none_has_no_longest_context():
    with pytest.raises(ConfigError, match="batch=0"):
        memory.largest_context(CONFIGS["8b"], 1e12, batch=0)
