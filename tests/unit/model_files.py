"""Small model files for the checkpoint tests, written by the field's own libraries.

GGUF by `gguf.GGUFWriter`, folders by transformers' `save_pretrained`, their tokenizer by `tokenizers`.
"""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 4, 2, 16, 320
END = "<|end|>"
TOKENS = [*sorted(ByteLevel.alphabet()), "he", END]  # 256 byte letters, one merge, one special token
END_ID = 257


def gguf_shapes(architecture: str, tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes written down by hand, as converters write them."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            "ffn_up.weight": (FEED_FORWARD, HIDDEN),
            "ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
        if architecture == "qwen2":
            block |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if architecture == "qwen3":
            block |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def write_gguf(
    path: Path,
    kind: Kind = Kind.Q4_1,
    architecture: str = "llama",
    tied: bool = True,
    seed: int = 0,
    change=lambda tensors: None,
    describe=lambda writer: None,
) -> dict[str, tuple[np.ndarray, Kind]]:
    """Write a random model whose matrices are stored as `kind`; returns what was stored: name -> (bytes, kind).

    change    may edit the tensors {name: (data, kind)} before they are written
    describe  may add metadata
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in gguf_shapes(architecture, tied).items():
        stored_as = kind if len(shape) == 2 else Kind.F32
        numbers = rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = (gguf.quants.quantize(numbers, stored_as), stored_as)
    change(tensors)

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(END_ID)
    describe(writer)
    for name, (data, stored_as) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def save_folder(folder: Path, architecture: str = "llama", tied: bool = False, shard: str = "1GB", **options):
    """Save a tiny random transformers model with a byte tokenizer; returns the transformers model."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=tied,
        **{"head_dim": HEAD_DIM, "eos_token_id": END_ID, "bos_token_id": None, "max_position_embeddings": 128}
        | options,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=END_ID)
    model.save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS[:-1])}, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
