"""The exercise's parts run in the engine and give its tokens; what exercise 08 says of itself and of its bugs is so."""

import math

import nbformat
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.course import plug
from minillm.course.build.addresses import ROOT
from minillm.course.checks.ex08 import TASKS as CHECKED
from minillm.course.checks.merged_parts import merged
from minillm.course.grader.feedback import try_here
from tests.grader.answers import TASKS, define, solution_code, starter_code
from tests.unit.engines import make_engine, random_prompts, run

MARGIN = 0.5  # logits between the chosen token and the next best one
OWN = {task.name: define(solution_code(task), task.name) for task in CHECKED}
EXERCISE = {cell.id: cell for cell in nbformat.read(ROOT / "solutions" / "ex08_online_softmax.ipynb", 4).cells}


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m-instruct", dtype="float32", num_kv_blocks=32) as llm:
        yield llm


@pytest.mark.parametrize(
    "part",
    [lambda: plug.attention(OWN["flash_attention"]), lambda: plug.merge(OWN["merge"], num_keys=7)],
    ids=["flash_attention", "merge"],
)
def test_a_solution_is_a_part_of_the_engine_and_gives_its_tokens(tiny, session_seed, part):
    prompts = random_prompts(tiny, [1, 15, 70], session_seed)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine = make_engine(tiny)
    engine.attend = part = part()
    assert run(engine, prompts, params) == run(make_engine(tiny), prompts, params)
    assert part.calls > 0


@pytest.mark.parametrize("task", CHECKED, ids=lambda task: task.id)
@pytest.mark.parametrize(
    "answer", [None, 3, {}, "out", (1, 2), [[1.0]], ["a", "b"], torch.zeros(2), (torch.zeros(2), torch.zeros(2))]
)
def test_an_answer_of_the_wrong_form_is_a_diagnosis(task, answer, session_seed):
    result = try_here(task, lambda *args, **kwargs: answer, session_seed)
    assert set(result.lost) == set(task.items)
    assert all("judge" not in sentence for sentence in result.lost.values())


def lesson_functions() -> dict:
    cells = nbformat.read(ROOT / "notebooks" / "08_online_softmax.ipynb", 4).cells
    names = {"math": math, "torch": torch}
    for name in ("absorb", "flash_attention"):
        source = next(cell.source for cell in cells if f"def {name}(" in cell.source)
        exec(source.split("\n\n\nq, k, v =")[0], names)
    return names


def test_the_lessons_function_and_the_engines_file_do_not_solve_task_2(session_seed):
    from minillm.attention import flash

    lesson = lesson_functions()["flash_attention"]

    def pasted(q, k, v, query_tile=64, key_tile=64, window=None, sinks=0):
        return lesson(q, k, v, query_tile)

    def engines(q, k, v, query_tile=64, key_tile=64, window=None, sinks=0):
        return flash.attention(q, k, v, window, query_tile, key_tile)[0]

    assert try_here(TASKS["ex08.2"], lesson, session_seed).score == 0
    of_sinks = {"sinks", "sinks end inside a tile", "sinks inside the window", "the gap is not read"}
    assert set(try_here(TASKS["ex08.2"], engines, session_seed).lost) == of_sinks
    assert set(try_here(TASKS["ex08.2"], pasted, session_seed).lost) == of_sinks | {"window"}


def test_two_parts_of_the_same_weight_show_one_bug_of_the_starters_four(session_seed):
    g = torch.Generator().manual_seed(session_seed)
    first, second = (torch.randn(3, 2, 4, generator=g) for _ in range(2))
    lse = torch.randn(3, 2, generator=g)
    out, handed_on = define(starter_code(TASKS["ex08.3"]), "merge")(first, lse, second, lse)
    right, right_lse = merged([[first, lse], [second, lse]])
    assert (out - right).abs().max() < 1e-5 and (handed_on - right_lse).abs().min() > 0.5
    assert "four places" in EXERCISE["task-3"].source and "three more" in EXERCISE["task-3"].source


def test_the_printed_numbers_hang_on_no_close_call(llm):
    params = SamplingParams(temperature=0.0, max_tokens=7, logprobs=2)
    question = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Name the capital of France."}])
    answer = llm.generate(question, params, use_tqdm=False)[0].outputs[0]
    for chosen, choices in zip(answer.token_ids, answer.logprobs, strict=True):
        best, second = sorted((entry.logprob for entry in choices.values()), reverse=True)[:2]
        assert choices[chosen].logprob == best and best - second > MARGIN
    assert repr(answer.text) in EXERCISE["finale"].outputs[0].text
    for sentence in ("The capital of France is Paris.", "The capital of France is Madrid."):
        assert sentence in EXERCISE["surprise"].source
        bits = [-score / math.log(2) for score in llm.score(llm.tokenizer.encode(sentence, add_special_tokens=False))]
        assert all(abs(n % 1 - 0.5) > 0.01 for n in bits), bits
    config = llm.engine.model.config
    assert f"1,024 x {config.vocab_size:,}" in EXERCISE["task-1"].source
    assert f"{1024 * config.vocab_size * 4 / 1e6:.0f} MB" in EXERCISE["task-1"].source
