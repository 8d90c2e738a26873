"""Small random models of each family, made by transformers, and the plainest way to run ours on them."""

import math
import random

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from minillm.batch import Batch
from minillm.kv_cache import KVCache
from minillm.model_config import ModelConfig, RopeScaling
from tests.tolerances import LOGITS_FP32

B = 16  # block size
MAX_POSITIONS = 96
WINDOW = 21
SIZES = dict(
    vocab_size=133,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=MAX_POSITIONS,
    attn_implementation="eager",
)
LLAMA3 = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES, rms_norm_eps=0.5),
    "llama tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3 rope": lambda: LlamaConfig(**SIZES, rope_parameters=dict(rope_type="llama3", rope_theta=500.0, **LLAMA3)),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=16, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2 window in upper layers": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True),
    "qwen3 untied": lambda: Qwen3Config(**SIZES, head_dim=16),
}


def our_config(theirs):
    """A transformers config in our words."""
    window = getattr(theirs, "sliding_window", None)
    layer_types = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 3
    return ModelConfig(
        **{name: getattr(theirs, name) for name in SIZES if name != "attn_implementation"},
        architecture=theirs.model_type,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        rms_norm_eps=theirs.rms_norm_eps,
        rope_theta=theirs.rope_parameters["rope_theta"],
        rope_scaling=RopeScaling(**LLAMA3) if theirs.rope_parameters["rope_type"] == "llama3" else None,
        tie_word_embeddings=theirs.tie_word_embeddings,
        qkv_bias=theirs.model_type == "qwen2",
        qk_norm=theirs.model_type == "qwen3",
        sliding_window=window,
        sliding_layers=tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention"),
    )


def their_model(theirs):
    """A random model in which every parameter matters: norms are not all one, biases not all zero."""
    model = AutoModelForCausalLM.from_config(theirs).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.3) if "norm" in name else parameter.normal_(0.0, 0.25)
    return model


def attend(q, k, v, kv_layer, batch):
    """Attention from its definition, one request at a time, reading everything back from the pages."""
    out = torch.full_like(q, float("nan"))
    row = 0
    for n, length, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
        keys, values = (
            x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float() for x in kv_layer.gather(table, length)
        )
        scores = torch.einsum("nhd,shd->hns", q[row : row + n].float(), keys) / math.sqrt(q.shape[2])
        distance = torch.arange(length - n, length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (kv_layer.window or length))
        probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[row : row + n] = torch.einsum("hns,shd->nhd", probabilities, values).to(q.dtype)
        row += n
    return out


def poisoned_cache(config, num_blocks=32, dtype=torch.float32, device="cpu"):
    """Rows that were never written are NaN, so reading one is noticed."""
    cache = KVCache(config, num_blocks, B, dtype, device)
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    return cache


def random_tokens(config, n):
    return torch.randint(0, config.vocab_size, (n,)).tolist()


def blocks_for(lengths):
    """Disjoint block tables in random order, so that neighbouring rows of a request lie apart."""
    needed = [-(-n // B) for n in lengths]
    ids = random.sample(range(32), sum(needed))
    return [[ids.pop() for _ in range(n)] for n in needed]


def run(model, tokens, chunks=None):
    """Logits [n, V] of every row of one request, computed `chunks` rows at a time."""
    cache = poisoned_cache(model.config, dtype=model.dtype)
    [table] = blocks_for([len(tokens)])
    rows = []
    for start in range(0, len(tokens), chunks or len(tokens)):
        piece = tokens[start : start + (chunks or len(tokens))]
        batch = Batch.build([piece], [start + len(piece)], [table], B)
        rows.append(model.lm_head(model.hidden(batch, cache, attend)))
    return torch.cat(rows)


def assert_same_logits(found, expected):
    assert expected.isfinite().all()
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert (found - expected).abs().max() < LOGITS_FP32 * expected.abs().max()
