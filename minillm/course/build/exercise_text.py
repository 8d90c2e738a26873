"""The form of an exercise, for its source in solutions/ and for the generated file in exercises/.

A task is a header (what, why, minutes, difficulty, points, three hints), a cell that starts with `# task: ex05.2`,
and a cell that checks it. A rule takes the notebook as JSON (see cells.py) and yields one sentence per offence.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator

from minillm.course.build.cells import calls, code_cells

FILE_NAME = re.compile(r"ex(\d\d)_\w+\.ipynb")
TASK = re.compile(r"# task: (ex(\d\d)\.(\d+))[ \t]*(?:\n|$)")
LIKE_A_TASK = re.compile(r"^\s*#+\s*task\b", re.IGNORECASE | re.MULTILINE)
HINT = re.compile(r"<details[^>]*>\s*<summary>\s*Hint (\d)\b.*?</summary>(.*?)</details>", re.DOTALL | re.IGNORECASE)
HEADER_PARTS = {
    "what": re.compile(r"\bwhat\b", re.IGNORECASE),
    "why": re.compile(r"\bwhy\b", re.IGNORECASE),
    "minutes": re.compile(r"\b\d+ min(utes)?\b", re.IGNORECASE),
    "a difficulty of 1 to 5": re.compile(r"\bdifficulty\W{0,6}[1-5]\b", re.IGNORECASE),
    "points": re.compile(r"\b\d+ points?\b|\bpoints?\W{1,6}\d+", re.IGNORECASE),
}
MINUTES = re.compile(r"\b(\d+) min(?:utes)?\b", re.IGNORECASE)
MAX_MINUTES = 60
BUG = re.compile(r"\bfind the bug\b", re.IGNORECASE)
FIRST_WITH_A_BUG = 3
THREAD = re.compile(
    r"https://(?:github\.com/[\w.-]+/[\w.-]+/(?:issues|pull|discussions)/\d+"
    r"|discuss\.[\w.]+/t/\S+|forums?\.[\w.-]+/t/\S+|stackoverflow\.com/questions/\d+)"
)
SOURCE_MARK = re.compile(r"^\s*### (?:BEGIN|END) (?:SOLUTION|STARTER)", re.MULTILINE)


def rules(file_name: str) -> tuple[Callable[[dict], Iterable[str]], ...]:
    """The rules for `ex05_name.ipynb`, its number bound into those that need it."""
    match = FILE_NAME.match(file_name)
    if match is None:
        return (lambda notebook: [f"{file_name} is not called exNN_name.ipynb"],)
    numbered = (functools.partial(rule, number=match[1]) for rule in (check_tasks, check_bug))
    return (*numbered, check_task_headers, check_task_checks)


def check_tasks(notebook: dict, number: str) -> Iterator[str]:
    """Two or three tasks of this exercise, counted from 1 in order, at most an hour together."""
    found = [match for cell in code_cells(notebook) if (match := TASK.match(cell["source"]))]
    for cell in code_cells(notebook):
        if LIKE_A_TASK.search(cell["source"]) and not TASK.match(cell["source"]):
            yield f"cell {cell.get('id')} does not start with `# task: ex{number}.1`, alone on its first line"
    wanted = [f"ex{number}.{k}" for k in range(1, len(found) + 1)]
    if [match[1] for match in found] != wanted or len(found) not in (2, 3):
        names = ", ".join(match[1] for match in found) or "none"
        yield f"its tasks are {names}; wanted are two or three, counted from ex{number}.1"
    minutes = [MINUTES.search(header) for _, _, header, _ in tasks(notebook)]
    if sum(int(match[1]) for match in minutes if match) > MAX_MINUTES:
        yield f"its tasks take more than {MAX_MINUTES} minutes together"


def check_task_headers(notebook: dict) -> Iterator[str]:
    for name, _, header, _ in tasks(notebook):
        for part, pattern in HEADER_PARTS.items():
            if not pattern.search(header.split("<details")[0]):
                yield f"{name}: the text above the task does not say {part}"
        hints = HINT.findall(header)
        if [number for number, _ in hints] != ["1", "2", "3"] or not all(text.strip() for _, text in hints):
            yield f"{name}: wanted are three fold-outs, <details><summary>Hint 1</summary> to Hint 3, with text in them"


def check_task_checks(notebook: dict) -> Iterator[str]:
    for name, _, _, following in tasks(notebook):
        checked = [call.args[0].value for call in calls(following, "check") if call.args] if following else []
        if name not in checked:
            yield f'{name}: the code cell after the task is not check("{name}", ...)'


def check_bug(notebook: dict, number: str) -> Iterator[str]:
    """From exercise 03 on, one task is a bug that somebody had, with a link to where it was discussed."""
    if int(number) < FIRST_WITH_A_BUG:
        return
    bugs = [header for _, _, header, _ in tasks(notebook) if BUG.search(header)]
    if not bugs:
        yield "no task says `find the bug`"
    elif not any(THREAD.search(header) for header in bugs):
        yield "the task to find a bug cites no public thread: https://github.com/OWNER/NAME/issues/1"


def check_unsolved(notebook: dict) -> Iterator[str]:
    """A generated exercise carries neither results nor the marks of its source."""
    for cell in code_cells(notebook):
        if cell["outputs"] or cell["execution_count"] is not None:
            yield f"cell {cell.get('id')} has been run: an exercise is committed without outputs and counts"
        if SOURCE_MARK.search(cell["source"]):
            yield f"cell {cell.get('id')} holds a SOLUTION or STARTER mark of its source"


def tasks(notebook: dict) -> Iterator[tuple[str, dict, str, dict | None]]:
    """(id, task cell, the text directly above it, the code cell that follows) of each task."""
    cells = notebook["cells"]
    for index, cell in enumerate(cells):
        match = TASK.match(cell["source"]) if cell["cell_type"] == "code" else None
        if match:
            header = cells[index - 1]["source"] if index and cells[index - 1]["cell_type"] == "markdown" else ""
            following = next((other for other in cells[index + 1 :] if other["cell_type"] == "code"), None)
            yield match[1], cell, header, following
