"""The rules that every committed notebook obeys, each one short function. A unit test runs them over all notebooks.

    python -m minillm.course.build.structure [PATH ...]

A rule yields one sentence per offence and nothing for a good notebook. Why the rules of this file: a learner on
GitHub sees the outputs, and nbval compares them (never those of a cell without a count). Those for the text are in
prose.py, for the form of a lesson in lesson_text.py, for the form of an exercise in exercise_text.py; the folder of
a notebook says which of them hold.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from minillm.course.build import cells, exercise_text, lesson_text, prose
from minillm.course.build.addresses import ROOT, SETUP_ADDRESS, badge_cell, read_repo, setup_cell
from minillm.course.build.cells import code_cells, marks

FOLDERS = ("notebooks", "solutions", "exercises")
MAX_BYTES = 1_000_000
MAX_CODE_COLUMNS = 100
MAX_IGNORED_SHARE = 0.3  # of the code cells; their outputs are run and not compared
CELL_ID = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
Rule = Callable[[dict], Iterable[str]]


def find_problems(path: Path, root: Path = ROOT) -> list[str]:
    """Every offence in one notebook, as sentences. `root` is the repository."""
    notebook = cells.read(path)
    problems = [problem for rule in rules_of(path) for problem in rule(notebook)]
    problems += check_opening_cells(notebook, path.relative_to(root).as_posix(), read_repo(root))
    problems += prose.check_links(notebook, path.parent)
    size = path.stat().st_size
    if size > MAX_BYTES:
        problems.append(f"{size:,} bytes, allowed are {MAX_BYTES:,}: smaller or fewer pictures")
    return problems


def rules_of(path: Path) -> tuple[Rule, ...]:
    """The rules for a notebook of this folder; outside the course's three folders those that hold for any."""
    if path.parent.name == "notebooks":
        return (*EXECUTED, *COMMON, *lesson_text.rules(path.name))
    if path.parent.name == "solutions":
        return (*EXECUTED, *COMMON, *exercise_text.rules(path.name))
    if path.parent.name == "exercises":
        return (*COMMON, *exercise_text.rules(path.name), exercise_text.check_unsolved)
    return (*EXECUTED, *COMMON)


def check_metadata(notebook: dict) -> Iterator[str]:
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "kernelspec is not python3"
    if "widgets" in notebook["metadata"]:
        yield "metadata.widgets holds widget state"
    for cell in notebook["cells"]:
        if "execution" in cell["metadata"]:
            yield f"cell {cell.get('id')}: metadata.execution holds timestamps"


def check_ids(notebook: dict) -> Iterator[str]:
    seen = set()
    for index, cell in enumerate(notebook["cells"]):
        name = cell.get("id", "")
        if not CELL_ID.match(name):
            yield f"cell number {index} has no valid id"
        elif name in seen:
            yield f"two cells have the id {name}"
        seen.add(name)


def check_counts(notebook: dict) -> Iterator[str]:
    counts = [cell.get("execution_count") for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}, not 1 to {len(counts)}: run all cells in order"


def check_outputs(notebook: dict) -> Iterator[str]:
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield f"cell {cell.get('id')} ends in an error"
            if output.get("name") == "stderr":
                yield f"cell {cell.get('id')} writes to stderr"


def check_code(notebook: dict) -> Iterator[str]:
    for cell in code_cells(notebook):
        name, source = cell.get("id"), cell["source"]
        if "clear_output" in source:
            yield f"cell {name} uses clear_output, which nbval cannot compare"
        for number, line in enumerate(source.splitlines(), 1):
            if len(line) > MAX_CODE_COLUMNS:
                yield f"cell {name}, line {number}: {len(line)} columns, allowed are {MAX_CODE_COLUMNS}"
        try:
            if ends_in_semicolon(source):
                yield f"cell {name} ends a line in ';', which hides a value"
        except (tokenize.TokenError, SyntaxError) as error:
            yield f"cell {name} is not Python: {error}"


def check_nbval_marks(notebook: dict) -> Iterator[str]:
    cells = code_cells(notebook)
    for cell in cells:
        if marks(cell) & {"nbval-skip", "nbval-raises-exception", "raises-exception"}:
            yield f"cell {cell.get('id')} is not run, or may fail: only nbval-ignore-output is allowed"
    ignored = sum("nbval-ignore-output" in marks(cell) for cell in cells)
    if ignored > MAX_IGNORED_SHARE * len(cells):
        yield f"{ignored} of {len(cells)} cells have ignored output, allowed is a share of {MAX_IGNORED_SHARE}"


EXECUTED: tuple[Rule, ...] = (check_counts, check_outputs)
COMMON: tuple[Rule, ...] = (check_metadata, check_ids, check_code, check_nbval_marks, *prose.RULES)


def check_opening_cells(notebook: dict, path: str, repo: str) -> Iterator[str]:
    """The first cell is the Colab badge of this very notebook, the first code cell is the set-up cell."""
    code = code_cells(notebook)
    address = SETUP_ADDRESS.search(code[0]["source"]) if code else None
    ref = address.group(2) if address else "main"
    if not notebook["cells"] or notebook["cells"][0]["source"] != badge_cell(repo, ref, path):
        yield f"the first cell is not the Colab badge of {repo}, {path}: run `make notebooks`"
    if not code or code[0]["source"] != setup_cell(repo, ref, path):
        yield f"the first code cell is not the set-up cell of {repo}: run `make notebooks`"


def ends_in_semicolon(source: str) -> bool:
    """True if a line of code, comments aside, ends in ';'. Lines of IPython (%, !) are not read."""
    python = re.sub(r"^[ \t]*[%!].*$", "", source, flags=re.MULTILINE) + "\n"
    skipped = (tokenize.COMMENT, tokenize.NL)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(python).readline) if t.type not in skipped]
    pairs = zip(tokens, tokens[1:], strict=False)
    return any(a.string == ";" and b.type in (tokenize.NEWLINE, tokenize.ENDMARKER) for a, b in pairs)


def main(paths: list[str]) -> int:
    found = 0
    for path in [Path(p).resolve() for p in paths] or committed():
        for problem in find_problems(path):
            found += 1
            print(f"{path.relative_to(ROOT)}: {problem}")
    return 1 if found else 0


def committed(root: Path = ROOT) -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((root / folder).glob("*.ipynb"))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
