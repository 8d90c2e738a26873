"""From the source of a solved task cell to the starter that a learner gets, and whether the answer leaks.

### BEGIN SOLUTION        the region, inside a function's body, becomes `raise NotImplementedError(...)`
...
### END SOLUTION
### BEGIN STARTER         or, where such a block follows at once, its lines without their `# `:
# total = x.sum()         the starter of a "find the bug" task holds the bug
### END STARTER
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

MARK = re.compile(r"^\s*### (BEGIN|END) (SOLUTION|STARTER)\s*$")
LIKE_A_MARK = re.compile(r"###.*\b(BEGIN|END)\b|\b(SOLUTION|STARTER)\b.*###", re.IGNORECASE)
LEAK_LENGTH = 25


class StarterError(Exception):
    """A solution from which no starter can be made; the message says which line and why."""


@dataclass(frozen=True)
class Region:
    """A solution between its marks and the starter that replaces it, as lines; `begin` counts lines from 0."""

    begin: int
    end: int
    solution: list[str]
    starter: list[str] | None


def make_starter(source: str, task: str) -> tuple[str, list[Region]]:
    """(the cell as a learner gets it, what was taken out). Raises StarterError."""
    lines = source.splitlines()
    regions = find_regions(lines)
    if not regions:
        raise StarterError("the task has no SOLUTION region: the exercise would come solved")
    tree = _parse(source, "the solution")
    made = list(lines)
    for region in reversed(regions):
        function = _function_around(tree, region, lines)
        indent = re.match(r"\s*", lines[region.begin])[0]
        starter = region.starter
        if starter is None:
            if _is_kernel(function):
                raise StarterError(
                    f"line {region.begin + 1}: a Triton kernel cannot raise; give it a STARTER, or move the region "
                    "to its launcher"
                )
            starter = [f'{indent}raise NotImplementedError("{task}: {function.name} is not written yet")']
        made[region.begin : region.end] = starter
    starter = "\n".join(made)
    if _outline(tree) != _outline(_parse(starter, "the starter")):
        raise StarterError("the starter differs from the solution outside of function bodies")
    return starter, regions


def find_regions(lines: list[str]) -> list[Region]:
    """The regions of a cell in order. Raises StarterError for marks that do not pair up."""
    found = []
    marks = [(number, match.groups()) for number, line in enumerate(lines) if (match := MARK.match(line))]
    for number, line in enumerate(lines):
        if LIKE_A_MARK.search(line) and not MARK.match(line):
            raise StarterError(f"line {number + 1} looks like a mark and is none: {line.strip()}")
    kinds = [" ".join(mark) for _, mark in marks]
    place = 0
    while place < len(marks):
        if kinds[place : place + 2] != ["BEGIN SOLUTION", "END SOLUTION"]:
            raise StarterError(f"line {marks[place][0] + 1}: {kinds[place]} does not pair up")
        begin, end = marks[place][0], marks[place + 1][0]
        place, starter, after = place + 2, None, end + 1
        if kinds[place : place + 2] == ["BEGIN STARTER", "END STARTER"] and marks[place][0] == end + 1:
            starter = [
                _uncomment(line, number) for number, line in _between(lines, marks[place][0], marks[place + 1][0])
            ]
            after, place = marks[place + 1][0] + 1, place + 2
        found.append(Region(begin, after, lines[begin + 1 : end], starter))
    return found


def leaks(regions: list[Region], exercise: str) -> Iterator[str]:
    """Lines of the solutions, longer than 25 characters and in no starter of theirs, that stand in `exercise`."""
    there = {line.strip() for line in exercise.splitlines()}
    for region in regions:
        given = {line.strip() for line in region.starter or ()}
        for line in region.solution:
            line = line.strip()
            if len(line) > LEAK_LENGTH and line not in given and (line in there or line in exercise):
                yield line


def _between(lines: list[str], begin: int, end: int) -> list[tuple[int, str]]:
    return list(enumerate(lines))[begin + 1 : end]


def _uncomment(line: str, number: int) -> str:
    match = re.fullmatch(r"(\s*)#(?: (.*))?", line)
    if not match:
        raise StarterError(f"line {number + 1}: a line of a STARTER is a comment: `# code`")
    return (match[1] + (match[2] or "")).rstrip()


def _parse(source: str, what: str) -> ast.Module:
    try:
        compile(source, what, "exec")  # finds more than the parser: a `return` outside of a function
        return ast.parse(source)
    except SyntaxError as error:
        raise StarterError(f"{what} is not Python, line {error.lineno}: {error.msg}") from error


def _function_around(tree: ast.Module, region: Region, lines: list[str]) -> ast.FunctionDef:
    """The innermost function whose body holds the region."""
    code = [
        n for n, line in _between(lines, region.begin, region.end) if line.strip() and not line.strip().startswith("#")
    ]
    last = code[-1] + 1 if code else 0  # as ast counts
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= region.begin
        and node.end_lineno >= last > 0
        and node.col_offset < len(lines[region.begin]) - len(lines[region.begin].lstrip())
    ]
    if not around:
        raise StarterError(f"line {region.begin + 1}: the region is not inside the body of one function")
    return max(around, key=lambda node: node.lineno)


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _outline(tree: ast.Module) -> str:
    """The cell without the bodies of its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []
    return ast.dump(tree)
