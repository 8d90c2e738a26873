"""Every sum of the course's arithmetic, asserted; FLOPs against PyTorch's own counter, bytes against real tensors."""

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minillm import costs
from minillm.batch import Batch
from minillm.checkpoint.random_weights import CONFIGS
from minillm.kv_cache import KVCache, kv_bytes_per_block
from minillm.model_config import ModelConfig
from tests.unit.engines import attention

LLAMA_7B = ModelConfig(32000, 4096, 11008, 32, 32, 32, 128)
LLAMA_70B = ModelConfig(32000, 8192, 28672, 80, 64, 8, 128)
SMOLLM = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True)


def test_parameter_counts_are_the_published_ones():
    assert SMOLLM.num_parameters == 134_515_008
    assert LLAMA_7B.num_parameters == 6_738_415_616
    assert LLAMA_70B.num_parameters == 68_976_648_192


def test_scores_of_2048_tokens():
    assert 2048**2 == 4_194_304  # one head
    assert costs.score_bytes(LLAMA_7B, 2048) == 268_435_456  # 32 heads in fp16


def test_kv_of_2048_tokens_per_layer():
    per_layer = costs.kv_bytes_per_token(LLAMA_7B) / LLAMA_7B.num_hidden_layers * 2048
    assert per_layer == 32 * 2**20
    grouped = costs.kv_bytes_per_token(LLAMA_70B) / LLAMA_70B.num_hidden_layers * 2048
    assert grouped == 8 * 2**20


def test_a_70b_model_needs_140_tflop_for_1000_tokens_and_292_for_2048():
    assert 2 * 70e9 * 1000 == 140e12
    assert 2 * 70e9 * 2048 == pytest.approx(286.7e12, rel=1e-3)
    causal = costs.attention_flops(LLAMA_70B, [(2048, 2048)])
    assert causal == pytest.approx(5.5e12, rel=0.01)
    assert 2 * 70e9 * 2048 + causal == pytest.approx(292e12, rel=2e-3)


def test_the_quadratic_term_overtakes_at_6144_tokens_here_and_at_49000_in_a_7b_model():
    assert costs.quadratic_crossover(SMOLLM) == 6144
    assert costs.quadratic_crossover(LLAMA_7B) == pytest.approx(49_000, rel=0.01)


@pytest.mark.parametrize(("n", "percent"), [(512, 7.7), (1024, 14.3), (2048, 25), (4096, 40), (8192, 57)])
def test_attention_share_of_causal_prefill_in_this_model(n, percent):
    """Of the work that every layer does; the LM head runs for one row only."""
    attention = costs.attention_flops(SMOLLM, [(n, n)])
    assert 100 * attention / (attention + costs.linear_flops(SMOLLM, n)) == pytest.approx(percent, abs=0.2)


@pytest.mark.parametrize(("n", "percent"), [(512, 1.0), (2048, 3.8), (8192, 13.7), (16384, 24)])
def test_attention_share_of_causal_prefill_in_a_7b_model(n, percent):
    """By the usual estimate of 2 FLOPs for each of all parameters and token."""
    attention = costs.attention_flops(LLAMA_7B, [(n, n)])
    assert 100 * attention / (attention + 2 * LLAMA_7B.num_parameters * n) == pytest.approx(percent, abs=0.2)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("n", "context"), [(1, 1), (7, 7), (1, 9), (3, 20), (20, 20)])
def test_visible_pairs_equal_the_pairs_of_the_mask(n, context, window):
    rows = torch.arange(context - n, context)[:, None]
    keys = torch.arange(context)[None]
    mask = keys <= rows
    if window is not None:
        mask &= keys > rows - window
    assert costs.visible_pairs(n, context, window=window) == mask.sum()
    assert costs.visible_pairs(n, context, causal=False) == n * context


def test_flops_equal_what_pytorch_counts_for_a_real_forward(tiny):
    """Naive attention computes the full square, so it is compared without the causal half."""
    checkpoint, model = tiny
    cache = KVCache(checkpoint.config, 8, 16)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        for n, context in [(20, 20), (5, 25), (1, 26)]:
            batch = Batch.build([[1] * n], [context], [[0, 1]], 16)
            before = counter.get_total_flops()
            model.forward(batch, cache, attention("naive"))
            counted = counter.get_total_flops() - before
            assert counted == costs.step_flops(checkpoint.config, [(n, context)], causal=False)


@pytest.mark.parametrize("name", ["tiny", "tiny-mistral", "tiny-qwen3", "135m", "8b"])
@pytest.mark.parametrize("naive", [False, True])
def test_the_operations_of_a_step_add_up_to_it(name, naive):
    config, steps = CONFIGS[name], [(n, n + random.randrange(60)) for n in random.choices(range(1, 90), k=5)]
    done = costs.operations(config, steps, naive=naive)
    assert [op.name for op in done] == ["qkv", "attention", "output", "gate and up", "down", "LM head"]
    assert sum(op.flops for op in done) == costs.step_flops(config, steps, causal=not naive)
    scores = sum(n * context for n, context in steps) * config.num_attention_heads * config.num_hidden_layers
    assert sum(op.scores for op in done) == (6 * 2 * scores if naive else 0)


def test_a_step_that_samples_nothing_leaves_the_lm_head_alone():
    chunk = [(256, 512)]
    head = SMOLLM.hidden_size * SMOLLM.vocab_size
    assert costs.step_bytes(SMOLLM, chunk) - costs.step_bytes(SMOLLM, chunk, num_sampled=0) == 2 * head
    assert costs.step_flops(SMOLLM, chunk) - costs.step_flops(SMOLLM, chunk, num_sampled=0) == 2 * head


def test_bytes_of_a_step_are_weights_once_and_the_kv_that_is_read_and_written():
    steps = [(1, 100), (1, 7), (16, 48)]
    matrices = SMOLLM.num_parameters - (2 * SMOLLM.num_hidden_layers + 1) * SMOLLM.hidden_size  # all but the norms
    kv = costs.kv_bytes_per_token(SMOLLM) * (100 + 7 + 48 + 1 + 1 + 16)
    assert costs.step_bytes(SMOLLM, steps) == 2 * matrices + kv


def test_a_window_shortens_what_is_read_and_not_what_is_written():
    config = CONFIGS["tiny-mistral"]
    matrices = costs.step_bytes(config, [(1, 24)]) - costs.kv_bytes_per_token(config) * (24 + 1)
    assert costs.step_bytes(config, [(1, 500)]) == matrices + costs.kv_bytes_per_token(config) * (24 + 1)
    assert costs.step_bytes(config, [(8, 500)]) == matrices + costs.kv_bytes_per_token(config) * (24 + 7 + 8)


def test_rows_in_and_out_are_those_of_the_matrices():
    (qkv, *_, head) = costs.operations(SMOLLM, [(5, 5)])
    assert qkv.activations == 2 * 30 * 5 * (576 + 576 + 2 * 192)
    assert head.activations == 2 * 1 * (576 + 49152)


def test_prefill_uses_a_loaded_value_once_per_token_and_decode_once():
    short = ModelConfig(32000, 4096, 11008, 32, 32, 32, 128, tie_word_embeddings=True)
    assert costs.reuse(short, [(1, 1)]) == pytest.approx(1, abs=0.01)
    assert costs.reuse(short, [(512, 512)]) == pytest.approx(512, rel=0.1)
    assert costs.reuse(short, [(1, 1)] * 64) == pytest.approx(64, rel=0.02)
    assert costs.reuse(short, [(512, 512)], 4) == costs.reuse(short, [(512, 512)], 2)  # twice the bytes, the same uses


def test_a_kernel_that_computes_the_full_square_halves_the_crossover():
    assert costs.quadratic_crossover(SMOLLM, causal=False) == 3072
    n = 3072
    assert costs.attention_flops(SMOLLM, [(n, n)], causal=False) == costs.linear_flops(SMOLLM, n)


def test_bytes_equal_those_of_real_tensors(tiny):
    checkpoint, _ = tiny
    config = checkpoint.config
    tensors = sum(weight.numel() for weight in checkpoint.weights.values())
    assert costs.weight_bytes(config, 4) == 4 * tensors
    cache = KVCache(config, 8, 16, torch.float32)
    assert costs.kv_bytes_per_token(config, 4) * 8 * 16 == cache.num_bytes
    assert 8 * kv_bytes_per_block(config, 16, torch.float32) == cache.num_bytes


def test_the_formula_2_n_d_model_l_holds_for_multi_head_attention_and_not_for_grouped_queries():
    n, size = random.randrange(1, 5000), 2
    for config, ratio in ((LLAMA_7B, 1), (LLAMA_70B, 8), (SMOLLM, 3)):
        formula = 2 * n * config.hidden_size * config.num_hidden_layers * size
        assert formula == ratio * n * costs.kv_bytes_per_token(config, size)


def test_keeping_the_embedding_on_the_cpu_saves_a_quarter_to_one_gigabyte():
    """Of GPU memory, for the 7B and for today's larger vocabularies."""
    sizes = [2 * config.vocab_size * config.hidden_size / 1e9 for config in (LLAMA_7B, CONFIGS["8b"])]
    assert sizes == pytest.approx([0.26, 1.05], abs=0.01)
