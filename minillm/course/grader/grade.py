"""Marks for one notebook or a folder of them: what `minillm grade` does.

The cells run in the order of the file, each task is judged right after its cell, on cases that are made only then,
from a seed that the learner's process never sees. A task that hangs, crashes or eats memory is lost with a sentence;
the process starts again without it and the rest is graded.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from minillm import __version__
from minillm.course.grader.cells import Cell, exercise_of, read_cells, same_code
from minillm.course.grader.exercises import PACKAGE, add_cases, check_version, load_tasks
from minillm.course.grader.kernel_task import NO_TRITON, KernelTask, is_gradable, judge_compiled
from minillm.course.grader.limits import TASK_SECONDS
from minillm.course.grader.marks import UNSOLVED, Failure, Result, fail, summarize, verdicts_of
from minillm.course.grader.parent import SOURCE, Learner, ProcessEnded
from minillm.course.grader.task import Case, Task
from minillm.errors import GradeError, MinillmError

DEVICE = "cpu"
FRESH = (
    "a name is missing: grading runs the cells from top to bottom in a new process, so what a task uses stands above it"
)
LEAST_SECONDS = 1.0  # for a cell, when those before it have used up the time


@dataclass(frozen=True)
class Options:
    """How to grade.

    seed      of the cases; None draws a fresh one for each notebook, which the report names
    extra     an instructor's folder with further cases, see exercises.py
    package   where the checks are
    starters  the folder of the exercises as they are handed out: a cell that is still the same has no marks
    source    the folder whose minillm the learner's process imports
    seconds   for the cells between two tasks, for a task's own cell, and for all of its cases, each
    """

    seed: int | None = None
    extra: Path | None = None
    package: str = PACKAGE
    starters: Path = SOURCE / "exercises"
    source: Path = SOURCE
    seconds: float = TASK_SECONDS


@dataclass(frozen=True)
class Report:
    """Marks of one notebook. `error` is set, and `results` empty, where the file could not be graded at all."""

    file: str
    exercise: str = ""
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""
    check_version: str = ""
    seed: int = 0
    network: str = ""
    output: str = ""

    @property
    def score(self) -> float:
        return round(sum(result.score for result in self.results), 2)

    @property
    def max_score(self) -> int:
        return sum(result.points for result in self.results)

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        return {
            "file": self.file,
            "exercise": self.exercise,
            "score": self.score,
            "max_score": self.max_score,
            "error": self.error,
            "tasks": [_task_dict(result) for result in self.results],
            "notes": self.notes,
            "course_version": __version__,
            "check_version": self.check_version,
            "seed": self.seed,
            "device": DEVICE,
            "network": self.network,
            "output": self.output,
        }


def grade(path: Path, options: Options | None = None, judging: threading.Lock | None = None) -> Report:
    """Grade one notebook. Raises GradeError when the file is no notebook or belongs to no exercise.

    judging  held while cases are made and records judged, where several notebooks are graded by threads at once
    """
    options, judging = options or Options(), judging or threading.Lock()
    cells = read_cells(path)
    exercise = exercise_of(cells, path)
    tasks = load_tasks(exercise, options.package)
    if options.extra:
        tasks = add_cases(tasks, options.extra / f"{exercise}.py")
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    version = check_version(exercise, options.package)  # read before learner code runs
    starters = {cell.task: cell for path in options.starters.glob(f"{exercise}_*.ipynb") for cell in read_cells(path)}
    interpret = any(isinstance(task, KernelTask) for task in tasks)
    with Learner(exercise, options.package, options.source, options.seconds, interpret) as learner:
        session = Session(learner, starters, seed, options.seconds, judging)
        results, notes = session.grade(cells, tasks)
    if any("NameError" in diagnosis for result in results for diagnosis in result.items.values()):
        notes.append(FRESH)
    return Report(path.name, exercise, results, notes, "", version, seed, learner.network, learner.printed)


def try_apart(task: Task, cells: list[Cell], seed: int, options: Options | None = None) -> Result:
    """One task, judged as `grade` does, in a process of its own: what `check` needs for a kernel."""
    options = options or Options()
    exercise = task.id.partition(".")[0]
    with Learner(exercise, options.package, options.source, options.seconds) as learner:
        (result,), _ = Session(learner, {}, seed, options.seconds, threading.Lock()).grade(cells, (task,))
    return result


def grade_folder(folder: Path, workers: int, options: Options | None = None) -> Iterator[Report]:
    """A report for every notebook below `folder`, in the order of their names. A broken file has a report, too."""
    judging = threading.Lock()
    paths = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    if not paths:
        raise GradeError(f"{folder} holds no notebook")

    def one(path: Path) -> Report:
        name = path.relative_to(folder).as_posix()
        try:
            return _renamed(grade(path, options, judging), name)
        except MinillmError as error:
            return Report(name, error=str(error))
        except Exception as error:
            return Report(name, error=f"the grader failed: {type(error).__name__}: {error}")

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(one, paths)


@dataclass(frozen=True)
class Session:
    """One notebook's way through the learner's process.

    starters  task id -> the cell as it was handed out
    judging   held while cases are made and records judged
    """

    learner: Learner
    starters: dict[str, Cell]
    seed: int
    seconds: float
    judging: threading.Lock

    def grade(self, cells: list[Cell], tasks: tuple[Task, ...]) -> tuple[list[Result], list[str]]:
        """(result of each task, what went wrong in the cells between them)."""
        places = {cell.task: cell.number for cell in cells}  # the last cell of a task counts
        last = max((places.get(task.id, 0) for task in tasks), default=0)
        results, notes, deadline = {}, [], time.monotonic() + self.seconds
        for cell in cells[:last]:
            task = next((task for task in tasks if places.get(task.id) == cell.number), None)
            left = max(deadline - time.monotonic(), LEAST_SECONDS)
            error = self.learner.run(cell, self.seconds if task else left)
            if task:
                results[task.id] = fail(task, error) if error else self.judge(task, cell)
                deadline = time.monotonic() + self.seconds
            elif error:
                notes.append(f"code cell {cell.number}: {error}")
        missing = "no cell starts with `# task: {}`"
        return [results.get(task.id) or fail(task, missing.format(task.id)) for task in tasks], notes

    def judge(self, task: Task, cell: Cell) -> Result:
        """Make the cases of a task now, call the learner's object on each, judge what comes back."""
        if task.id in self.starters and same_code(cell.source, self.starters[task.id].source):
            return fail(task, UNSOLVED)
        if not is_gradable(task):
            return fail(task, NO_TRITON, gradable=False)
        with self.judging:
            cases = task.cases(task_seed(self.seed, task.id))
        rounds = [(task, cases, self.learner.drive)]
        if isinstance(task, KernelTask):
            rounds.append((replace(task, judge=judge_compiled), task.compile_cases(), self.learner.compile))
        verdicts = []
        for judged, cases, call in rounds:
            outcomes = self.outcomes(judged, cases, call)
            with self.judging:
                verdicts += verdicts_of(judged, outcomes)
        return summarize(task, verdicts)

    def outcomes(self, task: Task, cases: list[Case], call) -> list[tuple[Case, object]]:
        """Each case with its record or Failure; once the time is up or the process gone, the rest fail with it."""
        deadline = time.monotonic() + self.seconds
        outcomes = []
        for case in cases:
            try:
                outcomes.append((case, call(task, case, max(deadline - time.monotonic(), 0.001))))
            except ProcessEnded as ended:
                late = time.monotonic() >= deadline
                failure = Failure(f"it did not end within {self.seconds:.0f} s" if late else f"it {ended}")
                return outcomes + [(rest, failure) for rest in cases[len(outcomes) :]]
        return outcomes


def task_seed(seed: int, task_id: str) -> int:
    """Each task's own seed: the cases of one tell nothing about those of the next."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{task_id}".encode()).digest()[:4]) >> 1


def _task_dict(result: Result) -> dict:
    items = [{"item": item, "passed": not why, "message": why} for item, why in result.items.items()]
    task = result.task
    return {
        "id": task.id,
        "title": task.title,
        "score": result.score,
        "max_score": result.points,
        "gradable": result.gradable,
        "message": result.message,
        "items": items,
    }


def _renamed(report: Report, name: str) -> Report:
    return Report(**{**vars(report), "file": name})
