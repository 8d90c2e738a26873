"""Code cells as the grader reads them: which defines which task, what of a cell is a definition, what a name needs.

Nothing here runs a cell. Lines of IPython (%, !) count as empty. Statements that only do something, a check, a plot, a
print, an assert, are no definitions: grading leaves them out, and so does what `check` saves.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

from minillm.errors import GradeError

MAX_BYTES = 20 << 20
TASK_MARK = re.compile(r"^# task: (ex\d\d\.\d+)\s*$", re.MULTILINE)
IPYTHON_LINE = re.compile(r"^[ \t]*[%!?].*$", re.MULTILINE)
SIMPLE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Assign, ast.AnnAssign)


@dataclass(frozen=True)
class Cell:
    """A code cell: its number among the code cells, from 1; Python without IPython's lines; the task it solves."""

    number: int
    source: str
    task: str | None = None


def read_cells(path: Path) -> list[Cell]:
    """The code cells of a notebook file. Raises GradeError for a file that is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise GradeError(f"{path} has {path.stat().st_size:,} bytes, allowed are {MAX_BYTES:,}")
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except OSError as error:
        raise GradeError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise GradeError(f"{path} is not a notebook of format 4 ({type(error).__name__}: {error})") from error
    return [make_cell(number, source) for number, source in enumerate(sources, 1)]


def make_cell(number: int, source: str) -> Cell:
    mark = TASK_MARK.search(source)
    return Cell(number, IPYTHON_LINE.sub("", source), mark[1] if mark else None)


def exercise_of(cells: list[Cell], path: Path) -> str:
    """ "ex02", from the first task cell, else from the file's name."""
    marks = [cell.task for cell in cells if cell.task] or re.findall(r"ex\d\d", path.name)
    if not marks:
        raise GradeError(f"{path}: no cell starts with `# task: exNN.k`, and the file's name has no exNN")
    return marks[0].partition(".")[0]


def definitions(source: str) -> str:
    """The part of a cell that defines something, with its line numbers kept; "" when nothing does.

    Calls that stand alone and a learner's own asserts go, right or wrong; everything else stays, since loops and
    conditions may define. Raises SyntaxError.
    """
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Expr | ast.Assert | ast.Pass)]
    if not tree.body:
        return ""
    lines = source.splitlines()
    kept = {number for node in tree.body for number in range(_first_line(node), node.end_lineno + 1)}
    return "\n".join(line if number in kept else "" for number, line in enumerate(lines, 1)) + "\n"


def same_code(a: str, b: str) -> bool:
    """Whether two cells define the same, comments and spacing aside."""
    try:
        return ast.dump(ast.parse(definitions(a))) == ast.dump(ast.parse(definitions(b)))
    except SyntaxError:
        return False


def source_of(name: str, sources: list[str]) -> str:
    """The last definition of `name` in cells that were run in this order, below what it needs of them.

    Needs are imports, functions, classes and plain assignments, found by name; each in its last form. "" when no cell
    defines `name` on its own.
    """
    last: dict[str, tuple[int, str, set[str]]] = {}
    for source in sources:
        for node in _statements(IPYTHON_LINE.sub("", source)):
            text = "\n".join(source.splitlines()[_first_line(node) - 1 : node.end_lineno])
            entry = (len(last), text, {n.id for n in ast.walk(node) if isinstance(n, ast.Name)})
            for bound in _names(node):
                last.pop(bound, None)
                last[bound] = entry
    wanted, found = [name], {}
    while wanted:
        name = wanted.pop()
        if name in last and name not in found:
            found[name] = last[name]
            wanted += last[name][2]
    order = list(last)
    texts = [found[bound][1] for bound in sorted(found, key=order.index)]
    return "\n\n\n".join(dict.fromkeys(texts))


def _statements(source: str) -> list[ast.stmt]:
    try:
        return [node for node in ast.parse(source).body if isinstance(node, SIMPLE)]
    except SyntaxError:
        return []  # a cell that never ran


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for target in targets for n in ast.walk(target) if _is_stored(n)]
    return [node.name]


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
