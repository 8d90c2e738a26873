"""Run the notebooks, clean them and write them back: `make notebooks REPO=owner/name REF=tag`.

The committed notebook is the executed one. Cleaning keeps outputs, counts 1..n and cell ids, and drops what differs
from run to run or from machine to machine: timestamps, widget state, the Python version. A cell that raises, or
that writes to stderr, stops the run and nothing is written. structure.py holds the rules that the result obeys.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from minillm.course import mine
from minillm.course.build.addresses import (
    BADGE_IMAGE,
    ROOT,
    SETUP_MARK,
    badge_cell,
    read_repo,
    setup_cell,
    write_address,
)
from minillm.course.build.pictures import attach_pictures, drop_widget_views, write_readme_picture
from minillm.course.build.structure import find_problems

CELL_TIMEOUT_S = 300
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE_INFO = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}
KEPT_METADATA = ("accelerator", "colab")
KEPT_CELL_METADATA = ("tags", "cellView")


class NotebookError(Exception):
    """A cell failed or wrote to stderr; the message names the notebook and the cell."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="run, clean and rewrite the notebooks")
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; all lessons and solutions when none is named")
    parser.add_argument("--repo", help="owner/name; written to pyproject.toml, which holds the default")
    parser.add_argument("--ref", default="main", help="branch or tag that badges and clone lines point to")
    parser.add_argument("--no-run", action="store_true", help="clean and rewrite addresses only")
    args = parser.parse_args(argv)
    if args.repo:
        write_address(ROOT, args.repo, args.ref)
    repo = read_repo()
    bad = 0
    for path in args.paths or lessons_and_solutions():
        started = time.monotonic()
        try:
            problems = rebuild(path.resolve(), repo, args.ref, run=not args.no_run)
        except NotebookError as error:
            problems = [str(error), "not written"]
        print(f"{path}: {time.monotonic() - started:.0f} s, {'; '.join(problems) or 'good'}", flush=True)
        bad += bool(problems)
    return 1 if bad else 0


def lessons_and_solutions(root: Path = ROOT) -> list[Path]:
    return sorted(root.glob("notebooks/*.ipynb")) + sorted(root.glob("solutions/*.ipynb"))


def rebuild(path: Path, repo: str, ref: str, run: bool = True, root: Path = ROOT) -> list[str]:
    """Rewrite one notebook in place. Returns the structure rules that the result breaks, none when it is good.

    Raises NotebookError, before anything is written, when a cell raises or writes to stderr, or when a picture
    that the text shows was not drawn.
    """
    notebook = nbformat.read(path, as_version=4)
    place_opening_cells(notebook, repo, ref, path.relative_to(root).as_posix())
    if run:
        execute(notebook, path)
    clean(notebook)
    try:
        attach_pictures(notebook)
        write_readme_picture(notebook, path)
    except ValueError as error:
        raise NotebookError(f"{path.name}: {error}") from error
    text = nbformat.writes(notebook).rstrip("\n") + "\n"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    temporary.replace(path)
    return find_problems(path, root)


def place_opening_cells(notebook: NotebookNode, repo: str, ref: str, path: str) -> None:
    """Write the Colab badge and the set-up cell, replacing the ones that are there."""
    cells = notebook.cells
    if not cells or BADGE_IMAGE not in cells[0].source:
        cells.insert(0, nbformat.v4.new_markdown_cell(id="badge"))
    cells[0].source = badge_cell(repo, ref, path)
    code = next((i for i, cell in enumerate(cells) if cell.cell_type == "code"), 1)
    if code == len(cells) or not cells[code].source.startswith(SETUP_MARK):
        cells.insert(code, nbformat.v4.new_code_cell(id="setup"))
    cells[code].source = setup_cell(repo, ref, path)


def execute(notebook: NotebookNode, path: Path) -> None:
    """Run every cell in a fresh kernel of this very Python, in the notebook's own folder."""
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # not a python3 kernel that the user once registered elsewhere
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--log-level=40"],  # errors only: the kernel's own notes are no part of a notebook
    )
    try:
        with mine.nothing_solved():  # what you solved here must not show in a committed output
            client.execute()
    except CellExecutionError as error:
        raise NotebookError(f"{path.name}: a cell failed\n{error}") from error
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                raise NotebookError(f"{path.name}: cell {cell.id} writes to stderr: {output.text.strip()[:300]}")


def clean(notebook: NotebookNode) -> None:
    """Remove what changes from run to run; counts, ids and outputs stay."""
    kept = {key: notebook.metadata[key] for key in KEPT_METADATA if key in notebook.metadata}
    notebook.metadata = nbformat.from_dict({**kept, "kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in KEPT_CELL_METADATA})
        if cell.cell_type == "code":
            cell.outputs = merge_streams(cell.outputs)
    drop_widget_views(notebook)


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """One stream output per uninterrupted run of prints: how a kernel cuts them up is chance."""
    merged: list[NotebookNode] = []
    for output in outputs:
        before = merged[-1] if merged else None
        if before and output.output_type == before.output_type == "stream" and output.name == before.name:
            before.text += output.text
        else:
            merged.append(output)
    return merged


if __name__ == "__main__":
    sys.exit(main())
