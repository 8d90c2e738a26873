"""Your own parts of the engine: what passed a check, kept as small Python files.

    my_minillm/ex02_2_causal_mask.py      one file per solved task: the function and what it needs

`check` saves here; the capstone boots an engine from these files and stamps each picture "yours" or "reference".
MINILLM_MINE names another folder. The notebook builder and the tests name an empty one, so that what you solved on
your machine never changes a committed output. The files are plain source: read them, edit them, delete them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from minillm.errors import GradeError

VARIABLE = "MINILLM_MINE"
FILE = re.compile(r"ex(\d\d)_(\d+)_(\w+)\.py")
TASK_ID = re.compile(r"ex(\d\d)\.(\d+)")


def folder() -> Path:
    """Where solved tasks are kept: MINILLM_MINE, else my_minillm/ beside the package."""
    return Path(os.environ.get(VARIABLE) or Path(__file__).resolve().parents[2] / "my_minillm")


@contextmanager
def nothing_solved() -> Iterator[None]:
    """Inside, this process and those it starts see an empty folder, which goes away with what was saved in it."""
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="minillm-mine-") as empty:
        os.environ[VARIABLE] = empty
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


def save(task_id: str, name: str, source: str) -> Path:
    """Keep `source`, which defines `name`, as the solution of `task_id` ("ex02.2"); an older one is replaced."""
    if not TASK_ID.fullmatch(task_id) or not name.isidentifier():
        raise GradeError(f"cannot save {name!r} for task {task_id!r}: expected a task like ex02.2 and a Python name")
    path = folder() / f"{task_id.replace('.', '_')}_{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"# {task_id}: passed its check\n\n{source.strip()}\n", encoding="utf-8", newline="\n")
    temporary.replace(path)
    return path


def solved() -> dict[str, Path]:
    """Task id -> file of every solved task, in the order of the course."""
    found = {}
    for path in sorted(folder().glob("ex*.py")):
        if match := FILE.fullmatch(path.name):
            found[f"ex{match[1]}.{int(match[2])}"] = path
    return found


def find(name: str) -> Path | None:
    """The file that defines `name`; when several tasks do, that of the latest lesson."""
    paths = [path for path in solved().values() if FILE.fullmatch(path.name)[3] == name]
    return paths[-1] if paths else None


def load(name: str) -> Callable | None:
    """Your `name`, or None where you have not solved it.

    Raises GradeError when the file is there and cannot be used, since running the reference unnoticed would be worse.
    """
    path = find(name)
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location(f"my_minillm.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, name)
    except Exception as error:  # a learner's file may raise anything
        problem = f"{type(error).__name__}: {error}"
        raise GradeError(f"{path} does not load ({problem}): mend it, or delete it to use the reference") from error


def stamp(name: str) -> str:
    """What a picture made with `name` says in its corner: "yours" or "reference"."""
    return "reference" if find(name) is None else "yours"
