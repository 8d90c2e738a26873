"""A conversation over one cache equals the engine that reads it anew; what exercise 05 says of its bugs is so."""

import re
from dataclasses import replace

import nbformat
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.course.build.addresses import ROOT
from minillm.course.checks.ex05 import TASKS as CHECKED
from minillm.course.engine_so_far.conversation import REFERENCE, Conversation, SequenceCache, conversation, look_back
from minillm.course.grader.feedback import try_here
from minillm.model import Transformer
from tests.grader.answers import TASKS, define, solution_code, starter_code
from tests.unit.engines import make_engine, random_prompts, run

MARGIN = 0.5  # logits between the chosen token and the next best one
NEW = 5
OWN = {task.name: define(solution_code(task), task.name) for task in CHECKED}
EXERCISE = {cell.id: cell for cell in nbformat.read(ROOT / "solutions" / "ex05_kv_cache.ipynb", 4).cells}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m-instruct", dtype="float32", num_kv_blocks=32) as llm:
        yield llm


@pytest.fixture(scope="module", params=[None, 5], ids=["no window", "window"])
def parts(request, tiny):
    """A tiny checkpoint and model, whose layers all have the window."""
    checkpoint, _ = tiny
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, sliding_window=request.param))
    return checkpoint, Transformer(checkpoint.config, checkpoint.weights)


@pytest.mark.parametrize("own", [{}, OWN], ids=["reference", "solution"])
@pytest.mark.parametrize("budget", [1, 3, 100])
def test_each_answer_is_the_engines_to_the_whole_conversation(parts, session_seed, own, budget):
    turns = random_prompts(parts, [7, 4, 1, 16], session_seed)
    talk = Conversation(parts[1], own)
    answers = talk.answers(turns, NEW, stop=-1, budget=budget)
    text = []
    for turn, answer in zip(turns, answers, strict=True):
        text += turn
        assert run(make_engine(parts), [text], GREEDY)[0] == answer
        text += answer
    assert all(talk.parts[name].calls for name in REFERENCE)


def test_it_says_which_parts_are_yours(parts):
    talk = Conversation(parts[1], {"look_back": look_back, "rotate": None, "slot_mapping": len})
    assert talk.describe() == "yours look_back; reference rms_norm, rotate, block, SequenceCache, converse"
    assert Conversation(parts[1], {}).describe().startswith("yours nothing yet; reference rms_norm")


@pytest.mark.parametrize("task", CHECKED, ids=lambda task: task.id)
@pytest.mark.parametrize("answer", [None, 3, {}, "k, v", (1, 2), [[1.0]], [["a"]], torch.zeros(2), [torch.zeros(2)]])
def test_an_answer_of_the_wrong_form_is_a_diagnosis(task, answer, session_seed):
    def wrong(*args, **kwargs):
        return answer

    obj = type("SequenceCache", (), {"__init__": lambda *args: None, "write": wrong}) if "1" in task.id[4:] else wrong
    result = try_here(task, obj, session_seed)
    assert set(result.lost) == set(task.items)
    assert all("judge" not in sentence for sentence in result.lost.values())


class Gullible(SequenceCache):
    """Memory of zeros, and no row is refused for being too far behind."""

    def __init__(self, memory):
        super().__init__(memory.zero_())

    def write(self, k, v, start):
        self.length = max(self.length, start)
        return super().write(k, v, start)


def conversation_of(llm):
    """The two turns of the exercise's last cell, and the stop token."""
    names = {"llm": llm}
    lines = EXERCISE["finale"].source.split("llm = LLM")[1].split("names =")[0].split("\n", 1)[1]
    exec(lines, names)
    return [names["first"], names["second"]], llm.tokenizer.eos_token_ids[0]


def test_the_starter_gives_the_answer_that_the_exercise_quotes_and_a_careful_cache_refuses_it(llm):
    turns, stop = conversation_of(llm)
    starter = define(starter_code(TASKS["ex05.3"]), "converse")
    answers = conversation(llm, {"converse": starter, "SequenceCache": Gullible}).answers(turns, 16, stop)
    quoted = re.search(r"is answered with \*(.*?)\*", EXERCISE["task-3"].source)
    assert llm.tokenizer.decode(answers[0]).strip() == quoted[1]
    with pytest.raises(ValueError, match="gap"):
        conversation(llm, {"converse": starter}).answers(turns, 16, stop)


def test_the_printed_answers_hang_on_no_close_call_and_only_the_new_turn_is_read(llm):
    turns, stop = conversation_of(llm)
    (finale,) = EXERCISE["finale"].outputs
    assert f"is {len(turns[1])} tokens with all" in EXERCISE["finale-text"].source
    params, text = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2), []
    for turn in turns:
        text += turn
        answer = llm.generate(text, params, use_tqdm=False)[0].outputs[0]
        for chosen, choices in zip(answer.token_ids, answer.logprobs, strict=True):
            best, second = sorted((entry.logprob for entry in choices.values()), reverse=True)[:2]
            assert choices[chosen].logprob == best and best - second > MARGIN
        assert repr(answer.text) in finale.text
        text += answer.token_ids
    assert (
        f"{len(turns[1]) + 1} tokens read, {len(text) - len(answer.token_ids)} in all, same answer: True" in finale.text
    )
