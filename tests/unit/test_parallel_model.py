"""A model cut into parts: the parts are the whole, and ranks that compute together give its logits.

Ranks are threads here: the collectives are real, and no process is started.
"""

import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from minillm.batch import Batch
from minillm.checkpoint import load
from minillm.checkpoint.random_weights import CONFIGS
from minillm.errors import CheckpointError, ConfigError
from minillm.kv_cache import KVCache
from minillm.model import Transformer
from minillm.parallel.model import ParallelTransformer
from minillm.parallel.ranks import Ranks
from minillm.parallel.split import check_split, share_of_weight, share_of_weights, vocabulary_rows
from minillm.quantize import GroupQuantized
from minillm.weights import expected_shapes
from tests.tolerances import LOGITS_FP32
from tests.unit.engines import B, attention

BASE = replace(CONFIGS["tiny"], num_attention_heads=8, num_key_value_heads=4)
FAMILIES = {
    "tied": BASE,
    "untied": replace(BASE, tie_word_embeddings=False),
    "odd vocabulary": replace(BASE, vocab_size=317),
    "odd vocabulary, untied": replace(BASE, vocab_size=317, tie_word_embeddings=False),
    "qwen2": replace(BASE, architecture="qwen2", qkv_bias=True),
    "qwen3": replace(BASE, architecture="qwen3", qk_norm=True),
    "window": replace(BASE, architecture="mistral", sliding_window=9),
}


def random_weights(config):
    return {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in expected_shapes(config).items()}


def on_ranks(size, work, timeout_s=60):
    """work(ranks) on `size` connected ranks at once; their results in order. The first error is raised."""
    store, results = dist.HashStore(), [None] * size
    everyone = [Ranks(rank, size) for rank in range(size)]  # held here: who leaves early closes its connections

    def run(rank):
        try:
            everyone[rank].connect(store, loopback=True, timeout_s=timeout_s)
            with torch.inference_mode():
                results[rank] = work(everyone[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def poisoned_cache(config, num_blocks=12):
    cache = KVCache(config, num_blocks, block_size=B)
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    return cache


def batches(config):
    """Steps of one, and of three requests: fresh prompts, a chunk that goes on, decodes; some rows unsampled."""
    tokens = torch.randint(0, config.vocab_size, (3, 60)).tolist()
    tables = [[2, 0, 5, 7], [1, 9, 3, 4], [11, 6, 10, 8]]
    return [
        Batch.build([tokens[0][:21]], [21], tables[:1], B),
        Batch.build([tokens[0][21:22], tokens[1][:17], tokens[2][:5]], [22, 17, 5], tables, B, [True, False, True]),
        Batch.build([tokens[0][22:23], tokens[1][17:40], tokens[2][5:6]], [23, 40, 6], tables, B),
        Batch.build([tokens[0][23:24]], [24], tables[:1], B),
    ]


def logits_of(model, steps, attend):
    cache = poisoned_cache(model.config)
    return [model.forward(batch, cache, attend) for batch in steps]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_all_ranks_together_are_those_of_one_process(family, size):
    config = FAMILIES[family]
    weights, steps, attend = random_weights(config), batches(config), attention("naive")
    with torch.inference_mode():
        expected = logits_of(Transformer(config, weights), steps, attend)

    found = on_ranks(size, lambda ranks: logits_of(ParallelTransformer(config, weights, ranks), steps, attend))[0]
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32
        assert (a - b).abs().max() <= LOGITS_FP32 * b.abs().max()
        assert a.argmax(-1).tolist() == b.argmax(-1).tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_each_step_moves_two_sums_per_layer_and_one_gather(tied):
    config = replace(BASE, tie_word_embeddings=tied, num_hidden_layers=3, vocab_size=317)
    weights, batch = random_weights(config), batches(config)[1]

    def traffic(ranks):
        logits_of(ParallelTransformer(config, weights, ranks), [batch], attention("naive"))
        return ranks.traffic

    for found in on_ranks(4, traffic):
        assert found.calls == {"all_reduce": 6, "gather": 1}
        # 23 rows of 64 float32, twice in each of 3 layers; 2 sampled rows of 4 x 80 logits, padded from 317
        assert found.bytes == {"all_reduce": 2 * 3 * 23 * 64 * 4, "gather": 2 * 4 * 80 * 4}


def test_the_parts_of_every_tensor_put_together_are_the_tensor():
    config = FAMILIES["qwen2"]
    weights = random_weights(config)
    shares = [share_of_weights(config, weights, rank, 4) for rank in range(4)]
    for name, whole in weights.items():
        parts = [share[name] for share in shares]
        axis = next((i for i in range(whole.dim()) if parts[0].shape[i] != whole.shape[i]), None)
        assert torch.equal(whole, parts[0] if axis is None else torch.cat(parts, dim=axis))
        assert (axis is None) == any(kind in name for kind in ("norm", "embed", "lm_head"))


@pytest.mark.parametrize("name, groups", [("q_proj", 4), ("o_proj", 4), ("o_proj", 3), ("down_proj", 1)])
def test_4_bit_weights_are_cut_between_groups_of_codes_and_widened_where_that_is_not_possible(name, groups):
    codes = torch.randint(0, 16, (8, groups * 32), dtype=torch.uint8)
    weight = GroupQuantized(codes, torch.rand(8, groups), torch.randn(8, groups))
    parts = [share_of_weight(f"model.layers.0.x.{name}.weight", weight, rank, 2) for rank in range(2)]
    by_inputs = name != "q_proj"
    assert all(isinstance(part, GroupQuantized) == (not by_inputs or groups == 4) for part in parts)
    widened = [part if isinstance(part, torch.Tensor) else part.dequantize() for part in parts]
    assert torch.equal(torch.cat(widened, dim=int(by_inputs)), weight.dequantize())


@pytest.mark.parametrize("vocab_size, size", [(12, 4), (13, 4), (10, 4), (3, 4), (1, 2)])
def test_the_rows_of_the_vocabulary_are_all_held_once(vocab_size, size):
    rows = [range(vocab_size)[vocabulary_rows(vocab_size, rank, size)] for rank in range(size)]
    assert [row for part in rows for row in part] == list(range(vocab_size))


@pytest.mark.parametrize("size, possible", [(2, "1, 3"), (9, "1, 3"), (5, "1, 3")])
def test_heads_that_cannot_be_shared_are_refused_with_the_sizes_that_can(size, possible):
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size={size} .* 9 heads, 3 K/V heads .* over {possible}$"):
        check_split(CONFIGS["135m"], size)


def test_a_wrong_shape_is_named_as_in_the_whole_model():
    weights = random_weights(BASE)
    weights["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 126)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down_proj.weight' has shape \[64, 126\].* \[64, 128\]"):
        on_ranks(2, lambda ranks: ParallelTransformer(BASE, weights, ranks))


def test_a_rank_that_does_not_answer_is_an_error_and_not_an_endless_wait():
    given_up = threading.Event()

    def work(ranks):
        if ranks.rank > 0:
            return given_up.wait(60)
        try:
            return ranks.sum(torch.ones(2))
        finally:
            given_up.set()

    with pytest.raises(RuntimeError, match="[Tt]imed out"):
        on_ranks(2, work, timeout_s=1)


def test_ranks_agree_on_a_number_or_notice_that_they_do_not():
    assert on_ranks(2, lambda ranks: ranks.agree(5)) == [True, True]
    assert on_ranks(3, lambda ranks: ranks.agree(5 + (ranks.rank == 1))) == [False] * 3
    assert on_ranks(3, lambda ranks: ranks.least(7 - ranks.rank)) == [5] * 3


def test_a_share_takes_its_part_of_the_memory():
    """A tied head is a view of the embedding, so only the matrices of the layers are there, halved."""
    checkpoint = load("random:tiny")
    whole = Transformer(checkpoint.config, checkpoint.weights).num_weight_bytes
    parts = on_ranks(
        2, lambda ranks: ParallelTransformer(checkpoint.config, checkpoint.weights, ranks).num_weight_bytes
    )
    assert parts == [{"embedding": whole["embedding"], "plain float32": whole["plain float32"] // 2}] * 2
