"""Every exercise against its answers: the solution has full marks, the starter none, each mutant loses its items.

Cases are fresh in each run. What a mutant loses is written in tests/mutants/exNN.toml: a conceptual slip costs the
items that show it and no other, and the first diagnosis names it. Plain tasks run in this process, which is fast;
test_exercises.py runs solutions and starters as `minillm grade` does.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from minillm.course.grader.exercises import find_task
from minillm.course.grader.kernel_task import is_gradable
from minillm.course.grader.marks import Failure
from minillm.course.grader.wire import pack
from tests.grader.answers import SEED, TASKS, Bench, Mutant, mutants, solution_code, starter_code
from tests.grader.examples import IMPORTS, MASK, PACKAGE, PRODUCT, TRITON

LEAST_MUTANTS = 3
LEAST_SHARE = 0.4
MUTANTS = mutants()


@pytest.fixture(scope="module")
def bench():
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture(autouse=True)
def needs_what_the_task_needs(request):
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    task = TASKS[params["task_id"]] if "task_id" in params else params["mutant"].task if "mutant" in params else None
    if task is not None and not is_gradable(task):
        pytest.skip("no Triton on this machine")


@pytest.mark.parametrize("task_id", TASKS)
def test_a_solution_has_full_marks(bench, task_id):
    task = TASKS[task_id]
    result = bench.result(task, solution_code(task))
    assert result.lost == {} and result.score == task.points


@pytest.mark.parametrize("task_id", TASKS)
def test_a_starter_has_no_marks_so_that_editing_around_its_bug_earns_none(bench, task_id):
    task = TASKS[task_id]
    result = bench.result(task, starter_code(task))
    assert result.score == 0, f"passed: {set(result.items) - set(result.lost)}"


@pytest.mark.parametrize("body", ["return None", "return 'other type'", "raise RuntimeError('broken on purpose')"])
@pytest.mark.parametrize("task_id", TASKS)
def test_a_learner_who_is_wrong_everywhere_has_no_marks_though_the_reference_is_intact(bench, task_id, body):
    task = TASKS[task_id]
    result = bench.result(task, f"def {task.name}(*args, **kwargs):\n    {body}")
    assert result.score == 0, f"passed: {set(result.items) - set(result.lost)}"


@pytest.mark.parametrize("task_id", TASKS)
def test_cases_are_plain_repeatable_and_decide_every_item(task_id):
    task = TASKS[task_id]
    cases, compiled = task.cases(SEED), getattr(task, "compile_cases", list)()
    frame = pack(cases)
    assert frame == pack(task.cases(SEED)), "a seed makes the same cases"
    assert frame != pack(task.cases(SEED + 1)), "another seed makes others"
    assert b'"foreign"' not in frame, "an object that cannot cross to the learner's process"
    assert {item for case in [*cases, *compiled] for item in case["items"]} == set(task.items)


def test_each_task_has_three_mutants():
    count = Counter(mutant.task.id for mutant in MUTANTS)
    assert {task_id: count[task_id] for task_id in TASKS if count[task_id] < LEAST_MUTANTS} == {}


def faults(bench: Bench, mutant: Mutant, solution: str) -> list[str]:
    """What is wrong with a mutant, or with the items that should catch it."""
    found, task = [], mutant.task
    result = bench.result(task, mutant.code)
    if set(result.lost) != set(mutant.loses):
        found.append(f"loses {sorted(result.lost)}, declared are {sorted(mutant.loses)}: {result.lost}")
    if not result.lost or mutant.diagnosis not in next(iter(result.lost.values())):
        found.append(f"the first diagnosis does not say {mutant.diagnosis!r}: {result.lost}")
    if result.passed < LEAST_SHARE * len(task.items):
        found.append(f"one slip keeps {result.passed} of {len(task.items)} items, it has to be {LEAST_SHARE:.0%}")
    wrong, right = bench.records(task, mutant.code), bench.records(task, solution)
    if any(isinstance(record, Failure) for record in wrong):
        found.append("it raises")
    elif [form(record) for record in wrong] != [form(record) for record in right]:
        found.append("its results have another shape or dtype than the solution's")
    return found


def form(record: dict) -> dict:
    """The keys of a record, with dtype and shape of its tensors."""
    return {key: (v.dtype, v.shape) if isinstance(v, torch.Tensor) else type(v) for key, v in record.items()}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_loses_its_items_hears_why_and_looks_right(bench, mutant):
    assert faults(bench, mutant, solution_code(mutant.task)) == []


# The matrix itself, on the example exercises


TOP_LEFT = Mutant(
    find_task("ex90.1", PACKAGE),
    "top left",
    "The mask starts at the top left.",
    f"{IMPORTS}\n{MASK.replace(' + keys - queries', '')}",
    ["fewer queries", "one query"],
    "differs at",
)
BY_HAND = Mutant(
    find_task("ex91.2", PACKAGE),
    "rows twice",
    "The product is added to itself.",
    f"{TRITON}\n{PRODUCT.replace('tl.dot(a, b)', '2 * tl.dot(a, b)')}",
    ["product"],
    "off by",
)
FAULTY = {
    "another item": (replace(TOP_LEFT, loses=["one query"]), "declared are ['one query']"),
    "another diagnosis": (replace(TOP_LEFT, diagnosis="top left"), "does not say 'top left'"),
    "nothing lost": (replace(TOP_LEFT, code=f"{IMPORTS}\n{MASK}", loses=[]), "the first diagnosis does not say"),
    "too much lost": (TOP_LEFT, "one slip keeps 1 of 3 items"),
    "raises": (replace(TOP_LEFT, code="def causal_mask(q, k): return 1 / 0"), "it raises"),
    "another dtype": (
        replace(TOP_LEFT, code=TOP_LEFT.code.replace("columns <= rows", "1 * (columns <= rows)")),
        "another shape or dtype",
    ),
}


@pytest.mark.parametrize("why", FAULTY)
def test_a_faulty_mutant_is_found(bench, why):
    mutant, words = FAULTY[why]
    assert any(words in fault for fault in faults(bench, mutant, f"{IMPORTS}\n{MASK}"))


def test_a_kernel_mutant_is_tried_in_processes_of_its_own():
    pytest.importorskip("triton")
    bench = Bench(PACKAGE)
    try:
        assert faults(bench, BY_HAND, f"{TRITON}\n{PRODUCT}") == []
        assert bench.result(BY_HAND.task, f"{TRITON}\n{PRODUCT}").score == BY_HAND.task.points
        assert bench.result(BY_HAND.task, "1 / 0").score == 0
    finally:
        bench.close()
