"""The tasks of an exercise, found by name: "ex02" are the TASKS of minillm/course/checks/ex02.py.

An instructor's file DIR/ex02.py adds cases of its own, which no learner can read: CASES = {"ex02.2": cases}, where
cases(seed) returns what the check's own does. `minillm grade --extra DIR` judges both.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import re
from dataclasses import replace
from pathlib import Path

from minillm.course.grader.task import Task
from minillm.errors import GradeError

PACKAGE = "minillm.course.checks"
EXERCISE = re.compile(r"ex\d\d")


def load_tasks(exercise: str, package: str = PACKAGE) -> tuple[Task, ...]:
    """All tasks of "ex02", in order. Raises GradeError, naming those that exist, when there is no such exercise."""
    if exercise not in exercise_names(package):
        raise GradeError(f"there is no exercise {exercise!r}: choose one of {', '.join(exercise_names(package))}")
    return importlib.import_module(f"{package}.{exercise}").TASKS


def find_task(task_id: str, package: str = PACKAGE) -> Task:
    """The task "ex02.2"."""
    tasks = {task.id: task for task in load_tasks(task_id.partition(".")[0], package)}
    if task_id not in tasks:
        raise GradeError(f"there is no task {task_id!r}: choose one of {', '.join(tasks)}")
    return tasks[task_id]


def exercise_names(package: str = PACKAGE) -> list[str]:
    paths = importlib.import_module(package).__path__
    return sorted(module.name for module in pkgutil.iter_modules(paths) if EXERCISE.fullmatch(module.name))


def check_version(exercise: str, package: str = PACKAGE) -> str:
    """A digest of the check's source and of what the checks share: two marks are comparable when it is the same."""
    folder = Path(importlib.import_module(package).__file__).parent
    files = [file for file in sorted(folder.glob("*.py")) if file.stem == exercise or not EXERCISE.fullmatch(file.stem)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def add_cases(tasks: tuple[Task, ...], path: Path) -> tuple[Task, ...]:
    """`tasks` with the cases of an instructor's file behind their own; unchanged where there is no such file."""
    if not path.is_file():
        return tasks
    spec = importlib.util.spec_from_file_location(f"instructor_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        extra = dict(module.CASES)
    except Exception as error:
        raise GradeError(f"{path} does not load ({type(error).__name__}: {error}): it has to define CASES") from error
    if unknown := extra.keys() - {task.id for task in tasks}:
        raise GradeError(f"{path} has cases for {', '.join(sorted(unknown))}, which is no task of this exercise")
    return tuple(_with(task, extra[task.id]) if task.id in extra else task for task in tasks)


def _with(task: Task, extra) -> Task:
    return replace(task, cases=lambda seed: [*task.cases(seed), *extra(seed)])
