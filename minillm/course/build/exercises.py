"""Make exercises/exNN_name.ipynb from solutions/exNN_name.ipynb: `make exercises`.

    python -m minillm.course.build.exercises [--no-run] [SOLUTION ...]

The solution is the one source. What a learner gets has the same cells with the same ids, without outputs, and with
starters in place of the solved regions (starters.py). Refused are a starter that is no Python, one that differs
outside of function bodies, a solution line that stands elsewhere in the exercise, a task that its check does not know,
and an exercise that does not run from top to bottom while nothing is solved.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minillm.course.build.addresses import ROOT, SETUP_ADDRESS, badge_cell, setup_cell
from minillm.course.build.notebooks import NotebookError, clean, execute
from minillm.course.build.starters import Region, StarterError, leaks, make_starter
from minillm.course.build.structure import find_problems
from minillm.course.grader.cells import make_cell, source_of
from minillm.course.grader.exercises import PACKAGE, find_task
from minillm.errors import GradeError


class ExerciseError(Exception):
    """A solution from which no exercise can be made; the message names the file, the cell and the reason."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="make the exercises from their solutions")
    parser.add_argument("paths", nargs="*", type=Path, help="solutions; all when none is named")
    parser.add_argument("--no-run", action="store_true", help="do not run the exercises")
    args = parser.parse_args(argv)
    bad = 0
    for solution in args.paths or solutions():
        try:
            problems = write_exercise(solution.resolve(), run=not args.no_run)
        except (ExerciseError, NotebookError) as error:
            problems = [str(error), "not written"]
        print(f"{exercise_path(solution)}: {'; '.join(problems) or 'good'}", flush=True)
        bad += bool(problems)
    return 1 if bad else 0


def solutions(root: Path = ROOT) -> list[Path]:
    return sorted(root.glob("solutions/*.ipynb"))


def exercise_path(solution: Path) -> Path:
    return solution.parent.parent / "exercises" / solution.name


def write_exercise(solution: Path, run: bool = True, root: Path = ROOT, package: str = PACKAGE) -> list[str]:
    """Make one exercise; returns the rules for notebooks that it breaks. Raises ExerciseError or NotebookError."""
    text = exercise_text(solution, root, package)
    path = exercise_path(solution)
    path.parent.mkdir(exist_ok=True)
    if run:
        run_unsolved(text, path)
    path.write_text(text, encoding="utf-8", newline="\n")
    return find_problems(path, root)


def exercise_text(solution: Path, root: Path = ROOT, package: str = PACKAGE) -> str:
    """The exercise's file, from its solution's: the same bytes for the same source. Raises ExerciseError."""
    notebook = copy.deepcopy(nbformat.read(solution, as_version=4))
    regions: list[Region] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            try:
                regions += take_out(cell, package)
            except (StarterError, GradeError) as error:
                raise ExerciseError(f"{solution.name}, cell {cell.id}: {error}") from error
    move_address(notebook, exercise_path(solution).relative_to(root).as_posix())
    clean(notebook)
    found = list(leaks(regions, "\n".join(cell.source for cell in notebook.cells)))
    if found:
        raise ExerciseError(f"{solution.name}: a line of a solution stands elsewhere in the exercise: {found[0]}")
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def take_out(cell: NotebookNode, package: str = PACKAGE) -> list[Region]:
    """Make a task's cell its starter, and see that the starter defines what the check asks for."""
    task_id = make_cell(0, cell.source).task
    if task_id is None:
        if re.search(r"^\s*### (BEGIN|END) ", cell.source, re.MULTILINE):
            raise StarterError("a region outside of a task: the cell does not start with `# task: exNN.k`")
        return []
    task = find_task(task_id, package)
    cell.source, regions = make_starter(cell.source, task_id)
    if not source_of(task.name, [cell.source]):
        raise StarterError(f"{task_id} does not define {task.name}, which its check asks for")
    return regions


def move_address(notebook: NotebookNode, path: str) -> None:
    """The opening cells, which name the file they stand in."""
    code = next((cell for cell in notebook.cells if cell.cell_type == "code"), None)
    address = SETUP_ADDRESS.search(code.source) if code else None
    if address is None:
        raise ExerciseError(f"{path}: the solution has no set-up cell: run `make notebooks` first")
    notebook.cells[0].source = badge_cell(address[1], address[2], path)
    code.source = setup_cell(address[1], address[2], path)


def run_unsolved(text: str, path: Path) -> None:
    """Run an exercise as it comes. Raises NotebookError when an exception escapes."""
    execute(nbformat.reads(text, as_version=4), path)


if __name__ == "__main__":
    sys.exit(main())
