"""What lesson 01 says about the tokenizer in its text, checked against the tokenizer."""

import ast
import codecs
from itertools import pairwise

import nbformat
import pytest

from minillm.checkpoint import load
from minillm.course import texts
from minillm.course.build.addresses import ROOT
from minillm.tokenizer.bpe import merge_word, to_alphabet
from minillm.tokenizer.pretokenize import word_pattern

NOTEBOOK = nbformat.read(ROOT / "notebooks" / "01_tokens.ipynb", as_version=4)
CELLS = {cell.id: cell for cell in NOTEBOOK.cells}


@pytest.fixture(scope="module")
def tokenizer():
    return load("smollm2-135m-instruct").tokenizer


def defined_in(cell, name, names=()):
    """The value of one definition of a cell, nothing else of the cell executed."""
    names = dict(names)
    for node in ast.parse(CELLS[cell].source).body:
        found = [node.name] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.Assign):
            found = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if name in found or isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), cell, "exec"), names)
    return names[name]


def output(cell):
    return "".join(o.text for o in CELLS[cell].outputs if o.output_type == "stream")


def test_the_counts_of_the_hand_example_are_those_of_the_text():
    assert "4 + 2 + 1 = 7" in CELLS["hand-text"].source and "rank 0: u + g, 7 times" in output("learn")
    assert "`h ug` is\n5" in CELLS["hand-text"].source and "rank 1: h + ug, 5 times" in output("learn")


def test_the_lessons_join_leaves_no_pair_of_other_words_and_loses_no_byte():
    join = defined_in("learn", "join")
    assert join(list("aaaab"), ("a", "a")) == ["aa", "aa", "b"]
    assert join(list("aaab"), ("a", "a")) == ["aa", "a", "b"]
    assert join(list("abab"), ("b", "a")) == ["a", "ba", "b"]


def test_the_lessons_loop_is_the_engines_tokenizer(tokenizer):
    ranks = {pair: rank for rank, pair in enumerate(tokenizer.merges)}
    names = {"to_alphabet": to_alphabet, "ranks": ranks, "pairwise": pairwise}
    merge_steps = defined_in("encode", "merge_steps", names)
    words = {*word_pattern("smollm").findall(texts.read("pell_rock")), "Straße", " naïve", "aaaaaaa", "日本語"}
    for word in words:
        assert merge_steps(word)[-1][0] == merge_word(list(to_alphabet(word)), ranks)


def test_the_words_fall_apart_as_the_text_says(tokenizer):
    pieces = {
        w: [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(w)] for w in ("lighthouse", " lighthouse")
    }
    assert pieces == {"lighthouse": ["l", "ighthouse"], " lighthouse": [" lighthouse"]}
    assert ("Ġl", "ighthouse") in tokenizer.merges and ("l", "ighthouse") not in tokenizer.merges
    assert f"{len(tokenizer.merges):,} merges" in CELLS["title"].source
    assert len(tokenizer.encode("2048")) == 4, "digit by digit"


def test_hindi_costs_more_than_five_times_as_much_and_greek_less_than_four(tokenizer):
    sentence = defined_in("cost", "sentence")
    tokens = {name: len(tokenizer.encode(text)) for name, text in sentence.items()}
    assert tokens["Hindi"] / tokens["English"] > 5 and tokens["Greek"] / tokens["English"] < 4
    assert sorted(tokens, key=tokens.get) == [
        part.rsplit(" ", 1)[0] for part in output("cost")[12:].strip().split(", ")
    ]


def test_the_wave_is_cut_across_three_tokens(tokenizer):
    text = "Sea \N{WATER WAVE}!"
    pieces = [tokenizer.token_bytes(id) for id in tokenizer.encode(text)]
    assert len([p for p in pieces if not p.isascii()]) == 3
    decoder = codecs.getincrementaldecoder("utf-8")()
    assert ascii([decoder.decode(p) for p in pieces]) in output("stream")


def test_the_story_has_the_words_that_were_counted(tokenizer):
    story = texts.read("pell_rock")
    assert f"{len(story):,} characters" in output("equal") and f"{len(tokenizer.encode(story)):,} tokens" in output(
        "equal"
    )
    assert f"range({len(story.split())})" in CELLS["cold"].source
