"""Streaming text against the plain text, cut by hand at the first stop string that is complete."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.detokenizer import Detokenizer
from minillm.sampling_params import SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.tokenizer.bpe import BYTE_TO_CHAR


def stream(pieces, stop=(), flush=True, **options):
    """Push one token per piece of bytes; the pieces that came out, and the detokenizer."""
    tokenizer = Tokenizer(["".join(BYTE_TO_CHAR[byte] for byte in piece) for piece in pieces], [])
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stop, max_tokens=10_000, **options))
    shown = [detokenizer.push(token) for token in range(len(pieces))]
    if flush:
        shown.append(detokenizer.flush())
    assert "".join(shown) == detokenizer.text
    return shown, detokenizer


def split(data, cuts):
    """`data` cut at these places; equal cuts give empty tokens."""
    cuts = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]


def first_complete(text, stops, searched_from=0):
    """(start, end, stop) of the stop string that ends first; the longest of those that end together; or None."""
    for end in range(searched_from + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), end, stop
    return None


def longest_beginning(text, stops):
    """How many characters at the end of `text` begin one of the stop strings."""
    return max((n for stop in stops for n in range(len(stop)) if n and text.endswith(stop[:n])), default=0)


ALPHABET = "abé\U0001f642"  # few, so that stop strings do occur and overlap; characters of 1, 2 and 4 bytes
texts = st.text(alphabet=ALPHABET, max_size=30)
stop_strings = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=5), max_size=4)
cut_places = st.lists(st.integers(0, 60), max_size=30)


# ---- the properties -------------------------------------------------------------------------------


@settings(deadline=None)
@given(text=texts, cuts=cut_places, stops=stop_strings, include=st.booleans())
def test_any_split_gives_the_text_up_to_the_first_complete_stop_string(text, cuts, stops, include):
    _, detokenizer = stream(split(text.encode(), cuts), stops, include_stop_str_in_output=include)
    match = first_complete(text, stops)
    if match is None:
        assert (detokenizer.text, detokenizer.stop_string) == (text, None)
    else:
        start, end, stop = match
        assert (detokenizer.text, detokenizer.stop_string) == (text[: end if include else start], stop)


@settings(deadline=None)
@given(text=texts, cuts=cut_places, stops=stop_strings)
def test_without_nested_stop_strings_the_text_is_cut_at_the_first_occurrence_of_any(text, cuts, stops):
    stops = [stop for stop in stops if not any(stop in other for other in stops if other != stop)]
    _, detokenizer = stream(split(text.encode(), cuts), stops)
    cut = min([text.find(stop) for stop in stops if stop in text], default=len(text))
    assert detokenizer.text == text[:cut]


@settings(deadline=None)
@given(text=texts, cuts=cut_places, stops=stop_strings)
def test_every_push_shows_all_that_is_safe_and_nothing_more(text, cuts, stops):
    pieces = split(text.encode(), cuts)
    shown, _ = stream(pieces, stops, flush=False)
    for num in range(1, len(pieces) + 1):
        known = b"".join(pieces[:num]).decode(errors="ignore")  # without the unfinished character at its end
        match = first_complete(known, stops)
        safe = known[: match[0]] if match else known[: len(known) - longest_beginning(known, stops)]
        assert "".join(shown[:num]) == safe


@settings(deadline=None)
@given(text=texts, cuts=cut_places, stops=stop_strings, min_tokens=st.integers(0, 12))
def test_stop_strings_that_are_complete_within_min_tokens_do_not_count(text, cuts, stops, min_tokens):
    pieces = split(text.encode(), cuts)
    early = b"".join(pieces[:min_tokens]).decode(errors="ignore")
    match = first_complete(text, stops, searched_from=len(early))
    _, detokenizer = stream(pieces, stops, min_tokens=min_tokens)
    assert detokenizer.text == (text if match is None else text[: match[0]])
    assert detokenizer.stop_string == (None if match is None else match[2])


@settings(deadline=None)
@given(data=st.binary(max_size=40), cuts=cut_places, stops=st.lists(st.sampled_from(["a", "\ufffd", "\ufffda"])))
def test_bytes_that_are_no_text_stream_like_their_plain_decoding(data, cuts, stops):
    text = data.decode(errors="replace")
    _, detokenizer = stream(split(data, cuts), stops)
    match = first_complete(text, stops)
    assert detokenizer.text == (text if match is None else text[: match[0]])


# ---- the same by example --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces, stops, text, stop",
    [
        (["Hello", " wor", "ld"], ["o w"], "Hell", "o w"),  # across two tokens
        (["one two three"], ["two"], "one ", "two"),  # inside a token
        (["x", "END", "y", "END"], ["END"], "x", "END"),  # repeated: the first counts
        (["E", "E", "N", "D"], ["END"], "E", "END"),  # the beginning comes twice
        (["a", "b", "c", "d"], ["bcd", "abc"], "", "abc"),  # overlapping: the earlier one
        (["abc"], ["bc", "abc"], "", "abc"),  # complete together: the longer one
        (["ab", "cd"], ["abcd", "bc"], "a", "bc"),  # nested: the one that is complete first ends the text
        (["\n", "\n"], ["\n\n", "\n"], "", "\n"),
        (["stop"], ["stop"], "", "stop"),  # nothing before it
        (["a", "", "b"], ["ab"], "", "ab"),  # a token without text between
        (["smile \U0001f642!"], ["\U0001f642"], "smile ", "\U0001f642"),
    ],
)
def test_where_the_text_ends(pieces, stops, text, stop):
    shown, detokenizer = stream([piece.encode() for piece in pieces], stops)
    assert (detokenizer.text, detokenizer.stop_string) == (text, stop)
    assert shown[-1] == ""  # nothing is left for the flush


def test_a_beginning_that_does_not_go_on_is_shown_late_but_whole():
    shown, detokenizer = stream([b"a", b"E", b"N", b"x", b"E"], ["END"])
    assert shown == ["a", "", "", "ENx", "", "E"]
    assert detokenizer.stop_string is None


def test_the_last_character_is_not_cut_when_no_stop_string_comes():
    _, detokenizer = stream([b"The answer is 4", b"2."], ["\n", "2.5"])
    assert detokenizer.text == "The answer is 42."


def test_a_character_waits_for_all_its_bytes_and_an_unfinished_one_ends_as_a_replacement():
    face = "\U0001f642".encode()
    assert stream([face[:1], face[1:3], face[3:] + b"!"])[0] == ["", "", "\U0001f642!", ""]
    assert stream([b"ok", face[:2]])[0] == ["ok", "", "\ufffd"]


def test_what_was_flushed_does_not_come_again():
    shown, detokenizer = stream([b"x", b"E", b"N"], ["END"])
    assert shown == ["x", "", "", "EN"]
    assert detokenizer.flush() == ""
    assert detokenizer.text == "xEN"


def test_nothing_comes_after_a_stop_string():
    shown, detokenizer = stream([b"a.", b"b", b"\xf0", b"."], ["."])
    assert shown == ["a", "", "", "", ""]
    assert (detokenizer.text, detokenizer.stop_string) == ("a", ".")


def test_the_stop_string_is_shown_when_asked_for():
    shown, detokenizer = stream([b"x=1", b"; ", b"y"], ["; y", ";"], include_stop_str_in_output=True)
    assert shown == ["x=1", ";", "", ""]
    assert detokenizer.stop_string == ";"


def test_a_stop_string_begun_within_min_tokens_counts_when_it_is_complete_after_them():
    assert stream([b"a", b"\n", b"\n"], ["\n\n"], min_tokens=2)[1].text == "a"
    assert stream([b"a", b"\n\n", b"b"], ["\n\n"], min_tokens=2)[1].text == "a\n\nb"


def test_special_tokens_are_hidden_and_can_be_stop_strings_when_shown():
    tokenizer = Tokenizer.bytes_only()
    ids = [*b"hi", 256, *b"!"]
    texts_shown = {}
    for skip in (True, False):
        for stop in ((), "<|end|>"):
            detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip, stop=stop))
            shown = [detokenizer.push(id) for id in ids] + [detokenizer.flush()]
            texts_shown[skip, stop] = "".join(shown)
    assert texts_shown == {
        (True, ()): "hi!",
        (True, "<|end|>"): "hi!",
        (False, ()): "hi<|end|>!",
        (False, "<|end|>"): "hi",
    }


def test_streaming_equals_decoding_with_a_trained_vocabulary():
    text = "Les élèves \U0001f469\u200d\U0001f680 écrivent: 東京 は 大きい。 naïve café — done.\n" * 3
    tokenizer = Tokenizer.train([text], vocab_size=330)
    ids = tokenizer.encode(text)
    for stop in ((), ("東京 は",), ("done", "é —"), ("\u200d",)):
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stop))
        shown = [detokenizer.push(id) for id in ids] + [detokenizer.flush()]
        cut = min([text.find(s) for s in stop if s in text], default=len(text))
        assert "".join(shown) == detokenizer.text == text[:cut]
        assert not any("\ufffd" in piece for piece in shown)


def test_two_sequences_do_not_share_their_text():
    tokenizer = Tokenizer.bytes_only()
    one, two = (Detokenizer(tokenizer, SamplingParams(stop="ab")) for _ in range(2))
    assert [one.push(97), two.push(98), one.push(98), two.push(99)] == ["", "b", "", "c"]
    assert (one.stop_string, two.stop_string) == ("ab", None)
