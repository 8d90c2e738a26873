"""The form of a lesson, one short rule for each part: header, street, guess, ledger, engine's code, three sentences.

A learner finds the same things in the same place in every lesson; these rules keep it so. A rule takes the notebook
as JSON, sources joined to strings, and yields one sentence per offence. structure.py applies them to notebooks/.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from minillm.course.build.cells import alts, bound_names, calls, code_cells, imports, marks, printed, texts
from minillm.course.build.symbols import has_symbol

MAX_MINUTES, MAX_EXERCISE_MINUTES = 45, 60
FILE_NAME = re.compile(r"(\d\d)_\w+\.ipynb")
MINUTES = re.compile(r"(\d+) minutes")
NO_EXERCISES = re.compile(r"\bno exercises\b", re.IGNORECASE)
LEDGER_LINES = ("invariant", "where it wins", "where it loses", "how this benchmark could mislead")
MEASURED = "~ "  # as minillm.course.timing marks it, which would bring in torch
BOX = re.compile(r"\b\w+_box(?=\()")  # what makes a widget is called so: text_box, picture_box
ITEM = re.compile(r"^(\d+)\. (.*(?:\n(?!\d+\. |\n).*)*)", re.MULTILINE)
INNER_STOP = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)[.?!]\s+(?=[A-Z])")


def rules(file_name: str) -> tuple[Callable[[dict], Iterable[str]], ...]:
    """The rules for `05_name.ipynb`, its number bound into those that need it."""
    match = FILE_NAME.match(file_name)
    if match is None:
        return (lambda notebook: [f"{file_name} is not called NN_name.ipynb"],)
    return (*(functools.partial(rule, number=match[1]) for rule in NUMBERED), *RULES)


def check_header(notebook: dict, number: str) -> Iterator[str]:
    """The title cell says the number, the minutes of the lesson, and after them those of its exercises."""
    header = title_cell(notebook, number)
    if not header:
        yield f"no title cell that starts with `# {number} · name`"
        return
    own, exercises = [*map(int, MINUTES.findall(header)), 0, 0][:2]
    if not 0 < own <= MAX_MINUTES:
        yield f"the title cell gives the lesson {own} minutes, wanted are 1 to {MAX_MINUTES}"
    if not NO_EXERCISES.search(header) and not 0 < exercises <= MAX_EXERCISE_MINUTES:
        yield f"the title cell gives the exercises {exercises} minutes, wanted are 1 to {MAX_EXERCISE_MINUTES}"


def check_street(notebook: dict) -> Iterator[str]:
    """The first picture that a run draws is the street, with a pin where the lesson stands."""
    pictures = [alt for cell in code_cells(notebook) for alt in alts(cell)]
    if not pictures or "You are here:" not in pictures[0]:
        yield "the first picture is not the street with `you are here`: figures.show(figures.street(...))"


def check_guess(notebook: dict) -> Iterator[str]:
    """A lesson that measures lets the learner write down a guess first."""
    own = bound_names(notebook) - set(imports(notebook))
    if measures(notebook) and not any(name.startswith("guess") for name in own):
        yield "it measures, and no cell assigns a `guess` for the learner to change"


def check_ledger(notebook: dict) -> Iterator[str]:
    """A lesson that measures closes the account, in four filled lines."""
    if measures(notebook):
        ledger = section(notebook, "ledger")
        for name in LEDGER_LINES:
            if not re.search(rf"^\W*{name}[^\w\n]+\w", ledger, re.IGNORECASE | re.MULTILINE):
                yield f"no line `{name}` under a heading `Ledger`"


def check_own_code(notebook: dict) -> Iterator[str]:
    """The engine's own code is shown by show_code, from a symbol that exists; nbval passes over that cell."""
    imported, shown = imports(notebook), 0
    for cell in code_cells(notebook):
        for call in calls(cell, "show_code"):
            shown += 1
            head, _, rest = ast.unparse(call.args[0]).partition(".")
            symbol = ".".join(filter(None, (imported.get(head, head), rest)))
            if not symbol.startswith("minillm.") or not has_symbol(symbol):
                yield f"cell {cell.get('id')} shows the code of {symbol}, which minillm does not have"
            if "nbval-ignore-output" not in marks(cell):
                yield f"cell {cell.get('id')} calls show_code and is compared; tag it nbval-ignore-output"
    if not shown:
        yield "no show_code: a lesson ends at the engine's own file"


def check_three_sentences(notebook: dict) -> Iterator[str]:
    """The lesson ends in three sentences, numbered, each of them one sentence."""
    items = [match[2].strip() for match in ITEM.finditer(section(notebook, "three sentences"))]
    if len(items) != 3:
        yield f"{len(items)} numbered sentences under a heading `In three sentences`, not three"
    for item in items:
        if not item.endswith((".", "?", "!")) or INNER_STOP.search(item):
            yield f"this is not one sentence: {item[:60]}"


def check_exercise_link(notebook: dict, number: str) -> Iterator[str]:
    """A lesson with exercises links to those of its own number."""
    header = title_cell(notebook, number)
    linked = any(f"](../exercises/ex{number}_" in text for text in texts(notebook))
    if header and not NO_EXERCISES.search(header) and not linked:
        yield f"no link to its exercises, ../exercises/ex{number}_..."


def check_static_twin(notebook: dict) -> Iterator[str]:
    """The cell above a widget draws the same without it, and the widget leaves a sentence where no kernel runs."""
    for above, cell in pairwise(code_cells(notebook)):
        for name in BOX.findall(cell["source"]):
            if not any("text/plain" in output.get("data", {}) for output in cell["outputs"]):
                yield f"cell {cell.get('id')}: {name} leaves nothing to read in a saved notebook"
            if not any(alts(above) + alts(cell)):
                yield f"cell {cell.get('id')}: no picture above {name} for readers without a kernel"


NUMBERED = (check_header, check_exercise_link)
RULES = (check_street, check_guess, check_ledger, check_own_code, check_three_sentences, check_static_twin)


def title_cell(notebook: dict, number: str) -> str:
    return next((text for text in texts(notebook) if re.search(rf"^# {number} · \S", text, re.MULTILINE)), "")


def section(notebook: dict, words: str) -> str:
    """The text under the first heading that holds these words, up to the next heading, across cells."""
    text = "\n\n".join(texts(notebook))
    heading = re.search(rf"^#+ .*{words}.*$", text, re.IGNORECASE | re.MULTILINE)
    return re.split(r"^#+ ", text[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0] if heading else ""


def measures(notebook: dict) -> bool:
    """Whether a cell, other than the one that says where it runs, prints a measured line."""
    printing = [printed(cell) for cell in code_cells(notebook) if not list(calls(cell, "start"))]
    return any(line.startswith(MEASURED) for text in printing for line in text.splitlines())
