"""The right, the wrong and the missing answers to each exercise: solutions, mutants and starters, as objects."""

import json
import os
import tomllib
from dataclasses import dataclass

from minillm.course.build.addresses import ROOT, SETUP_MARK
from minillm.course.build.exercises import exercise_text, solutions
from minillm.course.grader.cells import definitions, make_cell, read_cells
from minillm.course.grader.exercises import load_tasks
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

    def object(self) -> object:
        return define(self.code, self.task.name)

    def __str__(self) -> str:
        return f"{self.task.id}: {self.name}"


def mutants() -> list[Mutant]:
    found = []
    for exercise in SOLUTIONS:
        path = ROOT / "tests" / "mutants" / f"{exercise}.toml"
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"] if path.is_file() else []
        found += [Mutant(**{**row, "task": TASKS[row["task"]]}) for row in rows]
    return found


def solution_object(task: Task) -> object:
    return _object_of(task, read_cells(SOLUTIONS[task.id[:4]]))


def starter_object(task: Task) -> object:
    cells = json.loads(exercise_text(SOLUTIONS[task.id[:4]]))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return _object_of(task, [make_cell(number, source) for number, source in enumerate(sources, 1)])


def define(code: str, name: str) -> object:
    names = {"__name__": "learner"}
    exec(compile(code, "<learner>", "exec", dont_inherit=True), names)
    return names[name]


def _object_of(task: Task, cells) -> object:
    """What the notebook defines for the task, with what its cells down to there define."""
    number = next(cell.number for cell in cells if cell.task == task.id)
    sources = [definitions(cell.source) for cell in cells[:number] if not cell.source.startswith(SETUP_MARK)]
    return define("\n".join(sources), task.name)
