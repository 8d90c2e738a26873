"""Hugging Face folders: four families saved by transformers, and everything that must be refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from minillm.checkpoint import load
from minillm.errors import CheckpointError
from minillm.model_config import RopeScaling
from tests.unit.model_files import END_ID, LAYERS, VOCAB, save_folder, save_tokenizer

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One folder per family, in a path with a space, to be copied and damaged."""
    root = tmp_path_factory.mktemp("saved models")
    for family in FAMILIES:
        save_folder(root / family, family)
    return root


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved / "llama", tmp_path / "a model"))


def edit(file: Path, drop: tuple[str, ...] = (), **changes) -> None:
    values = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if k not in drop}), encoding="utf-8")


def retype(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_config_are_those_of_transformers(tmp_path, family, tied):
    model = save_folder(tmp_path / "m", family, tied)
    checkpoint = load(str(tmp_path / "m"))
    c, theirs = checkpoint.config, model.config
    assert (c.architecture, c.tie_word_embeddings, c.rms_norm_eps) == (family, tied, theirs.rms_norm_eps)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(c, name) == getattr(theirs, name)
    assert (c.num_key_value_heads, c.head_dim) == (theirs.num_key_value_heads, theirs.head_dim or 16)
    assert c.rope_theta == theirs.rope_parameters["rope_theta"]
    assert c.num_parameters == model.num_parameters()

    state = model.state_dict()
    if tied:
        del state["lm_head.weight"]
    assert set(checkpoint.weights) == set(state)
    assert all(torch.equal(checkpoint.weights[name], state[name]) for name in state)
    assert checkpoint.name == "m"
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("héllo here")) == "héllo here"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_keep_the_dtype_of_the_file(folder, dtype):
    retype(folder, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    assert all(weight.dtype == dtype for weight in load(folder).weights.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_left_out_of_config_json_mean_what_transformers_says(saved, tmp_path, family):
    sizes = dict(vocab_size=VOCAB, hidden_size=1024, intermediate_size=32, num_hidden_layers=1, num_attention_heads=64)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **sizes}), encoding="utf-8")
    theirs = AutoConfig.from_pretrained(tmp_path)

    from minillm.checkpoint.hf_config import model_config, read_json

    ours = model_config(read_json(tmp_path / "config.json"), tmp_path)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert (ours.rms_norm_eps, ours.max_position_embeddings) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


# ---- rotary embedding and windows ---------------------------------------------------------------


def test_both_spellings_of_rope_are_read(folder):
    edit(folder / "config.json", drop=("rope_parameters",), rope_theta=7e4, rope_scaling=None)
    assert (load(folder).config.rope_theta, load(folder).config.rope_scaling) == (7e4, None)
    edit(folder / "config.json", rope_scaling={"type": "llama3", **LLAMA3})
    assert load(folder).config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    new = {"rope_type": "llama3", "rope_theta": 9e4, **LLAMA3}
    edit(folder / "config.json", drop=("rope_theta", "rope_scaling"), rope_parameters=new)
    assert (load(folder).config.rope_theta, load(folder).config.rope_scaling.factor) == (9e4, 8.0)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "proportional", "mrope"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_other_rope_kinds_are_refused_by_name(folder, kind, spelling):
    edit(folder / "config.json", drop=("rope_parameters",))
    edit(folder / "config.json", **{spelling: {"rope_type": kind, "factor": 2.0}})
    with pytest.raises(CheckpointError, match=f"rope_type='{kind}' is not supported"):
        load(folder)


@pytest.mark.parametrize(
    "rope, message",
    [
        ({"rope_type": "llama3", "factor": 8.0}, "needs 'low_freq_factor'"),
        ({"rope_type": "llama3", **LLAMA3, "factor": "eight"}, "are not usable numbers"),
        ({"rope_theta": None}, "are not usable numbers"),
        ({"rope_theta": -1.0}, "are not usable numbers"),
        (7, "RoPE parameters 7 are not an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"full_attention": {"rope_type": "default"}}, "differ by layer"),
    ],
)
def test_incomplete_or_foreign_rope_parameters_are_refused(folder, rope, message):
    edit(folder / "config.json", rope_parameters=rope)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("window", [None, 24])
def test_mistrals_window_holds_in_every_layer(tmp_path, window):
    save_folder(tmp_path / "m", "mistral", sliding_window=window)
    config = load(tmp_path / "m").config
    assert [config.layer_window(i) for i in range(LAYERS)] == [window] * LAYERS


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "fields",
    [
        dict(use_sliding_window=False, sliding_window=24, max_window_layers=0),
        dict(use_sliding_window=True, sliding_window=24, max_window_layers=0),
        dict(use_sliding_window=True, sliding_window=24, max_window_layers=1),
        dict(use_sliding_window=True, sliding_window=24, max_window_layers=5),
        dict(use_sliding_window=True, sliding_window=24, layer_types=["sliding_attention", "full_attention"]),
    ],
)
def test_qwens_window_holds_in_the_layers_that_transformers_chooses(tmp_path, family, fields):
    theirs = save_folder(tmp_path / "m", family, **fields).config
    expected = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    for drop in ((), ("layer_types",))[: 1 if "layer_types" in fields else 2]:  # transformers 4 did not write the list
        edit(tmp_path / "m" / "config.json", drop=drop)
        config = load(tmp_path / "m").config
        assert [config.layer_window(i) for i in range(LAYERS)] == expected


# ---- refusals by field ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "phi3"}, "model_type 'phi3' is not one of llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported for llama"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised, .*gptq"),
        ({"quantization_config": "awq"}, "quantised"),
        ({"hidden_size": None}, "hidden_size=None is missing"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more than 1000"),
        ({"num_hidden_layers": 100}, "100 layers, but only"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 12}, "head_dim=12"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"hidden_size": 128}, r"'model.embed_tokens.weight' has shape \[320, 64\].*asks for \[320, 128\]"),
        ({"num_hidden_layers": 1}, "'model.layers.1.*' of shape .* has no place in the model"),
        ({"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight' of shape .*missing, and 8 more"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused_by_name(folder, change, message):
    edit(folder / "config.json", **change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_config_field_is_refused_or_harmless(saved, tmp_path, data):
    family = data.draw(st.sampled_from(FAMILIES), label="family")
    folder = tmp_path / family
    shutil.copytree(saved / family, folder, dirs_exist_ok=True)
    file = folder / data.draw(st.sampled_from(["config.json", "generation_config.json"]), label="file")
    known = sorted(json.loads(file.read_text(encoding="utf-8")))
    key = data.draw(st.sampled_from([*known, "rope_scaling", "quantization_config", "top_k", "do_sample"]), label="key")
    edit(file, **{"use_sliding_window": True, key: data.draw(JSON, label="value")})
    try:
        weights = load(folder).weights
    except CheckpointError:
        return
    assert all(weights[name].shape for name in weights)


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", "\ufeff{}"])
def test_a_config_that_is_no_json_object_is_refused(folder, text):
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="config.json"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_without_config_or_tokenizer_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load(folder)


# ---- generation defaults and the end of a sequence -----------------------------------------------


def test_sampling_defaults_come_from_generation_config(folder):
    fields = dict(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.1)
    edit(folder / "generation_config.json", do_sample=True, **fields)
    assert load(folder).generation == fields
    edit(folder / "generation_config.json", do_sample=False)
    assert load(folder).generation == {"temperature": 0.0, "repetition_penalty": 1.1}
    edit(folder / "generation_config.json", drop=tuple(fields), do_sample=True)
    assert load(folder).generation == {}
    (folder / "generation_config.json").unlink()
    assert load(folder).generation == {}


@pytest.mark.parametrize("field, value", [("top_p", 1.5), ("temperature", "hot"), ("eos_token_id", ["</s>"])])
def test_an_impossible_generation_default_is_refused(folder, field, value):
    edit(folder / "generation_config.json", **{field: value})
    with pytest.raises(CheckpointError, match=f"generation_config.json: {field}="):
        load(folder)


@pytest.mark.parametrize(
    "config, generation, tokenizer, expected",
    [
        (5, [6, 7], None, {5, 6, 7}),  # vllm#4180: the list of generation_config alone is not the whole set
        ([5, 6], 7, None, {5, 6, 7}),
        (None, None, "<|end|>", {END_ID}),  # exllamav2#803: only the tokenizer knows
        (5, [6], "<|end|>", {5, 6, END_ID}),
    ],
)
def test_the_end_of_a_sequence_is_any_id_that_any_file_names(folder, config, generation, tokenizer, expected):
    edit(folder / "config.json", eos_token_id=config)
    edit(folder / "generation_config.json", eos_token_id=generation)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}), encoding="utf-8")
    assert set(load(folder).tokenizer.eos_token_ids) == expected


# ---- safetensors -----------------------------------------------------------------------------------


def test_a_sharded_model_equals_the_same_model_in_one_file(tmp_path):
    model = save_folder(tmp_path / "m", shard="30KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 3
    weights = load(tmp_path / "m").weights
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_a_tied_head_may_stand_in_the_file_or_not(folder):
    edit(folder / "config.json", tie_word_embeddings=True)
    assert "lm_head.weight" not in load(folder).weights  # vllm#5621: written, but repeats the embedding
    retype(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" not in load(folder).weights
    edit(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="'lm_head.weight'.*is missing"):
        load(folder)


def test_the_rope_tables_of_old_files_are_left_out(folder):
    retype(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert not [name for name in load(folder).weights if "rotary" in name]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.norm.weight"), r"'model.norm.weight' of shape \[64\] is missing"),
        (lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(64)}), "o_proj.bias.*no place"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), r"has shape \[32\].*asks for \[64\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "stored as I8; supported: F32"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}), "stored as F8_E4M3"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(folder, change, message):
    retype(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_safetensors_cut_or_damaged_anywhere_are_refused_or_harmless(saved, folder, data):
    content = (saved / "llama" / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans(), label="cut"):
        cut = data.draw(st.integers(0, header) | st.integers(header, len(content) - 1))
        (folder / "model.safetensors").write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match="model.safetensors"):
            load(folder)
        return
    damaged = bytearray(content)
    at = data.draw(st.integers(0, header - 1))
    damaged[at] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(damaged)
    try:
        weights = load(folder).weights
    except CheckpointError:
        return
    assert all(weights[name].shape for name in weights)


def test_pickled_weights_are_refused_with_the_reason(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickle only \(pytorch_model.bin\), which can run code"):
        load(folder)


def test_a_folder_without_weights_says_what_it_holds_instead(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no .safetensors file"):
        load(folder)
    (folder / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="give its path, .*x.gguf"):
        load(folder)


def test_a_single_file_of_another_name_is_found_and_two_are_ambiguous(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert len(load(folder).weights) > 0
    shutil.copy(folder / "other.safetensors", folder / "second.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files, but no model.safetensors.index.json"):
        load(folder)


@pytest.mark.parametrize(
    "shard, message",
    [
        ("../elsewhere.safetensors", "names '../elsewhere.safetensors'; a shard is"),
        ("weights.bin", "names 'weights.bin'; a shard is"),
        ("gone.safetensors", "'gone.safetensors', which is missing"),
        ("model.safetensors", "does not hold tensor 'x', which the index places there"),
    ],
)
def test_an_index_that_points_nowhere_is_refused(folder, shard, message):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_the_vocabulary_may_be_padded(folder):
    save_tokenizer(folder)  # 258 tokens for 320 rows
    tokenizer = load(folder).tokenizer
    assert tokenizer.vocab_size == VOCAB and tokenizer.decode([VOCAB - 1]) == ""
