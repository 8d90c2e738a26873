"""Whole models in int8, int4 and fp8: the forward over the weights that their codes stand for, alone and in parts."""

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.checkpoint.random_weights import CONFIGS, random_weights
from minillm.config import EngineConfig
from minillm.errors import CheckpointError, ConfigError
from minillm.model import Transformer
from minillm.parallel.model import ParallelTransformer
from minillm.quantize import GroupQuantized, round_rows, round_to_int4
from minillm.resources import activation_bytes
from tests.tolerances import LOGITS_FP32
from tests.unit.engines import attention
from tests.unit.families import assert_same_logits, random_tokens, run
from tests.unit.test_parallel_model import FAMILIES, batches, logits_of, on_ranks
from tests.unit.test_parallel_model import random_weights as weights_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
HEADS = ("model.embed_tokens.weight", "lm_head.weight")


def rounded(weights, quantization):
    """The weights that a model in this precision multiplies by, one tensor at a time, as ordinary numbers."""
    found = {}
    for name, weight in weights.items():
        precision = "int8" if name in HEADS else quantization
        if weight.dim() == 2:
            codes = round_to_int4([weight]) if precision == "int4" else round_rows([weight], torch.int8)
            found[name] = codes.dequantize()
        else:
            found[name] = weight
    return found


@torch.no_grad()
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["tiny", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_logits_are_those_of_the_rounded_weights(name, quantization):
    """Stacked projections, biases, tied heads: every matrix is rounded by itself, whatever it is stacked with."""
    config, weights = random_weights(name, seed=int(torch.randint(10**6, ())))
    tokens = random_tokens(config, 40)
    exact = rounded(weights, quantization)
    expected = Transformer(config, exact)
    expected.embed.table = weights["model.embed_tokens.weight"]  # looked up, not multiplied
    found = Transformer(config, weights, quantization=quantization)
    assert_same_logits(run(found, tokens), run(expected, tokens))
    assert_same_logits(run(found, tokens, chunks=7), run(expected, tokens))
    untouched = run(Transformer(config, weights), tokens)
    assert (run(found, tokens) - untouched).abs().max() > LOGITS_FP32 * untouched.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization, limit", [("int8", 0.1), ("int4", 0.6), ("fp8", 0.3)])
def test_logits_stay_near_those_of_the_weights_as_they_are(quantization, limit, dtype):
    config, weights = random_weights("tiny-qwen2", seed=int(torch.randint(10**6, ())))
    tokens = random_tokens(config, 50)
    expected = run(Transformer(config, weights), tokens)
    for chunk in (None, 1, 20):
        found = run(Transformer(config, weights, dtype, quantization=quantization), tokens, chunk)
        assert (found - expected).norm() < limit * expected.norm()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", ["tied", "odd vocabulary, untied", "qwen2"])
def test_ranks_round_their_own_parts(family, quantization, size):
    """A row that is cut by its inputs is rounded in pieces: not the same numbers, but as near to the whole."""
    config = FAMILIES[family]
    weights, steps, attend = weights_of(config), batches(config), attention("naive")
    with torch.inference_mode():
        exact = logits_of(Transformer(config, weights), steps, attend)
        alone = logits_of(Transformer(config, weights, quantization=quantization), steps, attend)

    def work(ranks):
        return logits_of(ParallelTransformer(config, weights, ranks, quantization=quantization), steps, attend)

    together = on_ranks(size, work)[0]
    for ours, theirs, right in zip(together, alone, exact, strict=True):
        assert ours.shape == right.shape
        assert (ours - right).norm() < 2 * (theirs - right).norm() + 0.01 * right.norm()


# ---- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["none", "auto", "int8", "int4", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_weight_that_is_not_finite_is_refused_by_name(name, value, quantization):
    config, weights = random_weights("tiny")
    spoilt = weights[name].clone()
    spoilt.view(-1)[int(torch.randint(spoilt.numel(), ()))] = value
    with pytest.raises(CheckpointError, match=f"'{name}' holds NaN or an infinity"):
        Transformer(config, dict(weights) | {name: spoilt}, quantization=quantization)


@pytest.mark.parametrize("part", ["scale", "minimum"])
def test_scales_of_a_file_that_are_not_finite_are_refused_by_name(part):
    config, weights = random_weights("tiny")
    name = "model.layers.0.mlp.up_proj.weight"
    codes = GroupQuantized(torch.zeros(128, 64, dtype=torch.uint8), torch.ones(128, 2), torch.zeros(128, 2))
    assert Transformer(config, dict(weights) | {name: codes}, quantization="int4")
    getattr(codes, part)[5, 1] = float("nan")
    with pytest.raises(CheckpointError, match=f"'{name}'"):
        Transformer(config, dict(weights) | {name: codes}, quantization="int4")


def test_a_precision_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="int3.*none, int8, int4, fp8"):
        EngineConfig(quantization="int3")


def test_memory_is_left_for_a_matrix_that_is_written_out():
    config = CONFIGS["8b"]
    options = [EngineConfig(quantization=quantization) for quantization in ("none", "int8", "int4", "fp8")]
    sizes = [activation_bytes(option, config, torch.bfloat16) for option in options]
    assert sizes[1] == sizes[2] == sizes[0] + 128256 * 4096 * 2 and sizes[3] == sizes[0]


# ---- as an option ----------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_an_engine_answers_in_every_precision_and_says_which(quantization):
    prompts = [list(range(3, 20)), [5, 6], list(range(40, 90))]
    with LLM("random:tiny", quantization=quantization, dtype="float32", num_kv_blocks=40) as llm:
        assert llm.reasons["weights"].startswith(f"{quantization}: ")
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        llm.reset_prefix_cache()
        alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
        assert together == alone and all(len(ids) == 5 for ids in together)
        sizes = llm.engine.model.num_weight_bytes
    layers, head = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128), 320 * 64
    if quantization == "int8":
        assert head + layers < sizes["int8"] < 1.1 * (head + layers)
    if quantization == "int4":
        assert layers / 2 < sizes["int4"] < 0.8 * layers and head < sizes["int8"] < 1.1 * head
    if quantization == "fp8":
        assert sizes["fp8 held as plain float32"] == 4 * layers
