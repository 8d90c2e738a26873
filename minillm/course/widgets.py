"""Boxes to type into and sliders to move. Each is an extra: the cell above it does the same with a plain call.

A saved notebook keeps no widget state, so a box shows itself only in a running kernel; elsewhere a sentence stands in
its place. A picture is an <img> in an HTML widget, so its alt text comes along, and nothing is printed into the cell.
"""

from __future__ import annotations

import base64
import contextlib
import html
import io
from collections.abc import Callable

import ipywidgets
from IPython.display import display
from matplotlib.figure import Figure

from minillm.course.style import SCREEN_DPI, to_png

VIEW = "application/vnd.jupyter.widget-view+json"


def text_box(draw: Callable[[str], None], label: str, text: str) -> ipywidgets.VBox:
    """A line of text; Enter calls `draw(text)` and shows what it displays, or its error, below the line."""
    line = text_line(label, text)
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


def picture_box(draw: Callable[..., Figure], **controls: ipywidgets.Widget) -> ipywidgets.VBox:
    """Controls above a picture; whenever one of them changes, `draw(name=value, ...)` makes the next picture.

    draw      returns a figure with alt text; a ValueError is shown as a sentence in the picture's place
    controls  `text_line`, `slider` or `choice`, by the names that `draw` gives them
    """
    picture = ipywidgets.HTML()

    def redraw(change=None) -> None:
        values = {name: control.value for name, control in controls.items()}
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # a figure's own line is for cells
                picture.value = image_tag(draw(**values))
        except ValueError as error:
            picture.value = f"<p>{html.escape(str(error))}</p>"

    for control in controls.values():
        control.observe(redraw, names="value")
    redraw()
    box = ipywidgets.VBox([*controls.values(), picture])
    labels = ", ".join(control.description for control in controls.values())
    show_box(box, f"{labels} (to be set here, above a picture, when this cell runs)")
    return box


def image_tag(figure: Figure) -> str:
    """A figure as an <img> with its alt text, at its size on the page."""
    width = round(figure.get_size_inches()[0] * SCREEN_DPI)
    data = base64.b64encode(to_png(figure)).decode("ascii")
    alt = html.escape(figure.get_label(), quote=True)
    return f'<img alt="{alt}" width="{width}" style="max-width: 100%" src="data:image/png;base64,{data}">'


def text_line(label: str, text: str) -> ipywidgets.Text:
    """One line of text; its value changes with Enter, not with each letter."""
    line = ipywidgets.Text(value=text, description=label, continuous_update=False, layout={"width": "95%"})
    line.style.description_width = "initial"
    return line


def slider(label: str, first: int, last: int, value: int) -> ipywidgets.IntSlider:
    """A whole number from `first` to `last`; its value changes when the handle is let go."""
    return ipywidgets.IntSlider(
        value=value, min=first, max=last, description=label, continuous_update=False, layout={"width": "60%"}
    )


def choice(label: str, options: list[str], value: str) -> ipywidgets.Dropdown:
    """One of several names."""
    return ipywidgets.Dropdown(options=options, value=value, description=label)


def show_box(box: ipywidgets.Widget, otherwise: str) -> None:
    """Display a widget, and a sentence where there is no kernel behind it."""
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    display({VIEW: view, "text/plain": otherwise}, raw=True)
