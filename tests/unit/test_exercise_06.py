"""Questions that share the pages of one text are answered as by the engine; what exercise 06 says of that is so."""

import nbformat
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.course import plug
from minillm.course.build.addresses import ROOT
from minillm.course.checks.ex06 import TASKS as CHECKED
from minillm.course.engine_so_far import boot
from minillm.course.engine_so_far.branches import REFERENCE, Branches, SharedPages, slot_runs
from minillm.course.grader.feedback import try_here
from tests.grader.answers import TASKS, define, solution_code, starter_code
from tests.unit.engines import make_engine, random_prompts, run

MARGIN = 0.5  # logits between the chosen token and the next best one
NEW = 5
OWN = {task.name: define(solution_code(task), task.name) for task in CHECKED}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
LESSONS_OWN = """
def slot_runs(table, start, n, block_size):
    positions = torch.arange(start, start + n)
    return torch.tensor(table)[positions // block_size] * block_size + positions % block_size
"""


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m-instruct", dtype="float32", num_kv_blocks=32) as llm:
        yield llm


@pytest.mark.parametrize("own", [{}, OWN], ids=["reference", "solution"])
@pytest.mark.parametrize("length", [3, 4, 9])
def test_each_answer_is_the_engines_and_all_pages_come_back(tiny, session_seed, own, length):
    text, *questions = random_prompts(tiny, [length, 1, 6, 3], session_seed)
    tree = Branches(tiny[1], own, num_blocks=20, block_size=4)
    told = tree.answers(text, questions, NEW, stop=-1)
    for question, answer in zip(questions, told.answers, strict=True):
        assert run(make_engine(tiny), [text + question], GREEDY)[0] == answer
    shared = length // 4
    rows = [length + len(question) + NEW - 1 for question in questions]  # nothing follows the last token
    assert told.num_blocks == shared + sum(-(-n // 4) - shared for n in rows)
    assert told.num_copies == (2 if length % 4 else 0), "the last of three writes in place"
    assert tree.answers(text, questions, NEW, stop=-1) == told, "the second time the pool is as it was"
    assert all(tree.parts[name].calls for name in REFERENCE)


def test_a_pool_that_is_too_small_says_so(tiny, session_seed):
    text, question = random_prompts(tiny, [9, 4], session_seed)
    with pytest.raises(ValueError, match=r"1 blocks are needed and 0 are free"):
        Branches(tiny[1], {}, num_blocks=4, block_size=4).answers(text, [question], NEW, stop=-1)


def test_books_that_no_call_of_the_branches_reaches():
    pages = SharedPages(4, 2)
    table = []
    pages.grow(table, 0, 3)
    pages.free(table)
    with pytest.raises(ValueError, match="free already"):
        pages.free(table)
    with pytest.raises(ValueError, match="reaches 4 rows"):
        slot_runs([3, 1], 2, 3, 2)


def test_it_says_which_parts_are_yours(tiny):
    tree = Branches(tiny[1], {"slot_runs": slot_runs, "rotate": None, "slot_mapping": len})
    assert tree.describe() == "yours slot_runs; reference rms_norm, rotate, block, SharedPages, decode_pages"
    assert Branches(tiny[1], {}).describe().startswith("yours nothing yet; reference rms_norm")


def test_the_engine_so_far_writes_by_your_runs(llm):
    ids = llm.tokenizer.encode("Name the capital of France.", add_special_tokens=False) * 4
    so_far = boot(llm, "v3", own={"slot_runs": OWN["slot_runs"]})
    assert so_far.generate(ids, 3) == boot(llm, "v3", own={}).generate(ids, 3)
    assert so_far.parts["slot_mapping"].calls and so_far.stamp == "yours"
    table, positions = torch.tensor([5, 6, 2]), torch.arange(3, 11)
    assert plug.slots_of_runs(slot_runs)(table, positions, 4).tolist() == [23, 24, 25, 26, 27, 8, 9, 10]


@pytest.mark.parametrize("task", CHECKED, ids=lambda task: task.id)
@pytest.mark.parametrize("answer", [None, 3, {}, "k, v", (1, 2), [[1.0]], [["a", 2]], torch.zeros(2), [torch.zeros(2)]])
def test_an_answer_of_the_wrong_form_is_a_diagnosis(task, answer, session_seed):
    def wrong(*args, **kwargs):
        return answer

    methods = dict.fromkeys(("grow", "fork", "free"), wrong) | {"__init__": lambda *args: None, "num_free": answer}
    result = try_here(task, type("SharedPages", (), methods) if task.id == "ex06.1" else wrong, session_seed)
    assert set(result.lost) == set(task.items)
    assert all("judge" not in sentence for sentence in result.lost.values())


def test_what_the_lesson_writes_earns_nothing_and_three_bugs_lose_every_item(session_seed):
    task = TASKS["ex06.3"]
    for code in (f"import torch\n{LESSONS_OWN}", starter_code(task)):
        assert set(try_here(task, define(code, "slot_runs"), session_seed).lost) == set(task.items)


def test_the_printed_answers_hang_on_no_close_call(llm):
    (finale,) = (
        cell for cell in nbformat.read(ROOT / "solutions" / "ex06_pages.ipynb", 4).cells if cell.id == "finale"
    )
    names = {"llm": llm}
    exec(finale.source.split("llm = LLM")[1].split("names =")[0].split("\n", 1)[1], names)
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2)
    for end in names["ends"]:
        answer = llm.generate(names["text"] + end, params, use_tqdm=False)[0].outputs[0]
        for chosen, choices in zip(answer.token_ids, answer.logprobs, strict=True):
            best, second = sorted((entry.logprob for entry in choices.values()), reverse=True)[:2]
            assert choices[chosen].logprob == best and best - second > MARGIN
        assert f"{answer.text!r} same answer: True" in finale.outputs[0].text
