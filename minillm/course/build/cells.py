"""Reading a notebook's cells: what the rules of structure.py, lesson_text.py and exercise_text.py ask of them.

A notebook here is its JSON with every source and text joined to one string; `read` makes it so.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path


def read(path: Path) -> dict:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:  # on disk a text may be a list of lines
        cell["source"] = "".join(cell["source"])
        for output in cell.get("outputs", []):
            output["text"] = "".join(output.get("text", ""))
            output["data"] = {kind: join(data) for kind, data in output.get("data", {}).items()}
    return notebook


def join(data: object) -> object:
    return "".join(data) if isinstance(data, list) and all(isinstance(line, str) for line in data) else data


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def texts(notebook: dict) -> list[str]:
    return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


def marks(cell: dict) -> set[str]:
    """nbval's marks, as it reads them: tags and comment lines, in the spelling of tags."""
    comments = re.findall(r"^\s*#+\s*(NBVAL_\w+)\s*$", cell["source"], re.MULTILINE)
    return set(cell["metadata"].get("tags", [])) | {comment.lower().replace("_", "-") for comment in comments}


def alts(cell: dict) -> list[str]:
    """The alt texts of the pictures that a code cell has drawn, in order."""
    return [
        output.get("metadata", {}).get(kind, {}).get("alt", "")
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
        if kind.startswith("image/")
    ]


def printed(cell: dict) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def python(cell: dict) -> ast.Module:
    """The code of a cell; lines of IPython (% and !) become empty, what is not Python an empty module."""
    try:
        return ast.parse(re.sub(r"^[ \t]*[%!].*$", "", cell["source"], flags=re.MULTILINE))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def calls(cell: dict, name: str) -> Iterator[ast.Call]:
    """Every call of `name(...)` or `anything.name(...)` in a cell."""
    for node in ast.walk(python(cell)):
        if isinstance(node, ast.Call) and name == getattr(node.func, "attr", getattr(node.func, "id", "")):
            yield node


def imports(notebook: dict) -> dict[str, str]:
    """Name in the notebook -> dotted path of what was imported under it."""
    found = {}
    for cell in code_cells(notebook):
        for node in ast.walk(python(cell)):
            if isinstance(node, ast.Import):
                found |= {
                    a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
                }
            elif isinstance(node, ast.ImportFrom):
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def bound_names(notebook: dict) -> set[str]:
    """What the notebook's own code imports, defines or assigns, anywhere in it."""
    found = set(imports(notebook))
    for cell in code_cells(notebook):
        for node in ast.walk(python(cell)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return found
