"""Early exit against a whole model whose deeper layers add nothing to any row but the last, and through the engine."""

from dataclasses import replace

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.batch import Batch
from minillm.checkpoint import load
from minillm.checkpoint.random_weights import CONFIGS
from minillm.cli import main
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.kv_cache import KVCache
from minillm.model import Transformer
from minillm.pipeline.early_exit import EarlyExit
from tests.tolerances import LOGITS_FP32
from tests.unit.engines import B, attention, make_engine, random_prompts, run, sure_prompts
from tests.unit.test_parallel_model import random_weights

DEEP = replace(CONFIGS["tiny"], num_hidden_layers=6)
FAMILIES = {
    "llama": DEEP,
    "qwen2": replace(DEEP, architecture="qwen2", qkv_bias=True),
    "qwen3": replace(DEEP, architecture="qwen3", qk_norm=True),
    "window": replace(DEEP, architecture="mistral", sliding_window=9),
}


def cache_of(config, num_blocks=8):
    cache = KVCache(config, num_blocks, B)
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    return cache


def only_the_last_row_changes(model, layer):
    """The model with layers from `layer` on that add nothing to the rows of a prompt but the last: the slow way."""
    for deeper in model.layers[layer:]:

        def mix(x, attended, ops, whole=deeper.mix):
            before = x.clone()
            x, update = whole(x, attended, ops)
            x, update = x.clone(), update.clone()
            x[:-1], update[:-1] = before[:-1], 0
            return x, update

        deeper.mix = mix
    return model


@pytest.mark.parametrize("layer", [1, 3, 5, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_cache_are_those_of_layers_that_add_nothing_but_to_the_last_row(family, layer):
    config = FAMILIES[family]
    weights = random_weights(config)
    ids, table = torch.randint(config.vocab_size, (45,)).tolist(), [4, 1, 6]
    batch, attend = Batch.build([ids], [45], [table], B), attention("naive")
    slow, ours = cache_of(config), cache_of(config)
    with torch.inference_mode():
        expected = only_the_last_row_changes(Transformer(config, weights), layer).forward(batch, slow, attend)
        found = EarlyExit(Transformer(config, weights), layer).forward(batch, ours, attend)
    close = LOGITS_FP32 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=close)
    for a, b in zip(ours.tensors, slow.tensors, strict=True):
        torch.testing.assert_close(a[:, table].flatten(1, 2)[:, :45], b[:, table].flatten(1, 2)[:, :45])
        assert a[:, [0, 2, 3, 5, 7]].isnan().all(), "other blocks were written"


@pytest.fixture(scope="module")
def deep():
    """(checkpoint, whole model) of six layers."""
    checkpoint = replace(load("random:tiny"), config=DEEP)
    return checkpoint, Transformer(DEEP, random_weights(DEEP))


def with_exit(deep, layer):
    return deep[0], EarlyExit(deep[1], layer)


def solo(parts, prompts):
    return [run(make_engine(parts, num_blocks=16, enable_prefix_caching=False), [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("budget", [1, 15, 17, 64])
@pytest.mark.parametrize("body", ["naive", "cpu", "sdpa"])
def test_chunks_and_batches_give_the_tokens_of_one_prompt_alone_in_one_piece(deep, session_seed, body, budget):
    prompts = random_prompts(deep[0:1], [45, 1, 16, 33], session_seed)
    parts = with_exit(deep, 2)
    options = dict(enable_prefix_caching=False, max_num_batched_tokens=budget)
    assert run(make_engine(parts, body, **options), prompts) == solo(parts, prompts)


def test_leaving_before_the_last_layer_is_exact_and_earlier_is_not(deep, session_seed):
    """The last layer needs K and V of the layer before, which are there; nobody reads what it adds to those rows."""
    prompts, whole = sure_prompts(deep, [45, 60, 33], session_seed)
    assert solo(with_exit(deep, 6), prompts) == solo(with_exit(deep, 5), prompts) == whole
    assert solo(with_exit(deep, 1), prompts) != whole


def test_a_prompt_of_one_token_and_decodes_never_leave(deep, session_seed):
    (prompt,) = random_prompts(deep[0:1], [1], session_seed)
    assert solo(with_exit(deep, 1), [prompt]) == solo(deep, [prompt])


def test_rows_that_were_looked_up_before_and_scores_are_taken_as_by_the_whole_model(deep):
    batch = Batch.build([list(range(20))], [20], [[0, 1]], B)
    embedded = torch.randn(20, DEEP.hidden_size)
    model, attend = EarlyExit(deep[1], 3), attention("naive")
    with torch.inference_mode():
        by_ids = model.forward(batch, cache_of(DEEP), attend, embedded=deep[1].embed(batch))
        torch.testing.assert_close(by_ids, model.forward(batch, cache_of(DEEP), attend))
        assert not torch.allclose(by_ids, model.forward(batch, cache_of(DEEP), attend, embedded=embedded))
        whole = deep[1].hidden(batch, cache_of(DEEP), attend)
        torch.testing.assert_close(model.hidden(batch, cache_of(DEEP), attend), whole)


def test_it_is_chosen_in_python_and_on_the_command_line_and_counts_the_same_bytes(capsys):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    text = "a prompt whose tokens leave early, all but one"
    with LLM("random:tiny", dtype="float32", early_exit_layer=1) as llm, LLM("random:tiny", dtype="float32") as whole:
        expected = llm.generate(text, params, use_tqdm=False)[0].outputs[0]
        assert isinstance(llm.engine.model, EarlyExit) and llm.engine.model.layer == 1
        assert expected.token_ids == whole.generate(text, params, use_tqdm=False)[0].outputs[0].token_ids
        assert llm.engine.model.num_weight_bytes == whole.engine.model.num_weight_bytes
        assert llm.score(text) == whole.score(text)
    flags = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--dtype", "float32", "--early-exit-layer", "1"]
    assert main(["generate", text, "--model", "random:tiny", *flags]) == 0
    assert capsys.readouterr().out == expected.text + "\n"


@pytest.mark.parametrize("layer", [3, 100])
def test_a_layer_that_the_model_does_not_have_is_refused(layer):
    with pytest.raises(ConfigError, match=f"early_exit_layer={layer} .* 1 to 2"):
        LLM("random:tiny", early_exit_layer=layer)


@pytest.mark.parametrize("options", [{"early_exit_layer": 0}, {"early_exit_layer": 1, "tensor_parallel_size": 2}])
def test_no_layer_and_several_processes_are_refused(options):
    with pytest.raises(ConfigError, match="early_exit_layer"):
        EngineConfig(**options)
