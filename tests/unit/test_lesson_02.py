"""What lesson 02 says in text and claims: numbers by hand, habits of heads, and an answer that is no close call."""

import ast
import math

import nbformat
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.attention import naive
from minillm.attention.mask import visible_keys
from minillm.course import heads, probe
from minillm.course.build.addresses import ROOT

MARGIN = 0.5  # logits between the chosen token and the next best one, at every step
NOTEBOOK = nbformat.read(ROOT / "notebooks" / "02_attention.ipynb", as_version=4)
CELLS = {cell.id: cell for cell in NOTEBOOK.cells}


def run(*cells, kinds=(ast.FunctionDef, ast.Assign)):
    """The definitions of some cells, without what they print and draw."""
    names = {"torch": torch, "math": math}
    for cell in cells:
        kept = [node for node in ast.parse(CELLS[cell].source).body if isinstance(node, kinds)]
        exec(compile(ast.Module(kept, []), cell, "exec"), names)
    return names


def output(cell):
    return "".join(o.text for o in CELLS[cell].outputs if o.output_type == "stream")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request):
    with LLM("smollm2-135m-instruct", dtype=request.param) as llm:
        yield llm


def test_the_numbers_by_hand_are_those_of_the_text(capsys):
    names = run("loop")
    out = names["by_loop"]
    assert out[1].tolist() == pytest.approx([2.69, 7.31], abs=0.005)
    assert (math.e / (math.e + math.e**2), math.e) == pytest.approx((0.27, 2.72), abs=0.005)
    assert "cat [1.0, 2.0] -> [0.27, 0.73]" in capsys.readouterr().out
    assert "(2.69, 7.31)" in CELLS["hand-text"].source


def test_the_lessons_attention_is_the_engines():
    names = run("masks", "grouped", kinds=ast.FunctionDef)
    attention, causal_mask = names["attention"], names["causal_mask"]
    for n, keys, window in ((1, 1, None), (3, 8, None), (5, 5, 2), (4, 9, 3), (1, 7, 1)):
        q, k, v = torch.randn(n, 6, 16), torch.randn(keys, 2, 16), torch.randn(keys, 2, 16)
        assert torch.equal(causal_mask(n, keys, window), visible_keys(n, keys, window))
        expected = naive.attention(q.double(), k.double(), v.double(), window)[0]
        assert torch.allclose(attention(q, k, v, causal_mask(n, keys, window)).double(), expected, atol=1e-5)


def test_the_answer_hangs_on_no_close_call(llm):
    question = ast.literal_eval(CELLS["model"].source.split("question = ")[1].split("\n")[0])
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
    answer = llm.chat(question, params, use_tqdm=False)[0].outputs[0]
    for chosen, choices in zip(answer.token_ids, answer.logprobs, strict=True):
        best, second = sorted((entry.logprob for entry in choices.values()), reverse=True)[:2]
        assert choices[chosen].logprob == best
        assert best - second > MARGIN, f"{llm.tokenizer.decode([chosen])!r} wins by {best - second:.2f} only"
    assert answer.finish_reason == "stop"
    assert output("model").splitlines()[0] == answer.text
    assert f"{30 * len(answer.token_ids)} times: 30 layers x {len(answer.token_ids)} tokens" in output("model")


def clock(llm):
    sentence = ast.literal_eval(CELLS["gallery"].source.split("sentence = ")[1].split("\n")[0])
    return probe.attention_maps(llm, sentence)


def test_the_heads_of_the_gallery_are_picked_by_a_clear_lead(llm):
    """The same six in every form of the model, so that pictures and text stay true."""
    tokens, maps = clock(llm)
    picked = heads.pick_heads(tokens, maps)
    assert picked == {
        "sink": (18, 8),
        "previous token": (11, 1),
        "induction": (17, 5),
        "same word": (14, 3),
        "diffuse": (0, 1),
        "random": (22, 4),
    }


def test_the_heads_look_where_the_text_says(llm):
    tokens, maps = clock(llm)
    words = [token.strip() for token in tokens]

    def looks_at(head, row):
        return int(maps[head][row].argmax())

    clocks = [i for i, word in enumerate(words) if word == "clock"]
    assert looks_at((17, 5), clocks[1]) == clocks[0] + 1 == words.index("struck")
    assert looks_at((17, 5), clocks[1] + 1) == words.index("nine")
    assert looks_at((14, 3), clocks[1]) == clocks[0]
    assert looks_at((14, 3), words.index("ten")) == words.index("nine")
    assert all(looks_at((18, 8), row) == 0 for row in range(len(words)))
    assert sum(looks_at((11, 1), row) == row - 1 for row in range(1, len(words))) >= len(words) - 2
    before = range(1, clocks[1] - 1)
    assert all(looks_at((17, 5), row) == 0 for row in before), "it rests on the sink before the first repetition"


def test_his_tea_is_hot_or_cold(llm):
    tokens, maps = probe.attention_maps(llm, "My tea is cold, your tea is hot, and his tea is")
    last = maps[17, 5, -1]
    assert [tokens[i] for i in last.argsort(descending=True)[:2]] == [" hot", " cold"]
    assert "at *hot* and at *cold*" in CELLS["title"].source


def test_the_claims_hold_their_sums():
    for number in (4_194_304, 134_217_728):
        assert f"{number:,}" in output("claim")
    assert 2048**2 == 4_194_304 and 32 * 2048**2 == 134_217_728 and round(2 * 32 * 2048**2 / 1e6) == 268
