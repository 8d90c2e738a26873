"""Boxes to type into. Each is an extra: the cell above it does the same with a plain function call.

A saved notebook keeps no widget state, so a box shows itself only in a running kernel; elsewhere a sentence
stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets
from IPython.display import display

VIEW = "application/vnd.jupyter.widget-view+json"


def text_box(draw: Callable[[str], None], label: str, text: str) -> ipywidgets.VBox:
    """A line of text; Enter calls `draw(text)` and shows what it displays, or its error, below the line."""
    line = ipywidgets.Text(value=text, description=label, continuous_update=False, layout={"width": "95%"})
    line.style.description_width = "initial"
    below = ipywidgets.Output()

    def redraw(change) -> None:
        below.clear_output(wait=True)
        with below:
            try:
                draw(change["new"])
            except ValueError as error:  # of minillm's errors all that a text can cause
                print(error)

    line.observe(redraw, names="value")
    box = ipywidgets.VBox([line, below])
    show_box(box, f"{label} (a box to type into appears here when this cell runs)")
    return box


def show_box(box: ipywidgets.Widget, otherwise: str) -> None:
    """Display a widget, and a sentence where there is no kernel behind it."""
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    display({VIEW: view, "text/plain": otherwise}, raw=True)
