"""Every exercise against its answers: the solution has full marks, the starter none, each mutant loses its items.

Cases are fresh in each run. What a mutant loses is written in tests/mutants/exNN.toml: a conceptual slip costs the
items that show it and no other, and the first diagnosis names it. Here all of it runs in this process, which is fast;
test_exercises.py runs solutions and starters as `minillm grade` does.
"""

from collections import Counter

import pytest
import torch

from minillm.course.grader.feedback import try_here
from minillm.course.grader.marks import UNSOLVED, Failure, drive_case
from minillm.course.grader.wire import pack
from tests.grader.answers import SEED, TASKS, mutants, solution_object, starter_object

LEAST_MUTANTS = 3
LEAST_SHARE = 0.4
MUTANTS = mutants()


@pytest.mark.parametrize("task_id", TASKS)
def test_a_solution_has_full_marks(task_id):
    task = TASKS[task_id]
    result = try_here(task, solution_object(task), SEED)
    assert result.lost == {} and result.score == task.points


@pytest.mark.parametrize("task_id", TASKS)
def test_a_starter_is_unsolved_or_holds_a_bug(task_id):
    task = TASKS[task_id]
    result = try_here(task, starter_object(task), SEED)
    assert result.message == UNSOLVED or result.lost


@pytest.mark.parametrize("answer", [None, "raise", "other type"])
@pytest.mark.parametrize("task_id", TASKS)
def test_a_learner_who_is_wrong_everywhere_has_no_marks_though_the_reference_is_intact(task_id, answer):
    def wrong(*args, **kwargs):
        if answer == "raise":
            raise RuntimeError("broken on purpose")
        return answer

    result = try_here(TASKS[task_id], wrong, SEED)
    assert result.score == 0, f"passed: {set(result.items) - set(result.lost)}"


@pytest.mark.parametrize("task_id", TASKS)
def test_cases_are_plain_repeatable_and_decide_every_item(task_id):
    task = TASKS[task_id]
    cases = task.cases(SEED)
    frame = pack(cases)
    assert frame == pack(task.cases(SEED)), "a seed makes the same cases"
    assert frame != pack(task.cases(SEED + 1)), "another seed makes others"
    assert b'"foreign"' not in frame, "an object that cannot cross to the learner's process"
    assert {item for case in cases for item in case["items"]} == set(task.items)


def test_each_task_has_three_mutants():
    count = Counter(mutant.task.id for mutant in MUTANTS)
    assert {task_id: count[task_id] for task_id in TASKS if count[task_id] < LEAST_MUTANTS} == {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_loses_its_items_and_hears_why(mutant):
    task = mutant.task
    result = try_here(task, mutant.object(), SEED)
    assert set(result.lost) == set(mutant.loses), result.lost
    assert mutant.diagnosis in next(iter(result.lost.values()))
    assert result.passed >= LEAST_SHARE * len(task.items), "one slip keeps 40% of the marks"


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_returns_what_the_solution_returns_in_form(mutant):
    task = mutant.task
    right, wrong = solution_object(task), mutant.object()
    for case in task.cases(SEED):
        records = [drive_case(task, obj, case) for obj in (right, wrong)]
        assert not any(isinstance(record, Failure) for record in records), records
        assert form(records[0]) == form(records[1])


def form(record: dict) -> dict:
    """The keys of a record, with dtype and shape of its tensors."""
    return {key: (v.dtype, v.shape) if isinstance(v, torch.Tensor) else type(v) for key, v in record.items()}
