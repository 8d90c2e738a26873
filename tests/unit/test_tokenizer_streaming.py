"""A text that arrives in pieces gets the ids of the whole text, wherever it was cut; a tokenizer survives JSON."""

import random
import sys
import unicodedata

import pytest
import regex

from minillm.checkpoint import load
from minillm.errors import PromptError
from minillm.tokenizer import StreamingEncoder, Tokenizer
from minillm.tokenizer.as_json import dumps, loads
from minillm.tokenizer.pretokenize import WORD_PATTERNS, AddedToken
from tests.unit.tokenizer_oracles import SPECIAL_TOKENS, corpus, fuzz

WORDS = ["<|end|>", "<|end|>er", "<a b>", "Ende", "Ende.", "\u00e9 a b", "<|ü bung|>"]
MARKS = [". Punkt", ".x"]
KINDS = {
    "plain": (WORDS + MARKS, {}),
    "rstrip": (WORDS + MARKS, {"rstrip": True}),
    "lstrip": (WORDS + MARKS, {"lstrip": True}),
    "single_word": (WORDS, {"single_word": True}),
    "single_word with marks": (WORDS + MARKS, {"single_word": True}),
    "normalized": (WORDS + MARKS, {"normalized": True}),
}


def showing_words(tokenizer):
    """The tokenizer with words in place of their ids: no wrong edge is hidden by a vocabulary that merges little."""
    tokenizer._encode_word = lambda word: [word]
    return tokenizer


def in_pieces(tokenizer, text, rng, **options):
    """(all ids, ids before the end of the text was known) of a text cut at random places."""
    encoder, ids, start = StreamingEncoder(tokenizer, **options), [], 0
    while start < len(text):
        end = start + rng.choice([1, 1, 2, 3, 7, 40, 1000])
        ids += encoder.push(text[start:end])
        start = end
    early = len(ids)
    return ids + encoder.finish(), early


@pytest.fixture(scope="module", params=list(WORD_PATTERNS))
def trained(request):
    """A tokenizer of each pattern with ordinary special tokens, and its JSON twin."""
    return Tokenizer.train(corpus()[-60:], 700, pre=request.param, special_tokens=SPECIAL_TOKENS)


@pytest.mark.parametrize("pre", WORD_PATTERNS)
def test_random_cuts_of_random_texts_give_the_words_of_the_whole(pre):
    trained = Tokenizer.train("", 256 + len(SPECIAL_TOKENS), pre=pre, special_tokens=SPECIAL_TOKENS)
    tokenizer = showing_words(loads(dumps(trained)))
    rng = random.Random()
    ends_with_a_mark_in_nfc = ["\u0958. x" * 3, "a \u095f, b\u0331!" * 3, "\u2126. \u212b, \uf900; " * 3]
    for text in fuzz(1200, SPECIAL_TOKENS) + 10 * ends_with_a_mark_in_nfc:
        words, _ = in_pieces(tokenizer, text, rng)
        assert words == tokenizer.encode(text), repr(text)


def test_random_cuts_of_random_texts_give_the_ids_of_the_whole(trained):
    rng = random.Random()
    for text in fuzz(500, SPECIAL_TOKENS):
        ids, _ = in_pieces(trained, text, rng)
        assert ids == trained.encode(text), repr(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_added_tokens_of_every_kind_are_found_across_pieces(pre, kind):
    contents, flags = KINDS[kind]
    tokens = [*Tokenizer.train("", 256)._tokens, *contents]
    added = [AddedToken(content, 256 + i, **flags) for i, content in enumerate(contents)]
    tokenizer = showing_words(Tokenizer(tokens, [], pre=pre, added_tokens=added, nfc=pre == "qwen2"))
    rng = random.Random()
    seams = ["", " ", "  ", "a", ".", "e\u0301 a b", "_", "n", "1"]
    for _ in range(1500):
        parts = rng.choices([*contents, *seams, *(c[: rng.randrange(len(c))] for c in contents)], k=rng.randrange(8))
        text = "".join(part + rng.choice(seams) for part in parts)
        ids, _ = in_pieces(tokenizer, text, rng)
        assert ids == tokenizer.encode(text), repr(text)


def test_most_of_a_text_is_certain_long_before_its_end():
    tokenizer = load("random:tiny").tokenizer
    for text in ("The cat sat on the mat, and the dog did not. " * 40, "你好,世界。今天天气很好。" * 40, "1,2,3;" * 99):
        ids, early = in_pieces(tokenizer, text, random.Random())
        assert ids == tokenizer.encode(text) and early > 0.9 * len(ids)


def test_a_text_without_a_place_to_cut_waits_for_its_end_and_is_not_searched_again_and_again(monkeypatch):
    tokenizer = load("random:tiny").tokenizer
    encoder, looks = StreamingEncoder(tokenizer), []
    find = encoder._last_place
    monkeypatch.setattr(encoder, "_last_place", lambda text: looks.append(len(text)) or find(text))
    assert not any(encoder.push("x") for _ in range(20_000))
    assert sum(looks) < 3 * 20_000
    assert encoder.finish() == tokenizer.encode("x" * 20_000)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", ["", "a", "one. two"])
def test_the_first_token_stands_once_before_all_pieces(text, special):
    tokens = Tokenizer.train("", 256)._tokens
    tokenizer = Tokenizer([*tokens, "<s>"], [], added_tokens=[AddedToken("<s>", 256)], bos_token_id=256, add_bos=True)
    ids, _ = in_pieces(tokenizer, text, random.Random(), add_special_tokens=special)
    assert ids == tokenizer.encode(text, add_special_tokens=special)


def test_text_that_is_none_is_refused_when_it_arrives():
    encoder = StreamingEncoder(load("random:tiny").tokenizer)
    with pytest.raises(PromptError, match="expected text"):
        encoder.push(b"bytes")
    with pytest.raises(PromptError, match="surrogate"):
        encoder.push("a \ud800")


def test_nothing_in_unicode_joins_across_a_place_to_cut():
    """The argument of the module, for every character: a blank or mark composes with nothing, and stays one."""
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    after = [c for c in characters if regex.match(r"(?V1)[[\s\p{P}]--\p{Pc}]", c)]
    composed = [unicodedata.decomposition(c).split() for c in characters]
    composed = [tuple(chr(int(x, 16)) for x in parts) for parts in composed if parts and not parts[0].startswith("<")]
    seconds, firsts = {pair[1] for pair in composed if len(pair) == 2}, {pair[0] for pair in composed if len(pair) == 2}
    for char in after:
        normal = unicodedata.normalize("NFC", char)
        assert unicodedata.combining(normal[0]) == 0 and normal[0] not in seconds | firsts
        assert not regex.match(r"[\p{L}\p{N}\w]", normal[0])


def test_a_tokenizer_that_went_through_json_encodes_alike(trained):
    twin = loads(dumps(trained))
    for text in fuzz(200, SPECIAL_TOKENS):
        ids = trained.encode(text)
        assert twin.encode(text) == ids
        assert twin.decode(ids, skip_special_tokens=False) == trained.decode(ids, skip_special_tokens=False)
    assert (twin.vocab_size, twin.eos_token_ids, twin.merges) == (
        trained.vocab_size,
        trained.eos_token_ids,
        trained.merges,
    )


def test_the_first_token_and_composition_survive_json():
    tokens = Tokenizer.train("", 256)._tokens
    added = [AddedToken("<s>", 256, rstrip=True)]
    options = dict(added_tokens=added, bos_token_id=256, add_bos=True, pre="qwen2", nfc=True, chat_template="{{ 1 }}")
    tokenizer = Tokenizer([*tokens, "<s>"], [], **options)
    twin = loads(dumps(tokenizer))
    assert twin.encode("<s>  e\u0301") == tokenizer.encode("<s>  e\u0301") != tokenizer.encode("<s>  e\u0301", False)
    assert twin.chat_template == "{{ 1 }}"
