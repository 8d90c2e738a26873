"""What `check` prints and keeps, how outcomes become marks, and the folder of solved tasks."""

import os
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from minillm.course import mine
from minillm.course.grader import check, feedback
from minillm.course.grader.exercises import add_cases, check_version, exercise_names, find_task, load_tasks
from minillm.course.grader.feedback import lines_of, try_here
from minillm.course.grader.marks import Failure, Result, judge_case, summarize, verdicts_of
from minillm.errors import GradeError
from tests.grader.examples import COUNTER, IMPORTS, MASK, PACKAGE


def causal_mask(queries, keys):
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    return columns <= rows + keys - queries


def top_left(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def unsolved(queries, keys):
    raise NotImplementedError("ex90.1: causal_mask is not written yet")


def printed(capsys, task_id, obj):
    check(task_id, obj, PACKAGE)
    return capsys.readouterr().out


def test_check_prints_one_line_and_one_for_each_lost_item(capsys):
    assert printed(capsys, "ex90.1", causal_mask) == "ex90.1 causal mask: 3 of 3 items\n"
    head, *lost = printed(capsys, "ex90.1", top_left).splitlines()
    assert head == "ex90.1 causal mask: 1 of 3 items"
    assert [line.split(":")[0] for line in lost] == ["  fewer queries", "  one query"]
    assert printed(capsys, "ex90.1", unsolved) == "ex90.1 causal mask: not solved yet\n"


def test_a_diagnosis_is_spelled_out_once():
    task = find_task("ex90.1", PACKAGE)
    a, b, c = task.items

    def told(**lost):
        return Result(task, {item: lost.get(key, "") for key, item in zip("abc", task.items, strict=True)}).told

    assert told() == []
    assert told(a="cold", b="dark", c="cold") == [f"{a}: cold", f"{b}: dark", f"{c}: the same as {a}"]
    assert told(a="cold", b="cold", c="cold") == ["every item: cold"]
    assert told(b="cold", c="cold") == [f"{b}: cold", f"{c}: the same as {b}"]
    assert summarize(task, verdicts_of(task, [])).told == ["every item: no case decided this item"]


def test_a_forgotten_return_is_named_as_such(capsys):
    out = printed(capsys, "ex90.1", lambda queries, keys: None)
    assert out.splitlines()[1:] == ["  every item: the mask is None: is a `return` missing?"]


def test_check_prints_the_same_twice_and_never_raises(capsys):
    assert printed(capsys, "ex90.1", top_left) == printed(capsys, "ex90.1", top_left)

    def broken(queries, keys):
        return [][queries]

    assert "raises IndexError: list index out of range (line " in printed(capsys, "ex90.1", broken)
    assert "raises SystemExit" in printed(capsys, "ex90.1", lambda queries, keys: sys.exit(0))
    assert "raises TypeError" in printed(capsys, "ex90.1", 3)


def test_an_object_that_is_partly_not_implemented_is_not_called_unsolved():
    def partly(queries, keys):
        return causal_mask(queries, keys) if queries == keys else unsolved(queries, keys)

    result = try_here(find_task("ex90.1", PACKAGE), partly, 0)
    assert result.message == "" and result.passed == 1


def test_a_passed_check_saves_the_source_and_a_failed_one_does_not(capsys):
    printed(capsys, "ex90.1", top_left)
    assert mine.solved() == {}
    printed(capsys, "ex90.1", causal_mask)
    assert list(mine.solved()) == ["ex90.1"]
    assert "columns <= rows + keys - queries" in mine.find("causal_mask").read_text(encoding="utf-8")


def test_in_a_notebook_the_cells_that_it_needs_are_saved_too(capsys, monkeypatch):
    monkeypatch.setattr(feedback, "_executed_cells", lambda: [IMPORTS, MASK, COUNTER])
    printed(capsys, "ex90.1", causal_mask)
    text = mine.find("causal_mask").read_text(encoding="utf-8")
    assert "import torch" in text and "class Counter" not in text
    assert torch.equal(mine.load("causal_mask")(2, 5), causal_mask(2, 5))


def test_what_cannot_be_saved_is_said_in_a_measured_line(capsys, monkeypatch):
    assert "~ not saved" not in printed(capsys, "ex90.1", causal_mask)
    monkeypatch.setenv(mine.VARIABLE, os.devnull + "/x")
    assert "\n~ not saved in" in printed(capsys, "ex90.1", causal_mask)
    assert "\n~ not saved: no cell" in printed(capsys, "ex90.1", partial(causal_mask))


# Marks


TASK = find_task("ex90.1", PACKAGE)
CASE = {"items": ["square"], "queries": 2, "keys": 2}


@pytest.mark.parametrize("outcome", [None, 3, [], {}, {"mask": None}, {"mask": torch.zeros(1)}, Failure("no")])
def test_a_wrong_outcome_is_a_diagnosis(outcome):
    assert judge_case(TASK, CASE, outcome)["square"]


def test_a_judge_that_fails_or_is_silent_means_a_lost_item():
    def failing(case, record):
        return {}["a"]

    sentence = judge_case(replace(TASK, judge=failing), CASE, {})["square"]
    assert sentence == "the result cannot be judged: KeyError: 'a'"
    assert judge_case(replace(TASK, judge=lambda case, record: {}), CASE, {}) == {"square": "the check gave no verdict"}


def test_an_item_needs_all_of_its_cases_and_at_least_one():
    good, bad = {"mask": torch.tensor([[True, False], [True, True]])}, {"mask": torch.zeros(2, 2, dtype=torch.bool)}
    result = summarize(TASK, verdicts_of(TASK, [(CASE, good), (CASE, bad), (CASE, good)]))
    assert "differs at 3 of 4" in result.items["square"]
    assert result.items["one query"] == "no case decided this item"
    assert summarize(TASK, verdicts_of(TASK, [(CASE, good)])).score == 2
    with pytest.raises(GradeError, match="'?oval"):
        summarize(TASK, verdicts_of(TASK, [({**CASE, "items": ["oval"]}, good)]))


def test_scores_are_a_part_of_the_points():
    assert try_here(TASK, causal_mask, 0).score == 6
    assert try_here(TASK, top_left, 0).score == 2
    assert lines_of(try_here(TASK, top_left, 0))[0].endswith("1 of 3 items")


# Exercises by name


def test_exercises_and_tasks_are_found_by_name_and_unknown_ones_name_the_others():
    assert exercise_names(PACKAGE) == ["ex90", "ex91"]
    assert [task.id for task in load_tasks("ex90", PACKAGE)] == ["ex90.1", "ex90.2", "ex90.3"]
    with pytest.raises(GradeError, match="no exercise 'ex12': choose one of ex90, ex91"):
        load_tasks("ex12", PACKAGE)
    with pytest.raises(GradeError, match="no task 'ex90.7': choose one of ex90.1"):
        find_task("ex90.7", PACKAGE)
    with pytest.raises(GradeError, match="no exercise '__init__'"):
        load_tasks("__init__", PACKAGE)


def test_versions_of_two_exercises_differ_and_stay():
    assert check_version("ex90", PACKAGE) == check_version("ex90", PACKAGE) != check_version("ex91", PACKAGE)


def test_an_instructor_s_cases_come_behind_the_check_s_own(tmp_path):
    file = tmp_path / "ex90.py"
    tasks = load_tasks("ex90", PACKAGE)
    assert add_cases(tasks, file) is tasks
    case = "{'items': ['square'], 'queries': seed, 'keys': seed}"
    file.write_text(f"CASES = {{'ex90.1': lambda seed: [{case}]}}", encoding="utf-8")
    more, *same = add_cases(tasks, file)
    assert more.cases(7)[-1] == {"items": ["square"], "queries": 7, "keys": 7}
    assert len(more.cases(7)) == len(tasks[0].cases(7)) + 1 and same == list(tasks[1:])
    file.write_text("CASES = {'ex90.9': list}", encoding="utf-8")
    with pytest.raises(GradeError, match="ex90.9, which is no task"):
        add_cases(tasks, file)
    for text in ("1 / 0", "x = 1", "def f(:"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(GradeError, match="does not load"):
            add_cases(tasks, file)


# The folder of solved tasks


def test_a_saved_function_loads_and_is_stamped_yours():
    assert mine.load("double") is None and mine.stamp("double") == "reference"
    path = mine.save("ex05.2", "double", "def double(x):\n    return 2 * x")
    assert path.name == "ex05_2_double.py"
    assert mine.load("double")(4) == 8 and mine.stamp("double") == "yours"
    mine.save("ex05.2", "double", "def double(x):\n    return x + x")
    assert mine.load("double")("a") == "aa" and list(mine.solved()) == ["ex05.2"]


def test_of_two_tasks_with_one_name_the_later_lesson_counts():
    mine.save("ex12.1", "schedule", "schedule = 12")
    mine.save("ex03.1", "schedule", "schedule = 3")
    assert mine.load("schedule") == 12 and list(mine.solved()) == ["ex03.1", "ex12.1"]


def test_a_saved_file_that_does_not_load_is_an_error_and_not_the_reference():
    path = mine.save("ex05.2", "double", "def double(x):\n    return 2 * x")
    path.write_text("def double(:", encoding="utf-8")
    with pytest.raises(GradeError, match="delete it to use the reference"):
        mine.load("double")
    path.write_text("other = 1", encoding="utf-8")
    with pytest.raises(GradeError, match="AttributeError"):
        mine.load("double")


@pytest.mark.parametrize("task_id, name", [("ex5.2", "f"), ("ex05", "f"), ("ex05.2", "../f"), ("../x05.2", "f")])
def test_only_a_task_and_a_name_make_a_file(task_id, name):
    with pytest.raises(GradeError, match="cannot save"):
        mine.save(task_id, name, "x = 1")


def test_inside_nothing_solved_nothing_is_and_nothing_stays():
    mine.save("ex05.2", "double", "double = 1")
    before = mine.folder()
    with mine.nothing_solved():
        assert mine.solved() == {} and mine.folder() != before
        mine.save("ex05.3", "triple", "triple = 1")
    assert mine.folder() == before and list(mine.solved()) == ["ex05.2"]


@pytest.mark.parametrize("history", [True, False], ids=["as in JupyterLab", "as in nbval"])
def test_a_function_is_saved_with_its_imports_whether_the_kernel_keeps_history_or_not(history, tmp_path):
    """nbval runs cells without history: then nothing stands in `In`. With it, a timed cell counts as well."""
    from jupyter_client.manager import start_new_kernel

    environment = {**os.environ, "MINILLM_MINE": str(tmp_path)}
    manager, client = start_new_kernel(kernel_name="python3", env=environment)
    try:
        use = f"from minillm.course.grader import check\ncheck('ex90.1', causal_mask, {PACKAGE!r})"
        for cell in (IMPORTS, ("%%time\n" if history else "") + MASK, use):
            reply = client.execute_interactive(
                cell, store_history=history, timeout=60, output_hook=lambda message: None
            )
            assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    (saved,) = tmp_path.glob("*.py")
    assert saved.read_text(encoding="utf-8").count("import torch") == 1
