"""`check` in a notebook: runs a task's cases right here and says what is lost and why. Feedback, not marks.

Cases come from a fixed seed, so that running a cell twice prints the same lines. What passes is saved as yours.
A kernel is tried in processes of its own, which takes some seconds: one interprets it, one compiles it.
"""

from __future__ import annotations

import inspect
import linecache
import textwrap
from dataclasses import replace
from itertools import zip_longest

from minillm.course import mine
from minillm.course.grader.cells import Cell, make_cell, source_of
from minillm.course.grader.exercises import PACKAGE, find_task
from minillm.course.grader.grade import Options, try_apart
from minillm.course.grader.kernel_task import KernelTask
from minillm.course.grader.marks import Result, drive_case, summarize, verdicts_of
from minillm.course.grader.task import Task
from minillm.course.timing import report

FEEDBACK_SEED = 0


def check(task_id: str, obj: object, package: str = PACKAGE) -> None:
    """Try your function or class on the cases of a task and print one line, then one per lost item.

    Never raises for what your code does. When nothing is lost, the source is kept by minillm.course.mine.
    """
    task = find_task(task_id, package)
    cells = _executed_cells()
    source = source_of(task.name, cells) or _own_source(obj)
    if isinstance(task, KernelTask):
        result = _try_kernel(task, source, cells, package)
    else:
        result = try_here(task, obj, FEEDBACK_SEED)
    print("\n".join(lines_of(result)))
    if not result.lost:
        _save(task, source)


def try_here(task: Task, obj: object, seed: int) -> Result:
    """Cases, calls and verdicts in this process."""
    return summarize(task, verdicts_of(task, ((case, drive_case(task, obj, case)) for case in task.cases(seed))))


def lines_of(result: Result) -> list[str]:
    """What `check` prints."""
    task = result.task
    head = f"{task.id} {task.title}: "
    if result.message:
        return [head + result.message]
    return [f"{head}{result.passed} of {len(task.items)} items", *(f"  {line}" for line in result.told)]


def _try_kernel(task: KernelTask, source: str, executed: list[str], package: str) -> Result:
    """What the task's cell needs, then the cell itself, so that errors name its own lines."""
    own = next((cell for cell in reversed(executed) if make_cell(0, cell).task == task.id), None)
    texts = [source] if own is None else [source, own]
    cells = [Cell(number, make_cell(0, text).source) for number, text in enumerate(texts, 1)]
    cells[-1] = replace(cells[-1], task=task.id)
    return try_apart(task, cells, FEEDBACK_SEED, Options(package=package))


def _save(task: Task, source: str) -> None:
    if not source:
        return report(f"not saved: no cell of this notebook defines {task.name} on its own")
    try:
        mine.save(task.id, task.name, source)
    except OSError as error:
        report(f"not saved in {mine.folder()}: {error.strerror}")


def _executed_cells() -> list[str]:
    """The sources of the cells that this kernel has run, in order; none outside of IPython."""
    try:
        from IPython import get_ipython
    except ImportError:
        return []
    shell = get_ipython()
    if shell is None:
        return []
    typed = getattr(shell.history_manager, "input_hist_raw", [])  # as typed; in `In` a %%time cell is one call
    ran = [
        raw if raw.startswith(("%%time", "%%capture")) else cell
        for cell, raw in zip_longest(shell.user_ns.get("In", []), typed, fillvalue="")
    ]
    return [cell for cell in ran if cell] or _compiled_cells(shell)


def _compiled_cells(shell) -> list[str]:
    """The cells of a kernel that keeps no history, such as nbval's: their text lies where tracebacks look for it."""
    names = getattr(shell.compile, "_filename_map", {})
    return ["".join(linecache.cache[name][2]) for name in names if name in linecache.cache]


def _own_source(obj: object) -> str:
    try:
        return textwrap.dedent(inspect.getsource(obj))
    except (OSError, TypeError):
        return ""
