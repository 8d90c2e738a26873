"""Every widget of every lesson, moved in a real browser: the picture under it changes.

Lessons are run whole, in JupyterLab, as a learner does. Screenshots of the page in both themes are kept; the
summary of the run says where.
"""

import nbformat
import pytest

from minillm.course.build.addresses import ROOT
from minillm.course.build.cells import code_cells, read
from minillm.course.build.lesson_text import BOX
from tests.browser import lab

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]
LESSONS = [
    path.name
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    if any(BOX.search(cell["source"]) for cell in code_cells(read(path)))
]
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}


def test_some_lessons_have_widgets():
    assert "00_the_wait.ipynb" in LESSONS


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_widget_of_a_lesson_changes_the_picture_under_it(page, address, screenshots, lesson):
    notebook = lab.Notebook(page, address, f"notebooks/{lesson}")
    notebook.run_all()
    controls = notebook.widgets()
    assert controls
    for control in controls:
        control.scroll_into_view_if_needed()
        lab.move_and_watch(control, 0)
        lab.move_and_watch(control, 1)
    photograph(notebook, screenshots, lesson.removesuffix(".ipynb"))


def photograph(notebook, folder, name):
    """The whole notebook at its full height, and each cell with a widget, light and dark."""
    page = notebook.page
    height = page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollHeight")
    page.set_viewport_size({"width": 1280, "height": min(height + 120, 15_000)})
    page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")
    for theme, title in THEMES.items():
        notebook.theme(title)
        page.wait_for_timeout(500)
        page.screenshot(path=folder / f"{name}_{theme}.png")
        for number, cell in enumerate(page.locator(".jp-Cell:has(.jupyter-widgets)").all()):
            cell.screenshot(path=folder / f"{name}_widget{number}_{theme}.png")


# The harness itself, on a notebook whose widgets are known

KNOWN = """
import io
import ipywidgets
from IPython.display import Image, display
from matplotlib.figure import Figure

def picture(value):
    figure = Figure(figsize=(2, 0.5))
    figure.text(0.1, 0.4, str(value))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    display(Image(buffer.getvalue()))

def shown(control, draw=picture):
    below = ipywidgets.Output()

    def redraw(change):
        below.clear_output(wait=True)
        with below:
            draw(change["new"])

    control.observe(redraw, names="value")
    display(ipywidgets.VBox([control, below]))
"""
GOOD = [
    "ipywidgets.Text('a', continuous_update=False)",
    "ipywidgets.Dropdown(options=['a', 'b', 'c'])",
    "ipywidgets.IntSlider(3, min=0, max=9)",
    "ipywidgets.SelectionSlider(options=['a', 'b'])",
    "ipywidgets.Checkbox(False)",
    "ipywidgets.ToggleButtons(options=['a', 'b', 'c'])",
]


def write(folder, name, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}  # else Lab asks for one
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / name)


def test_every_kind_of_control_is_found_and_moved(page, address, folder):
    write(folder, "known.ipynb", KNOWN, *(f"shown({control})" for control in GOOD))
    notebook = lab.Notebook(page, address, "known.ipynb")
    notebook.run_all()
    controls = notebook.widgets()
    assert len(controls) == len(GOOD)
    for control in controls:
        lab.move_and_watch(control, 0)
        lab.move_and_watch(control, 1)


def test_a_widget_that_draws_the_same_again_is_caught(page, address, folder, monkeypatch):
    monkeypatch.setattr(lab, "MOVE_S", 5)
    write(folder, "stuck.ipynb", KNOWN, "shown(ipywidgets.Dropdown(options='abc'), draw=lambda value: picture('same'))")
    notebook = lab.Notebook(page, address, "stuck.ipynb")
    notebook.run_all()
    (control,) = notebook.widgets()
    lab.move_and_watch(control, 0)
    with pytest.raises(AssertionError, match="changed no picture"):
        lab.move_and_watch(control, 1)


def test_a_cell_that_fails_is_caught(page, address, folder):
    write(folder, "failing.ipynb", "1 / 0")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        lab.Notebook(page, address, "failing.ipynb").run_all()
