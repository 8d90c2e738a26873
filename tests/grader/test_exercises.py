"""Every exercise as `minillm grade` sees it: the starter has nothing, the solution everything.

The solution is graded with a reference that is broken on purpose: what the checks hide from learners raises in every
call. So no solution and no check leans on it.
"""

import shutil
from pathlib import Path

import pytest

import minillm
from minillm.course.build.addresses import ROOT
from minillm.course.build.exercises import exercise_text
from minillm.course.grader.exercises import load_tasks
from minillm.course.grader.grade import Options, grade
from minillm.course.grader.marks import UNSOLVED
from tests.grader.answers import SOLUTIONS

BREAK = """

def _break(names):
    def broken(*args, **kwargs):
        raise AssertionError("the reference is broken on purpose")

    for name, thing in list(globals().items()):
        if getattr(thing, "__module__", None) != __name__ or thing is _break or (names and name not in names):
            continue
        if isinstance(thing, type):
            for key, member in list(vars(thing).items()):
                if callable(member) or isinstance(member, (staticmethod, classmethod)):
                    setattr(thing, key, broken)
        else:
            globals()[name] = broken


_break({names})
"""


def break_reference(package: Path, hidden: set[str]) -> None:
    """Make everything that `hidden` names raise, in a copy of the minillm package."""
    for name in hidden:
        parts = name.split(".")
        if parts[0] != "minillm" or parts[1:3] == ["course", "checks"]:  # the checks drive the learner's code
            continue
        path = package.joinpath(*parts[1:])
        if path.is_dir():
            files = {file: set() for file in path.rglob("*.py")}
        elif path.with_suffix(".py").is_file():
            files = {path.with_suffix(".py"): set()}
        else:
            files = {path.parent.with_suffix(".py"): {parts[-1]}}
        for file, names in files.items():
            file.write_text(file.read_text(encoding="utf-8") + BREAK.format(names=repr(names)), encoding="utf-8")


def copy_package(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "build")
    return Path(shutil.copytree(Path(minillm.__file__).parent, folder / "minillm", ignore=ignored))


@pytest.mark.parametrize("exercise", SOLUTIONS)
def test_a_solution_keeps_full_marks_when_the_reference_is_broken(exercise, tmp_path):
    hidden = {name for task in load_tasks(exercise) for name in task.hides}
    break_reference(copy_package(tmp_path), hidden)
    report = grade(SOLUTIONS[exercise], Options(source=tmp_path))
    assert {result.task.id: result.lost for result in report.results if result.lost} == {}
    assert report.score == report.max_score > 0 and report.notes == []


@pytest.mark.parametrize("exercise", SOLUTIONS)
def test_an_untouched_starter_has_no_marks(exercise, tmp_path):
    path = tmp_path / "mine.ipynb"
    path.write_text(exercise_text(SOLUTIONS[exercise]), encoding="utf-8")
    report = grade(path, Options(starters=ROOT / "exercises"))
    assert {result.message for result in report.results} == {UNSOLVED} and report.score == 0
