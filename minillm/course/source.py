"""Show the engine's own code in a notebook, where it stands, instead of a copy that grows old."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

from IPython.display import Markdown, display

PROJECT = Path(__file__).resolve().parents[2]


def show_code(thing) -> None:
    """Display the source of a function, method, class or module, with its file and line."""
    display(Markdown(as_markdown(thing)))


def as_markdown(thing) -> str:
    thing = inspect.unwrap(thing) if callable(thing) else thing  # the method, not torch's decorator around it
    lines, first = inspect.getsourcelines(thing)
    path = Path(inspect.getsourcefile(thing)).resolve()
    name = path.relative_to(PROJECT).as_posix() if path.is_relative_to(PROJECT) else path.name
    code = textwrap.dedent("".join(lines)).rstrip()
    return f"`{name}`, line {max(first, 1)}\n\n```python\n{code}\n```"
