"""Pictures that a notebook's own run provides for its text, and for README.md.

`![...](attachment:NAME.png)` in a text cell gets the picture that the code cell with the id NAME has drawn, so a
reader sees it before anything runs; an attachment travels inside the file, also to Colab. README.md shows the
picture of one lesson from notebooks/images/.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

from nbformat import NotebookNode

ATTACHMENT = re.compile(r"\(attachment:([\w-]+)\.png\)")
README_PICTURES = {"00_the_wait.ipynb": ("two-lanes", "images/lesson_00.png")}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def attach_pictures(notebook: NotebookNode) -> None:
    """Fill every attachment of the text cells. Raises ValueError when its code cell has drawn nothing."""
    for cell in notebook.cells:
        names = ATTACHMENT.findall(cell.source) if cell.cell_type == "markdown" else []
        if names:
            cell.attachments = {f"{name}.png": {"image/png": picture(notebook, name)} for name in names}


def write_readme_picture(notebook: NotebookNode, path: Path) -> None:
    """Store the picture that README.md takes from this notebook, if it takes one."""
    if path.name in README_PICTURES:
        name, target = README_PICTURES[path.name]
        file = path.parent / target
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(base64.b64decode(picture(notebook, name)))


def picture(notebook: NotebookNode, name: str) -> str:
    """The last PNG, in base64, that the code cell `name` displayed."""
    for cell in notebook.cells:
        if cell.id == name:
            pictures = [o.data["image/png"] for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
            if pictures:
                return pictures[-1]
    raise ValueError(f"no code cell with the id {name} has drawn a picture")


def drop_widget_views(notebook: NotebookNode) -> None:
    """A view without its state shows an error in a saved notebook; the text beside it stays."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET_VIEW, None)
