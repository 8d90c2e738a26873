"""The right, the wrong and the missing answers to each exercise: solutions, mutants and starters, as source."""

import itertools
import json
import os
import threading
import tomllib
from dataclasses import dataclass

from minillm.course.build.addresses import ROOT, SETUP_MARK
from minillm.course.build.exercises import exercise_text, solutions
from minillm.course.grader.cells import Cell, definitions, make_cell, read_cells
from minillm.course.grader.exercises import PACKAGE, load_tasks
from minillm.course.grader.feedback import try_here
from minillm.course.grader.grade import Session
from minillm.course.grader.kernel_task import KernelTask
from minillm.course.grader.limits import TASK_SECONDS
from minillm.course.grader.marks import Result, drive_case
from minillm.course.grader.parent import Learner
from minillm.course.grader.task import Task

SEED = int(os.environ["MINILLM_TEST_SEED"])
SOLUTIONS = {path.name[:4]: path for path in solutions()}
TASKS = {task.id: task for exercise in SOLUTIONS for task in load_tasks(exercise)}


@dataclass(frozen=True)
class Mutant:
    """A wrong answer of tests/mutants/exNN.toml: the items that it loses, and words of its first diagnosis."""

    task: Task
    name: str
    cause: str
    code: str
    loses: list[str]
    diagnosis: str

    def __str__(self) -> str:
        return f"{self.task.id}: {self.name}"


def mutants() -> list[Mutant]:
    found = []
    for exercise in SOLUTIONS:
        path = ROOT / "tests" / "mutants" / f"{exercise}.toml"
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"] if path.is_file() else []
        found += [Mutant(**{**row, "task": TASKS[row["task"]]}) for row in rows]
    return found


def solution_code(task: Task) -> str:
    return _code_of(task, read_cells(SOLUTIONS[task.id[:4]]))


def starter_code(task: Task) -> str:
    cells = json.loads(exercise_text(SOLUTIONS[task.id[:4]]))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return _code_of(task, [make_cell(number, source) for number, source in enumerate(sources, 1)])


def _code_of(task: Task, cells: list[Cell]) -> str:
    """What the notebook's cells define, down to that of the task."""
    number = next(cell.number for cell in cells if cell.task == task.id)
    return "\n".join(definitions(cell.source) for cell in cells[:number] if not cell.source.startswith(SETUP_MARK))


class Bench:
    """Tries answers: plain ones in this process, kernels in two processes per exercise, which stay up in between."""

    def __init__(self, package: str = PACKAGE):
        self._package = package
        self._learners: dict[str, Learner] = {}
        self._numbers = itertools.count(1)

    def result(self, task: Task, code: str) -> Result:
        if not isinstance(task, KernelTask):
            return try_here(task, define(code, task.name), SEED)
        session = Session(self._learner(task), {}, SEED, TASK_SECONDS, threading.Lock())
        cell = Cell(next(self._numbers), code, task.id)
        error = session.learner.run(cell, TASK_SECONDS)
        return Result(task, dict.fromkeys(task.items, error), error) if error else session.judge(task, cell)

    def records(self, task: Task, code: str) -> list[object]:
        """What `drive` notes down for each case."""
        if not isinstance(task, KernelTask):
            return [drive_case(task, define(code, task.name), case) for case in task.cases(SEED)]
        learner = self._learner(task)
        assert learner.run(Cell(next(self._numbers), code, task.id), TASK_SECONDS) == ""
        return [learner.drive(task, case, TASK_SECONDS) for case in task.cases(SEED)]

    def close(self) -> None:
        for learner in self._learners.values():
            learner.__exit__()

    def _learner(self, task: Task) -> Learner:
        return self._learners.setdefault(task.id[:4], Learner(task.id[:4], self._package))


def define(code: str, name: str) -> object:
    names = {"__name__": "learner"}
    exec(compile(code, "<learner>", "exec", dont_inherit=True), names)
    return names[name]
