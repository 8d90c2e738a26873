"""Lesson 00 promises exact prompt lengths and compares generated text: both hold in every form of the model."""

import ast

import nbformat
import pytest

from minillm import LLM, SamplingParams
from minillm.checkpoint import load
from minillm.costs import quadratic_crossover
from minillm.course import probe, texts
from minillm.course.build.addresses import ROOT

MARGIN = 0.5  # logits between the chosen token and the next best one, at every step
NOTEBOOK = nbformat.read(ROOT / "notebooks" / "00_the_wait.ipynb", as_version=4)
CELLS = {cell.id: cell for cell in NOTEBOOK.cells}
WANTED = {"says", "rules", "chat", "story", "question"}


def from_the_notebook():
    """The conversations that the lesson's own cells build, nothing else of them executed."""
    names = {"texts": texts}
    for cell in NOTEBOOK.cells:
        if cell.cell_type != "code":
            continue
        for node in ast.parse(cell.source).body:
            targets = [node.name] if isinstance(node, ast.FunctionDef) else []
            if isinstance(node, ast.Assign):
                targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if WANTED & set(targets):
                exec(compile(ast.Module([node], []), cell.id, "exec"), names)
    rules, chat, story = names["rules"], names["chat"], names["story"]
    return {
        "one-lane": ([rules, *chat], 64),
        "two-lanes": ([rules, *story, *chat], 1024),
        "other-question": ([rules, *story, *chat[:2], names["question"]], 1021),
    }


CONVERSATIONS = from_the_notebook()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request):
    with LLM("smollm2-135m-instruct", dtype=request.param) as llm:
        yield llm


@pytest.mark.parametrize("cell", CONVERSATIONS)
def test_the_prompts_are_as_long_as_the_lesson_says(cell):
    tokenizer = load("smollm2-135m-instruct").tokenizer
    conversation, length = CONVERSATIONS[cell]
    ids = tokenizer.encode(tokenizer.apply_chat_template(conversation), add_special_tokens=False)
    assert len(ids) == length
    assert f"[{length:,} prompt tokens, " in CELLS[cell].outputs[0].text


@pytest.mark.parametrize("cell", CONVERSATIONS)
def test_no_answer_hangs_on_a_close_call(llm, cell):
    """A compared answer: the next best token is far behind, in float32 and in bfloat16 with 4-bit codes."""
    conversation, _ = CONVERSATIONS[cell]
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
    answer = llm.chat(conversation, params, use_tqdm=False)[0].outputs[0]
    for chosen, choices in zip(answer.token_ids, answer.logprobs, strict=True):
        best, second = sorted((entry.logprob for entry in choices.values()), reverse=True)[:2]
        assert choices[chosen].logprob == best
        assert best - second > MARGIN, f"{llm.tokenizer.decode([chosen])!r} wins by {best - second:.2f} only"
    assert answer.finish_reason == "stop"
    assert CELLS[cell].outputs[0].text.splitlines()[0] == answer.text


def test_the_pronouns_look_where_the_lesson_says(llm):
    names = {}
    exec(compile(ast.Module(ast.parse(CELLS["map"].source).body[1:2], []), "map", "exec"), names)
    tokens, maps = probe.attention_maps(
        llm, "The cat sat on the mat because it was tired, and the dog sat on the rug because it was old."
    )
    pronouns = [i for i, token in enumerate(tokens) if token == " it"]
    looked_at = [tokens[int(maps[names["LAYER"], names["HEAD"], i].argmax())] for i in pronouns]
    assert looked_at == [" cat", " dog"]


SUBJECTS = {  # the grammatical subject; in the last two the pronoun means the other noun
    "The boat left the harbour because it was late.": "boat",
    "The teacher opened the window because she was warm.": "teacher",
    "The horse jumped over the fence because it was scared.": "horse",
    "The train passed the station because it was full.": "train",
    "The boy dropped the glass because he was tired.": "boy",
    "The bird landed on the roof because it was hungry.": "bird",
    "The old man read the letter because he was curious.": "man",
    "The ship reached the island because it was fast.": "ship",
    "My sister closed the door because she was cold.": "sister",
    "The dog chased the ball until it was tired.": "dog",
    "The dog chased the ball because it was round.": "dog",
    "The woman bought the lamp because it was cheap.": "woman",
}


def test_the_head_looks_at_the_subject_as_often_as_the_lesson_says(llm):
    """Sentences that were written after the head had been picked, so that the count is not the picking."""
    found = {}
    for sentence in SUBJECTS:
        tokens, maps = probe.attention_maps(llm, sentence)
        names = [token.strip() for token in tokens]
        pronoun = next(i for i, name in enumerate(names) if name in ("it", "he", "she"))
        found[sentence] = names[int(maps[13, 8, pronoun].argmax())]
    assert sum(found[sentence] == subject for sentence, subject in SUBJECTS.items()) == 10
    assert len(SUBJECTS) == 12 and "twelve other sentences it looked at the subject in ten" in CELLS["map-more"].source
    wrong = "The dog chased the ball because it was round."
    assert wrong in CELLS["map-box"].source and found[wrong] == "dog"


def test_pairs_overtake_where_the_lesson_says():
    assert quadratic_crossover(load("smollm2-135m-instruct").config) == 6144
    assert "3,538,944 weights per layer / 576 = 6,144 tokens" in CELLS["growth"].outputs[0].text


def test_the_learner_meets_the_street_before_any_other_picture_is_made():
    drawing = [cell.id for cell in NOTEBOOK.cells if "figures.show(" in cell.source]
    assert drawing[0] == "street"
    assert 'figures.street("llm")' in CELLS["street"].source
