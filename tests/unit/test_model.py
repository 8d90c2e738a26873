"""The forward pass against transformers, and against itself cut, mixed and shuffled."""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from minillm.batch import Batch
from minillm.errors import CheckpointError
from minillm.kv_cache import KVCache
from minillm.linear import Forms, PlainLinear
from minillm.model import Transformer
from minillm.profiler import PART_NAMES, Parts
from tests.tolerances import LOGITS_FP32
from tests.unit.families import (
    FAMILIES,
    MAX_POSITIONS,
    SIZES,
    WINDOW,
    B,
    assert_same_logits,
    attend,
    blocks_for,
    our_config,
    poisoned_cache,
    random_tokens,
    run,
    their_model,
)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """(our config, state dict, transformers' model) of one family."""
    theirs = their_model(FAMILIES[request.param]())
    return our_config(theirs.config), theirs.state_dict(), theirs


@pytest.fixture(scope="module")
def small():
    """(config, Transformer) of a small Llama, for what is the same in every family."""
    theirs = their_model(FAMILIES["llama"]())
    config = our_config(theirs.config)
    return config, Transformer(config, theirs.state_dict())


# ---- equal to transformers -------------------------------------------------------------------


@torch.no_grad()
def test_logits_are_those_of_transformers_up_to_the_last_position(pair):
    config, state, theirs = pair
    tokens = random_tokens(config, MAX_POSITIONS)
    expected = theirs(torch.tensor([tokens])).logits[0]
    found = run(Transformer(config, state), tokens)
    assert_same_logits(found, expected)
    assert found.std() > 1  # or everything would be equal to everything


@torch.no_grad()
def test_every_part_of_the_config_changes_the_logits(pair):
    """Guards the test above: an ignored window, bias, norm or scaling would show as equal logits here."""
    config, state, _ = pair
    tokens = random_tokens(config, 60)
    right = run(Transformer(config, state), tokens)
    wrong = [replace(config, rope_theta=config.rope_theta / 10)]
    if config.sliding_window:
        wrong += [replace(config, sliding_window=None), replace(config, sliding_window=WINDOW + 1)]
    if config.sliding_layers and len(config.sliding_layers) < config.num_hidden_layers:
        wrong.append(replace(config, sliding_layers=(0,)))
    if config.rope_scaling:
        wrong.append(replace(config, rope_scaling=None))
    for other in wrong:
        difference = (run(Transformer(other, state), tokens) - right).abs().max()
        assert difference > 10 * LOGITS_FP32 * right.abs().max()
    for name, tensor in state.items():
        if name.endswith((".bias", "_norm.weight", "layernorm.weight")) and "layers.1" in name:
            changed = run(Transformer(config, state | {name: torch.full_like(tensor, 0.5)}), tokens)
            # A bias of k moves all scores of a row alike but for the rotation: small, not zero.
            assert (changed - right).abs().max() > LOGITS_FP32 * right.abs().max(), name


# ---- one forward, however it is cut ----------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3, B - 1, B, B + 1, 40])
def test_chunked_prefill_equals_one_shot(pair, chunk):
    config, state, _ = pair
    model = Transformer(config, state)
    tokens = random_tokens(config, 2 * B + 13)
    assert_same_logits(run(model, tokens, chunk), run(model, tokens))


@torch.no_grad()
def test_mixed_ragged_batch_equals_each_request_alone_in_any_order(pair):
    """Prefill from the start, a chunk in the middle and decodes share one step."""
    config, state, _ = pair
    model = Transformer(config, state)
    new, context = [20, 1, 7, 1, 1, B], [20, B + 1, 30, 1, 2 * B, 2 * B]
    sequences = [random_tokens(config, n) for n in context]
    alone = [run(model, tokens)[-n:] for tokens, n in zip(sequences, new, strict=True)]

    for order in (range(6), random.sample(range(6), 6)):
        cache, tables = poisoned_cache(config), blocks_for(context)
        for i, tokens in enumerate(sequences):
            if before := tokens[: -new[i]]:
                model.hidden(Batch.build([before], [len(before)], [tables[i]], B), cache, attend)
        step = [(sequences[i][-new[i] :], context[i], tables[i]) for i in order]
        hidden = model.hidden(Batch.build(*map(list, zip(*step, strict=True)), B), cache, attend)
        assert_same_logits(model.lm_head(hidden), torch.cat([alone[i] for i in order]))


@torch.no_grad()
@pytest.mark.parametrize("requests", [1, 3, 20, 33])
def test_decodes_of_any_batch_size_equal_solo(small, requests):
    config, model = small
    sequences = [random_tokens(config, random.randint(1, B)) for _ in range(requests)]
    lengths = [len(s) for s in sequences]
    cache, tables = poisoned_cache(config, num_blocks=33), [[i] for i in random.sample(range(33), requests)]
    prompts = [(s[:-1], n - 1, t) for s, n, t in zip(sequences, lengths, tables, strict=True) if n > 1]
    if prompts:
        model.hidden(Batch.build(*map(list, zip(*prompts, strict=True)), B), cache, attend)
    batch = Batch.build([s[-1:] for s in sequences], lengths, tables, B)
    found = model.forward(batch, cache, attend)
    assert_same_logits(found, torch.cat([run(model, s)[-1:] for s in sequences]))


@torch.no_grad()
def test_the_lm_head_runs_for_sampled_rows_only(small):
    config, model = small
    sequences = [random_tokens(config, n) for n in (5, 1, 9)]
    tables = blocks_for([5, 1, 9])
    every_row = torch.cat([run(model, s) for s in sequences])
    for sampled, rows in [([True, False, True], [4, 14]), ([False] * 3, []), (None, [4, 5, 14])]:
        batch = Batch.build(sequences, [5, 1, 9], tables, B, sampled)
        with FlopCounterMode(display=False) as counter:
            parts = Parts(counter.get_total_flops)
            logits = model.forward(batch, poisoned_cache(config), attend, parts)
        assert logits.shape == (len(rows), config.vocab_size) and logits.dtype == torch.float32
        assert parts.seconds["lm_head"] == 2 * len(rows) * config.hidden_size * config.vocab_size
        if rows:
            assert_same_logits(logits, every_row[rows])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1, 50])
def test_half_precision_gives_float32_logits_near_those_of_float32(pair, dtype, chunk):
    config, state, _ = pair
    tokens = random_tokens(config, 50)
    found = run(Transformer(config, state, dtype, quantization="auto"), tokens, chunk)
    expected = run(Transformer(config, state), tokens)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < (0.1 if dtype == torch.bfloat16 else 0.02) * expected.norm()


# ---- refused before anything runs ------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_a_missing_or_misshapen_tensor_is_named_with_both_shapes(name):
    theirs = their_model(FAMILIES["llama"]())
    config, state = our_config(theirs.config), theirs.state_dict()
    shape = list(state[name].shape)
    without = {key: value for key, value in state.items() if key != name}
    with pytest.raises(CheckpointError) as error:
        Transformer(config, without)
    assert name in str(error.value) and str(shape) in str(error.value)

    for wrong in (state[name][:-1], state[name][None], state[name].flatten()[:1]):
        with pytest.raises(CheckpointError) as error:
            Transformer(config, state | {name: wrong})
        for part in (name, str(shape), str(list(wrong.shape))):
            assert part in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.lora"],
)
def test_a_tensor_that_nobody_would_read_is_refused(small, name):
    theirs = their_model(FAMILIES["llama"]())
    with pytest.raises(CheckpointError, match=name):
        Transformer(our_config(theirs.config), theirs.state_dict() | {name: torch.zeros(4)})


@torch.no_grad()
def test_a_head_stored_beside_a_tied_embedding_is_ignored():
    theirs = their_model(FAMILIES["llama tied"]())
    config, state = our_config(theirs.config), theirs.state_dict()
    without = {key: value for key, value in state.items() if key != "lm_head.weight"}
    tokens = random_tokens(config, 9)
    beside = without | {"lm_head.weight": torch.zeros_like(state["lm_head.weight"])}
    assert torch.equal(run(Transformer(config, beside), tokens), run(Transformer(config, without), tokens))


# ---- memory, devices, parts ------------------------------------------------------------------


def test_weight_bytes_are_those_of_the_parameters(pair):
    config, state, theirs = pair
    sizes = Transformer(config, state).num_weight_bytes
    vectors = sum(p.nbytes for p in theirs.parameters() if p.dim() == 1)
    assert sum(sizes.values()) + vectors == sum(p.nbytes for p in theirs.parameters())  # a tied head counts once
    assert set(sizes) == {"embedding", "plain float32"}


def test_the_forward_leaves_every_tensor_on_the_models_device(pair):
    """The meta device has shapes but no data: an operation that mixes it with the CPU raises, as on a GPU."""
    config, state, _ = pair
    model = Transformer(config, state, torch.float16, device="meta")
    cache = KVCache(config, 4, B, torch.float16, device="meta")
    batch = Batch.build([[1, 2, 3], [4]], [3, 9], [[0], [1]], B, device="meta")
    logits = model.forward(batch, cache, lambda q, k, v, layer, batch: q.clone())
    assert logits.device.type == "meta" and logits.shape == (2, config.vocab_size)


@torch.no_grad()
def test_twice_the_layers_count_twice_the_linear_and_attention_work_and_one_head(small):
    """The clock counts floating point operations, so what a part covers is exact."""
    config, _ = small
    counts = []
    for layers in (config.num_hidden_layers, 2 * config.num_hidden_layers):
        theirs = their_model(LlamaConfig(**SIZES | {"num_hidden_layers": layers}))
        deeper = replace(config, num_hidden_layers=layers, sliding_layers=())
        model = Transformer(deeper, theirs.state_dict(), forms=Forms(torch.float32, torch.device("cpu"), PlainLinear))
        batch = Batch.build([random_tokens(config, 25), [7]], [25, 1], blocks_for([25, 1]), B)
        with FlopCounterMode(display=False) as counter:
            parts = Parts(clock=counter.get_total_flops)
            model.forward(batch, poisoned_cache(deeper), attend, parts)
        counts.append(dict(parts.seconds))
        assert set(counts[-1]) == set(PART_NAMES) - {"sample"}
        assert sum(counts[-1].values()) == counter.get_total_flops()  # nothing between the parts, nothing twice
    one, two = counts
    assert one["attention"] > 0 and two["attention"] == 2 * one["attention"]
    assert one["linear"] > 0 and two["linear"] == 2 * one["linear"]
    assert one["lm_head"] > 0 and two["lm_head"] == one["lm_head"]
    assert one["kv_write"] == two["kv_write"] == 0  # it moves numbers, it computes none
