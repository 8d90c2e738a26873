"""GGUF files: every stored kind against the gguf package's own arithmetic, and every way to be broken."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minillm.checkpoint import embedded, load
from minillm.errors import CheckpointError
from minillm.model_config import ModelConfig, RopeScaling
from minillm.quantize import GroupQuantized
from tests.unit.model_files import END_ID, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, write_gguf

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1]
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
    "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
    "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
    "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
    "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
    "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
    "blk.1.ffn_gate.weight": "model.layers.1.mlp.gate_proj.weight",
    "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
    "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
}


def hf_row_order(num_heads: int, head_dim: int) -> list[int]:
    """For each row in Hugging Face's order, where it stands in a Llama GGUF: halves are interleaved there."""
    half = head_dim // 2
    return [h * head_dim + 2 * (r % half) + r // half for h in range(num_heads) for r in range(head_dim)]


def numbers(weight) -> np.ndarray:
    weight = weight.dequantize() if isinstance(weight, GroupQuantized) else weight
    return weight.float().numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_weight_equals_the_gguf_packages_dequantisation(tmp_path, kind, tied):
    stored = write_gguf(tmp_path / "m.gguf", kind, tied=tied, seed=int(kind))
    weights = load(tmp_path / "m.gguf").weights
    assert ("lm_head.weight" in weights) is not tied
    assert len(weights) == len(stored)
    for name, (data, stored_as) in stored.items():
        expected = gguf.quants.dequantize(data, stored_as)
        if "attn_q" in name or "attn_k" in name:
            expected = expected[hf_row_order(len(expected) // HEAD_DIM, HEAD_DIM)]
        hf_name = HF_NAMES.get(name) or HF_NAMES[name.replace("blk.0", "blk.1")].replace("layers.1", "layers.0")
        np.testing.assert_array_equal(numbers(weights[hf_name]), expected, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_four_bit_matrices_keep_the_codes_and_scales_of_the_file(tmp_path, kind):
    stored = write_gguf(tmp_path / "m.gguf", kind)
    weight = load(tmp_path / "m.gguf").weights["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(weight, GroupQuantized) and weight.group == 32 and weight.codes.dtype == torch.uint8
    n, k = weight.shape
    halves = weight.codes.numpy().reshape(n, k // 32, 2, 16)
    parts = [weight.scale, weight.minimum][: 1 if kind is Kind.Q4_0 else 2]
    heads = np.stack([part.numpy().astype(np.float16) for part in parts], axis=-1).view(np.uint8)
    blocks = np.concatenate([heads, halves[:, :, 0] | halves[:, :, 1] << 4], axis=-1)
    np.testing.assert_array_equal(blocks.reshape(n, -1), stored["blk.0.ffn_down.weight"][0])


@pytest.mark.parametrize("kind, dtype", [(Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)])
def test_half_precision_weights_keep_their_dtype(tmp_path, kind, dtype):
    write_gguf(tmp_path / "m.gguf", kind)
    weights = load(tmp_path / "m.gguf").weights
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == dtype
    assert weights["model.norm.weight"].dtype == torch.float32


def test_a_four_bit_embedding_comes_as_numbers_because_rows_are_looked_up(tmp_path):
    write_gguf(tmp_path / "m.gguf", Kind.Q4_0)
    assert load(tmp_path / "m.gguf").weights["model.embed_tokens.weight"].shape == (VOCAB, HIDDEN)


def test_weights_do_not_change_when_the_file_is_overwritten(tmp_path):
    write_gguf(tmp_path / "m.gguf", Kind.F32)
    weight = load(tmp_path / "m.gguf").weights["model.layers.0.mlp.up_proj.weight"]
    before = weight.clone()
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.write(b"\xff" * (tmp_path / "m.gguf").stat().st_size)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rows_stay_where_they_are(tmp_path, architecture):
    stored = write_gguf(tmp_path / "m.gguf", Kind.F32, architecture)
    checkpoint = load(tmp_path / "m.gguf")
    q = checkpoint.weights["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(q.numpy(), stored["blk.0.attn_q.weight"][0])
    assert checkpoint.config.qkv_bias is (architecture == "qwen2")
    assert checkpoint.config.qk_norm is (architecture == "qwen3")
    extra = "self_attn.q_proj.bias" if architecture == "qwen2" else "self_attn.q_norm.weight"
    gguf_name = "blk.1.attn_q.bias" if architecture == "qwen2" else "blk.1.attn_q_norm.weight"
    found = checkpoint.weights[f"model.layers.1.{extra}"]
    np.testing.assert_array_equal(found.numpy(), stored[gguf_name][0])


def test_config_and_tokenizer_come_out_of_the_same_file(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    checkpoint = load(tmp_path / "m.gguf")
    assert checkpoint.name == "m" and checkpoint.generation == {}
    c = checkpoint.config
    assert (c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (HIDDEN, HEADS, KV_HEADS, 16)
    assert (c.max_position_embeddings, c.rope_theta, c.vocab_size) == (128, 5000.0, VOCAB)
    assert c.rms_norm_eps == pytest.approx(1e-5)
    assert checkpoint.tokenizer.eos_token_ids == (END_ID,)
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("héllo here")) == "héllo here"


def test_an_explicit_head_size_and_a_window_are_read(tmp_path):
    def describe(writer):
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_sliding_window(24)

    write_gguf(tmp_path / "m.gguf", describe=describe)
    assert load(tmp_path / "m.gguf").config.layer_window(0) == 24


def llama3_factors(factor: float, theta: float = 5000.0) -> np.ndarray:
    """What a converter writes: transformers' unscaled frequencies over its scaled ones."""
    from transformers import LlamaConfig

    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return (1.0 / theta ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM) / scaled).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recognised_from_its_factors(tmp_path, factor):
    theta = 500000.0

    def change(tensors):
        tensors["rope_freqs.weight"] = (llama3_factors(factor, theta), Kind.F32)

    # the key appears once in a file, so the helper's own rope base is replaced
    write_gguf(tmp_path / "m.gguf", change=change, describe=lambda w: set_value(w, "llama.rope.freq_base", theta))
    assert load(tmp_path / "m.gguf").config.rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)


def test_unknown_rope_factors_are_refused(tmp_path):
    def change(tensors):
        tensors["rope_freqs.weight"] = (np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32), Kind.F32)

    write_gguf(tmp_path / "m.gguf", change=change)
    with pytest.raises(CheckpointError, match="rope_freqs.weight.*not those of Llama 3"):
        load(tmp_path / "m.gguf")


def set_value(writer: gguf.GGUFWriter, key: str, value) -> None:
    writer.kv_data[0][key].value = value


def remove(name):
    return lambda tensors: tensors.pop(name)


def add(name, array, kind=Kind.F32):
    return lambda tensors: tensors.update({name: (array, kind)})


def zeros(*shape):
    return np.zeros(shape, dtype=np.float32)


@pytest.mark.parametrize(
    "change, message",
    [
        (remove("blk.1.ffn_up.weight"), r"'blk.1.ffn_up.weight' of shape \[96, 64\] is missing"),
        (remove("token_embd.weight"), "'token_embd.weight' is missing"),
        (add("blk.0.attn_q.weight", zeros(48, 64)), r"'blk.0.attn_q.weight' has shape \[48, 64\].*asks for \[64, 64\]"),
        (add("blk.0.attn_q.bias", zeros(64)), "'blk.0.attn_q.bias'.*no place in the model"),
        (add("blk.2.ffn_up.weight", zeros(96, 64)), "'blk.2.ffn_up.weight'.*no place"),
        (add("blk.0.ffn_up.weight", np.zeros((96, 84), np.uint8), Kind.Q2_K), "'blk.0.ffn_up.weight'.*Q2_K.*Q4_1"),
        (add("blk.0.ffn_up.weight", np.zeros((96, 64), np.int8), Kind.I8), "'blk.0.ffn_up.weight'.*stored as I8"),
    ],
    ids=["missing", "no embedding", "shape", "bias", "layer too many", "Q2_K", "I8"],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(tmp_path, change, message):
    write_gguf(tmp_path / "m.gguf", change=change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "describe, message",
    [
        (lambda w: set_value(w, "general.architecture", "gemma"), "architecture 'gemma' is not one of llama"),
        (lambda w: w.kv_data[0].pop("llama.block_count"), "'llama.block_count' is missing"),
        (lambda w: set_value(w, "llama.block_count", 4_000_000_000), "4000000000 layers, but only"),
        (lambda w: set_value(w, "llama.attention.head_count_kv", 3), "num_key_value_heads=3"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "RoPE scaling 'yarn' is not supported"),
        (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count' is 8, but heads have size 16"),
        (lambda w: w.add_expert_count(4), "mixture of 4 experts"),
        (lambda w: w.add_uint16("split.count", 3), "one of 3 parts"),
        (lambda w: w.add_array("llama.odd", [[1, 2], [3, 4]]), "an array holds ARRAY"),
    ],
)
def test_metadata_that_the_model_cannot_follow_is_refused_by_name(tmp_path, describe, message):
    write_gguf(tmp_path / "m.gguf", describe=describe)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"version https://git-lfs", b"\x00" * 100])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="m.gguf"):
        load(tmp_path / "m.gguf")


def test_a_file_of_the_other_byte_order_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="byte order"):
        load(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    reader = gguf.GGUFReader(path)
    end_of_data = max(t.data_offset + t.n_bytes for t in reader.tensors)
    return path.read_bytes(), reader.data_offset, end_of_data


QUICK = dict(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(max_examples=150, **QUICK)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(tmp_path, model_bytes, data):
    content, header, end = model_bytes
    cut = data.draw(st.integers(0, header) | st.integers(header, end - 1), label="cut")
    (tmp_path / "cut.gguf").write_bytes(content[:cut])
    with pytest.raises(CheckpointError, match="cut.gguf"):
        load(tmp_path / "cut.gguf")


def test_a_file_cut_inside_its_data_names_the_tensor(tmp_path, model_bytes):
    content, _, end = model_bytes
    (tmp_path / "cut.gguf").write_bytes(content[: end - 1])
    with pytest.raises(
        CheckpointError, match=rf"cut short: tensor 'blk.1.ffn_down.weight' ends at byte {end}, the file"
    ):
        load(tmp_path / "cut.gguf")


@settings(max_examples=200, **QUICK)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_harmless(tmp_path, model_bytes, data):
    content, header, _ = model_bytes
    damaged = bytearray(content)
    at = data.draw(st.integers(0, header - 1), label="at")
    damaged[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8), label="bytes")
    (tmp_path / "bad.gguf").write_bytes(damaged)
    try:
        checkpoint = load(tmp_path / "bad.gguf")
    except CheckpointError:
        return
    assert isinstance(checkpoint.config, ModelConfig)
    assert all(checkpoint.weights[name].shape for name in checkpoint.weights)


@pytest.fixture(scope="module")
def embedded_model():
    """The real file as we read it, and as the gguf package reads it by itself."""
    return load(embedded.NAME), gguf.GGUFReader(embedded.path())


def test_the_embedded_models_metadata_is_read_as_the_package_reads_it(embedded_model):
    from minillm.checkpoint.gguf_file import _open

    _, reader = embedded_model
    metadata, _ = _open(embedded.path())
    assert list(metadata) == list(reader.fields)
    assert all(metadata[key] == field.contents() for key, field in reader.fields.items())


def test_every_tensor_of_the_embedded_model_equals_the_packages_numbers(embedded_model):
    checkpoint, reader = embedded_model
    config = checkpoint.config
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        layer = tensor.name.split(".")[1]
        hf_name = HF_NAMES[tensor.name.replace(f"blk.{layer}.", "blk.1.")].replace("layers.1.", f"layers.{layer}.")
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            expected = expected[hf_row_order(len(expected) // config.head_dim, config.head_dim)]
        assert np.array_equal(numbers(checkpoint.weights[hf_name]), expected), tensor.name
    assert len(checkpoint.weights) == len(reader.tensors) == 272
    assert config.num_parameters == sum(t.n_elements for t in reader.tensors)
