"""From what a learner's object did to marks: call it on a case, judge the record, count the items.

The same few functions serve `check` in a notebook and `minillm grade`. There `drive_case` runs in another process, and
everything it returns is taken for what it is: data that may be wrong in any way.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass

from minillm.course.grader.task import Case, Record, Task, Verdicts
from minillm.course.grader.wire import WireError, roundtrip
from minillm.errors import GradeError

MAX_SENTENCE = 300
UNSOLVED = "not solved yet"


@dataclass(frozen=True)
class Failure:
    """A case that gave no record. `unsolved`: the starter's NotImplementedError, not a mistake."""

    sentence: str
    unsolved: bool = False


@dataclass(frozen=True)
class Result:
    """One task's outcome: item -> "" or its first diagnosis. `message` replaces the items' where one cause took all.

    A task that this machine cannot grade has no points to reach and none lost.
    """

    task: Task
    items: dict[str, str]
    message: str = ""
    gradable: bool = True

    @property
    def points(self) -> int:
        return self.task.points if self.gradable else 0

    @property
    def passed(self) -> int:
        return sum(not diagnosis for diagnosis in self.items.values())

    @property
    def score(self) -> float:
        return round(self.task.points * self.passed / len(self.items), 2)

    @property
    def lost(self) -> dict[str, str]:
        return {item: diagnosis for item, diagnosis in self.items.items() if diagnosis}

    @property
    def told(self) -> list[str]:
        """What a learner reads: a line per lost item, each diagnosis spelled out once."""
        if self.message:
            return [self.message]
        if len(self.items) > 1 and len(self.lost) == len(self.items) and len({*self.lost.values()}) == 1:
            return [f"every item: {next(iter(self.lost.values()))}"]
        first: dict[str, str] = {}
        for item, diagnosis in self.lost.items():
            first.setdefault(diagnosis, item)
        return [
            f"{item}: {diagnosis if first[diagnosis] == item else f'the same as {first[diagnosis]}'}"
            for item, diagnosis in self.lost.items()
        ]


def drive_case(task: Task, obj: object, case: Case) -> Record | Failure:
    """Call the learner's object on one case, both as the other side of a wire sees them."""
    try:
        return roundtrip(task.drive(obj, roundtrip(case)))
    except WireError as error:
        return Failure(str(error))
    except (Exception, SystemExit) as error:  # whatever a learner's code may raise, apart from Ctrl-C
        return Failure(explain(error, code_file(obj)), isinstance(error, NotImplementedError))


def judge_case(task: Task, case: Case, outcome: object) -> Verdicts:
    """A verdict on each item of the case. Never raises: a record that makes the judge fail is a wrong record."""
    if isinstance(outcome, Failure):
        return dict.fromkeys(case["items"], outcome.sentence)
    if not isinstance(outcome, dict):
        return dict.fromkeys(case["items"], f"the record is {type(outcome).__name__}, not a dict")
    try:
        verdicts = task.judge(case, outcome)
    except Exception as error:
        verdicts = dict.fromkeys(case["items"], f"the result cannot be judged: {shorten(_name(error))}")
    return {item: verdicts.get(item, "the check gave no verdict") for item in case["items"]}


def verdicts_of(task: Task, outcomes: Iterable[tuple[Case, object]]) -> list[tuple[Verdicts, bool]]:
    """(verdicts, whether the case found the task unsolved) for each case."""
    return [
        (judge_case(task, case, outcome), isinstance(outcome, Failure) and outcome.unsolved)
        for case, outcome in outcomes
    ]


def summarize(task: Task, verdicts: list[tuple[Verdicts, bool]]) -> Result:
    """An item is right when it is in each of its cases; one that no case decides is lost."""
    if verdicts and all(unsolved for _, unsolved in verdicts):
        return fail(task, UNSOLVED)
    items: dict[str, list[str]] = {item: [] for item in task.items}
    for decided, _ in verdicts:
        if unknown := decided.keys() - items.keys():
            raise GradeError(f"a case of {task.id} decides {', '.join(sorted(unknown))}, which is no item of the task")
        for item, diagnosis in decided.items():
            items[item].append(diagnosis)
    return Result(task, {item: _first(found) for item, found in items.items()})


def fail(task: Task, message: str, gradable: bool = True) -> Result:
    """A task of which every item is lost for the same reason."""
    return Result(task, dict.fromkeys(task.items, message), message, gradable)


def explain(error: BaseException, file: str | None = None) -> str:
    """An exception as one sentence; with the line in `file`, the learner's own code, where it has one."""
    text = str(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return "it needs more memory than the limit allows"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError):
        text, lines = error.msg, [error.lineno]
    where = f" (line {lines[-1]} of the cell)" if file and lines else ""
    return f"raises {shorten(_name(error, text))}{where}"


def code_file(obj: object) -> str | None:
    """The file name under which a function, or a class by its first method, was compiled."""
    members = vars(obj).values() if isinstance(obj, type) else [obj]
    codes = (getattr(member, "__code__", None) for member in members)
    return next((code.co_filename for code in codes if code), None)


def shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SENTENCE else line[: MAX_SENTENCE - 3] + "..."


def _name(error: BaseException, text: str | None = None) -> str:
    text = str(error) if text is None else text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _first(diagnoses: list[str]) -> str:
    if not diagnoses:
        return "no case decided this item"
    return next((diagnosis for diagnosis in diagnoses if diagnosis), "")
