"""`minillm grade` and `minillm progress` from the command line: what they write, and that one file stops no other."""

import csv
import io
import json
import subprocess
import sys
import threading

import pytest

from minillm.cli import main
from minillm.course import mine
from minillm.course.build.addresses import ROOT
from minillm.course.grader.cells import make_cell
from minillm.course.grader.exercises import exercise_names, load_tasks
from minillm.course.grader.grade import FRESH, Options, Session, grade, grade_folder, task_seed
from tests.grader.examples import COUNTER, IMPORTS, MASK, MERGE, PACKAGE, SOLVED, write_notebook

CHECKS = ["--checks", PACKAGE]
TOP_LEFT = MASK.replace(" + keys - queries", "")


def run(capsys, *argv):
    status = main(["grade", *map(str, argv), *CHECKS])
    return status, capsys.readouterr().out


def test_json_holds_marks_versions_seed_and_device(tmp_path, capsys):
    path, out = write_notebook(tmp_path / "a b.ipynb", IMPORTS, TOP_LEFT, COUNTER), tmp_path / "out.json"
    status, text = run(capsys, path, "--json", out, "--seed", 5)
    marks = json.loads(out.read_text(encoding="utf-8"))
    assert status == 0
    assert {key: marks[key] for key in ("exercise", "score", "max_score", "seed", "device", "error")} == {
        "exercise": "ex90",
        "score": 4.0,
        "max_score": 14,
        "seed": 5,
        "device": "cpu",
        "error": "",
    }
    assert marks["course_version"] and len(marks["check_version"]) == 12 and marks["network"].startswith("blocked")
    first, second, third = marks["tasks"]
    assert (first["score"], second["score"], third["score"]) == (2.0, 2.0, 0.0)
    assert first["items"][1]["item"] == "fewer queries" and "differs" in first["items"][1]["message"]
    assert third["message"] == "no cell starts with `# task: ex90.3`"
    assert "a b.ipynb: ex90, 4 of 14 points, seed 5\n  ex90.1 causal mask: 2 of 6\n" in text


def test_what_stands_below_its_task_is_missing_and_the_report_says_why(tmp_path, capsys):
    helped = "# task: ex90.1\ndef causal_mask(queries, keys):\n    return lower(queries, keys)"
    path = write_notebook(tmp_path / "a.ipynb", IMPORTS, helped, "def lower(q, k): ...", COUNTER, MERGE)
    _, text = run(capsys, path)
    assert "every item: raises NameError: name 'lower' is not defined (line 3 of the cell)\n" in text
    assert f"  {FRESH}\n" in text
    _, text = run(capsys, write_notebook(tmp_path / "b.ipynb", IMPORTS, TOP_LEFT, COUNTER, MERGE))
    assert FRESH not in text


def test_gradescope_and_csv_have_their_own_forms(tmp_path, capsys):
    path, out = write_notebook(tmp_path / "a.ipynb", IMPORTS, TOP_LEFT, COUNTER, MERGE), tmp_path / "results.json"
    _, text = run(capsys, path, "--json", out, "--gradescope", "--csv")
    results = json.loads(out.read_text(encoding="utf-8"))
    assert results["score"] == 10.0
    assert [(test["name"], test["score"], test["max_score"]) for test in results["tests"]] == [
        ("ex90.1 causal mask", 2.0, 6),
        ("ex90.2 counter", 2.0, 2),
        ("ex90.3 merge", 6.0, 6),
    ]
    assert "one query: " in results["tests"][0]["output"] and "seed" in results["output"]
    header, *rows = csv.reader(io.StringIO(text))
    assert header == ["file", "exercise", "task", "score", "max_score", "message"]
    assert [row[:5] for row in rows] == [
        ["a.ipynb", "ex90", "ex90.1", "2.0", "6"],
        ["a.ipynb", "ex90", "ex90.2", "2.0", "2"],
        ["a.ipynb", "ex90", "ex90.3", "6.0", "6"],
    ]


def test_a_batch_goes_on_after_files_that_cannot_be_graded(tmp_path, capsys):
    folder, out = tmp_path / "handed in", tmp_path / "out.json"
    (folder / "b").mkdir(parents=True)
    (folder / ".ipynb_checkpoints").mkdir()
    write_notebook(folder / ".ipynb_checkpoints" / "x.ipynb", *SOLVED)
    (folder / "a.ipynb").write_text("{", encoding="utf-8")
    write_notebook(folder / "b" / "good.ipynb", *SOLVED)
    write_notebook(folder / "c.ipynb", "# task: ex77.1\nx = 1")
    write_notebook(folder / "d.ipynb", IMPORTS, "# task: ex90.1\ndef f(:")
    status, text = run(capsys, "--batch", folder, "-j", 2, "--json", out)
    marks = json.loads(out.read_text(encoding="utf-8"))
    assert status == 1, "a file could not be graded"
    assert [(mark["file"], mark["score"]) for mark in marks] == [
        ("a.ipynb", 0),
        ("b/good.ipynb", 14.0),
        ("c.ipynb", 0),
        ("d.ipynb", 0),
    ]
    assert "not a notebook" in marks[0]["error"] and "no exercise 'ex77'" in marks[2]["error"]
    assert "a.ipynb: not graded: " in text and marks[3]["error"] == ""


def test_an_error_of_the_grader_itself_stops_no_other_file(tmp_path, monkeypatch):
    for name in "ab":
        write_notebook(tmp_path / f"{name}.ipynb", "x = 1")
    monkeypatch.setattr("minillm.course.grader.grade.read_cells", lambda path: 1 / 0)
    reports = list(grade_folder(tmp_path, 2))
    assert [report.error for report in reports] == ["the grader failed: ZeroDivisionError: division by zero"] * 2


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "name one notebook"),
        (["a.ipynb", "--batch", "."], "name one notebook"),
        (["none.ipynb"], "none.ipynb cannot be read"),
        (["--batch", ".", "--gradescope"], "does not go with --batch"),
        (["--batch", ".", "-j", "0"], "-j 0"),
        (["--batch", "."], "holds no notebook"),
        (["a.ipynb", "--extra", "none"], "--extra none is not a folder"),
        (["a.ipynb", "--json", "no/folder/out.json"], "no/folder"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    assert main(["grade", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_cells_between_two_tasks_share_their_time(monkeypatch):
    now, given = [0.0], []
    monkeypatch.setattr("minillm.course.grader.grade.time.monotonic", lambda: now[0])

    class SlowLearner:
        def run(self, cell, seconds):
            given.append(seconds)
            now[0] += 25
            return "took long"

    sources = ["a", "b", "c", "d", "# task: ex90.1", "e", "# task: ex90.2", "below"]
    cells = [make_cell(number, source) for number, source in enumerate(sources, 1)]
    session = Session(SlowLearner(), {}, 0, 60.0, threading.Lock())
    results, notes = session.grade(cells, load_tasks("ex90", PACKAGE)[:2])
    assert given == [60, 35, 10, 1, 60, 60, 60], "cells share a minute, a task's own cell has one to itself"
    assert notes[0] == "code cell 1: took long" and len(notes) == 5
    assert [result.message for result in results] == ["took long"] * 2


def test_the_grader_s_memory_is_closed_to_other_processes(tmp_path):
    program = (
        "import minillm.course.grader.limits as limits, ctypes, sys\n"
        "limits.keep_secrets()\n"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) if sys.platform == 'linux' else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.stdout == "0\n", done.stderr


def test_a_seed_repeats_the_cases_and_a_fresh_one_is_drawn_without(tmp_path):
    path = write_notebook(tmp_path / "ex90.ipynb", "x = 1")
    reports = [grade(path, Options(package=PACKAGE, seed=seed)) for seed in (None, None, 7)]
    assert reports[0].seed != reports[1].seed and reports[2].seed == 7
    assert task_seed(7, "ex90.1") == task_seed(7, "ex90.1") != task_seed(7, "ex90.2")


def test_an_instructor_s_cases_count(tmp_path, capsys):
    extra = tmp_path / "extra"
    extra.mkdir()
    case = '{"items": ["square"], "queries": 2, "keys": 12}'  # not square: a wrong mask loses this item, too
    (extra / "ex90.py").write_text(f'CASES = {{"ex90.1": lambda seed: [{case}]}}', encoding="utf-8")
    path = write_notebook(tmp_path / "a.ipynb", IMPORTS, TOP_LEFT)
    assert "ex90.1 causal mask: 0 of 6" in run(capsys, path, "--extra", extra)[1]


def test_progress_lists_every_task_of_the_course(capsys):
    tasks = [task for exercise in exercise_names() for task in load_tasks(exercise)]
    assert main(["progress", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["task"] for row in rows] == [task.id for task in tasks] and not any(row["solved"] for row in rows)
    mine.save(tasks[0].id, tasks[0].name, "x = 1")
    assert main(["progress"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == [tasks[0].id, "solved", str(tasks[0].points)]
    assert lines[-2] == f"1 of {len(tasks)} tasks, {tasks[0].points} of {sum(t.points for t in tasks)} points"
