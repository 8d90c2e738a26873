"""Tokenizers read from files: what is understood equals the library, what is not is refused by name."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from minillm.errors import CheckpointError
from minillm.tokenizer import Tokenizer
from minillm.tokenizer.bpe import BYTE_TO_CHAR
from minillm.tokenizer.pretokenize import WORD_PATTERNS
from tests.unit.tokenizer_oracles import (
    SPECIAL_TOKENS,
    SPLIT_PATTERNS,
    assert_same,
    corpus,
    fuzz,
    library_tokenizer,
    library_trainer,
    save,
)


def minimal_json(**changes) -> dict:
    """A tokenizer.json of 256 bytes and one special token; changes replace its parts, model__x those of the model."""
    data = {
        "added_tokens": [{"id": 256, "content": "<|end|>", "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {char: id for id, char in enumerate(BYTE_TO_CHAR)}, "merges": []},
    }
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if key:
            data[part][key] = value
        else:
            data[part] = value
    return data


def write_json(folder: Path, data, name: str = "tokenizer") -> Path:
    (folder / f"{name}.json").write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return folder


TEMPLATE_WITH_END = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "<|end|>"}}],
    "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [256]}},
}


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}, "'Unigram' .SentencePiece."),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "'WordPiece'"),
        ({"model": None}, "model type None"),
        ({"model__byte_fallback": True}, "byte_fallback=True .SentencePiece."),
        ({"model__continuing_subword_prefix": "##"}, "continuing_subword_prefix='##'"),
        ({"model__unk_token": "<unk>", "model__vocab": {"a": 0}}, "unk_token='<unk>' for bytes without a token"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "Metaspace"),
        ({"pre_tokenizer": None}, "pre_tokenizer null"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, '"add_prefix_space": true'),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"decoder": {"type": "Metaspace"}}, "decoder 'Metaspace'"),
        ({"decoder": None}, "decoder None"),
        ({"post_processor": TEMPLATE_WITH_END}, "post_processor .* is not supported"),
        ({"post_processor": {"type": "BertProcessing"}}, "BertProcessing"),
    ],
)
def test_a_tokenizer_json_of_another_kind_is_refused_with_what_was_found(changes, found, tmp_path):
    with pytest.raises(CheckpointError, match=found) as error:
        Tokenizer.from_tokenizer_json(write_json(tmp_path, minimal_json(**changes)))
    assert "support" in str(error.value)


@pytest.mark.parametrize(
    "data, message",
    [
        ("{not json", "is not valid JSON"),
        ("[1, 2]", "holds a list, expected an object"),
        (minimal_json(model__vocab=["a"]), "unknown structure"),
        (minimal_json(model__merges=[["a"]]), "merge 'a': a part or the result"),
        (minimal_json(model__merges=["a b"]), "merge 'a b': a part or the result"),
        (minimal_json(added_tokens=[{"id": 97, "content": "<|end|>"}]), "'a' and '<|end|>' have the same id 97"),
        (minimal_json(added_tokens=[{"id": 10**9, "content": "<|end|>"}]), "257 tokens, but ids from 0 to 1000000000"),
        (minimal_json(added_tokens=[{"content": "<|end|>"}]), "unknown structure"),
    ],
)
def test_a_damaged_tokenizer_json_is_refused(data, message, tmp_path):
    with pytest.raises(CheckpointError, match=message.replace("|", r"\|")):
        Tokenizer.from_tokenizer_json(write_json(tmp_path, data))


@pytest.mark.parametrize("behavior, invert", [("isolated", False), ("removed", True)])
def test_both_spellings_of_keeping_the_matches_are_understood(behavior, invert, tmp_path):
    library = library_tokenizer("llama3")
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERNS["llama3"]), behavior=behavior, invert=invert)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    library.train_from_iterator(corpus(), library_trainer(400))
    assert_same(Tokenizer.from_tokenizer_json(save(library, tmp_path)), library, fuzz(50, []))
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    with pytest.raises(CheckpointError, match="pre_tokenizer .* is not supported"):
        Tokenizer.from_tokenizer_json(save(library, tmp_path))


def test_a_folder_without_tokenizer_json_says_what_it_holds(tmp_path):
    with pytest.raises(CheckpointError, match="holds no tokenizer.json .found no other such file"):
        Tokenizer.from_tokenizer_json(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match="found tokenizer.model"):
        Tokenizer.from_tokenizer_json(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer.from_tokenizer_json(tmp_path / "missing")


@pytest.mark.parametrize("spelling", ["<|end|>", {"content": "<|end|>", "lstrip": False}])
@pytest.mark.parametrize(
    "neighbours, extra, expected",
    [
        ({}, (), (256,)),
        ({"generation_config": {"eos_token_id": 5}}, (), (256, 5)),
        ({"generation_config": {"eos_token_id": [7, 256, 5]}}, (), (256, 7, 5)),
        ({"generation_config": {}, "config": {"eos_token_id": 9}}, (11,), (256, 9, 11)),
        ({"generation_config": {"eos_token_id": 5}, "config": {"eos_token_id": 9}}, (5, 11), (256, 5, 11)),
    ],
)
def test_every_end_token_that_any_file_names_ends_an_answer(spelling, neighbours, extra, expected, tmp_path):
    write_json(tmp_path, minimal_json())
    for name, content in {"tokenizer_config": {"eos_token": spelling}, **neighbours}.items():
        write_json(tmp_path, content, name)
    assert Tokenizer.from_tokenizer_json(tmp_path, extra_eos_ids=extra).eos_token_ids == expected


@pytest.mark.parametrize("eos", [257, -1, "end", 1.5])
def test_an_end_token_outside_the_vocabulary_is_refused(eos, tmp_path):
    write_json(tmp_path, minimal_json())
    write_json(tmp_path, {"eos_token_id": eos}, "generation_config")
    with pytest.raises(CheckpointError, match=f"eos token id {eos!r} is outside the vocabulary of 257"):
        Tokenizer.from_tokenizer_json(tmp_path)


def test_an_end_token_that_only_the_config_calls_special_is_one(tmp_path):
    write_json(tmp_path, minimal_json(added_tokens=[], model__vocab={**minimal_json()["model"]["vocab"], "<end>": 256}))
    write_json(tmp_path, {"eos_token": "<end>"}, "tokenizer_config")
    tokenizer = Tokenizer.from_tokenizer_json(tmp_path)
    assert tokenizer.encode("a<end>") == [97, 256]
    assert tokenizer.decode([97, 256]) == "a"
    write_json(tmp_path, {"eos_token": "<stop>"}, "tokenizer_config")
    with pytest.raises(CheckpointError, match="eos_token '<stop>' is not in the vocabulary"):
        Tokenizer.from_tokenizer_json(tmp_path)


def test_an_added_token_without_content_is_never_found(tmp_path):
    write_json(tmp_path, minimal_json(added_tokens=[{"id": 256, "content": ""}]))
    tokenizer = Tokenizer.from_tokenizer_json(tmp_path)
    assert tokenizer.encode("ab") == [97, 98]


@pytest.mark.parametrize("in_template", [False, True])
@pytest.mark.parametrize("in_config", [None, False, True])
def test_the_begin_token_comes_first_when_transformers_puts_it_there(in_template, in_config, tmp_path):
    transformers = pytest.importorskip("transformers")
    library = library_tokenizer("gpt2", models.BPE(vocab={c: i for i, c in enumerate(BYTE_TO_CHAR)}, merges=[]))
    library.add_special_tokens(["<|begin|>"])
    if in_template:
        begin = [("<|begin|>", 256)]
        template = processors.TemplateProcessing(single="<|begin|> $A", pair="$A $B", special_tokens=begin)
        library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>"}
    if in_config is not None:
        config["add_bos_token"] = in_config
    save(library, tmp_path, tokenizer_config=config)
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = Tokenizer.from_tokenizer_json(tmp_path)
    assert ours.bos_token_id == reference.bos_token_id == 256
    for add_special_tokens in (False, True):
        expected = reference.encode("hi", add_special_tokens=add_special_tokens)
        assert ours.encode("hi", add_special_tokens=add_special_tokens) == expected


def test_ids_beyond_the_tokens_decode_to_nothing_and_too_few_rows_are_refused(tmp_path):
    write_json(tmp_path, minimal_json())
    tokenizer = Tokenizer.from_tokenizer_json(tmp_path, vocab_size=300)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([72, 299, 105]) == "Hi"
    with pytest.raises(CheckpointError, match="257 tokens, but the model has only 200 rows"):
        Tokenizer.from_tokenizer_json(tmp_path, vocab_size=200)
    with pytest.raises(CheckpointError, match="257 tokens, but the model has only 128 rows"):
        Tokenizer.bytes_only(128)


GGUF_NAMES = {"gpt2": "gpt-2", "smollm": "smollm", "llama3": "llama-bpe", "qwen2": "qwen2"}


def as_gguf(library: tokenizers.Tokenizer, pre: str, **changes) -> dict:
    """The library's tokenizer as GGUF metadata; changes replace entries, None removes one."""
    merges = json.loads(library.to_str())["model"]["merges"]
    tokens = [library.id_to_token(id) for id in range(library.get_vocab_size())]
    fields = {
        "model": "gpt2",
        "pre": GGUF_NAMES[pre],
        "tokens": tokens,
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in {**fields, **changes}.items() if value is not None}


@pytest.mark.parametrize("pre", list(WORD_PATTERNS))
def test_gguf_metadata_gives_the_tokenizer_of_its_tokenizer_json(pre):
    library = library_tokenizer(pre, models.BPE(ignore_merges=pre == "llama3"))
    library.train_from_iterator(corpus(), library_trainer(600, SPECIAL_TOKENS))
    ours = Tokenizer.from_gguf(as_gguf(library, pre), extra_eos_ids=[0])
    assert ours.eos_token_ids == (1, 0)
    assert_same(ours, library, fuzz(100, SPECIAL_TOKENS))


def test_gguf_begin_token_is_added_by_llama3_and_on_demand():
    library = library_tokenizer("gpt2")
    library.train_from_iterator(["a ab"], library_trainer(300, SPECIAL_TOKENS))
    for pre, add_bos, expected in (
        ("llama3", None, True),
        ("llama3", False, False),
        ("gpt2", None, False),
        ("gpt2", True, True),
    ):
        fields = as_gguf(library, pre, bos_token_id=0, add_bos_token=add_bos)
        assert (Tokenizer.from_gguf(fields).encode("a")[0] == 0) == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'.*supported: byte-level BPE"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'.*supported: byte-level BPE"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": []}, "tokenizer.ggml.merges is missing"),
        ({"token_type": [1]}, "token_type has 1 entries for"),
        ({"eos_token_id": 10**6}, "eos token id 1000000 is outside"),
        ({"add_bos_token": True}, "names none"),
        ({"add_eos_token": True}, "add_eos_token"),
        ({"merges": ["a zz"]}, "merge 'a zz'"),
        ({"merges": ["ab"]}, "merge 'ab'"),
    ],
)
def test_gguf_metadata_of_another_kind_or_damaged_is_refused(changes, message):
    library = library_tokenizer("gpt2")
    library.train_from_iterator(["ab ab"], library_trainer(300, SPECIAL_TOKENS))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf({**as_gguf(library, "gpt2"), **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}})


def test_user_defined_gguf_tokens_are_found_in_text_and_stay_visible():
    library = library_tokenizer("gpt2")
    library.train_from_iterator(["a ab"], library_trainer(300, SPECIAL_TOKENS))
    fields = as_gguf(library, "gpt2")
    fields["tokenizer.ggml.token_type"][:3] = [4, 3, 5]  # user defined, control, unused
    tokenizer = Tokenizer.from_gguf(fields)
    assert tokenizer.encode("<|begin|><|end|>") == [0, 1]
    assert tokenizer.decode([0, 1, 2]) == "<|begin|>"
