"""Tokens as tiles: how a token is written when it is a blank, half a character, or a sign that the font lacks."""

from __future__ import annotations

from functools import cache

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.ft2font import FT2Font
from matplotlib.patches import FancyBboxPatch

from minillm.course.style import INK

FILLS = ("#cfe3f2", "#f6e3b4", "#cde9dd", "#efd6e3")  # in turn, so that neighbours differ; edges separate them too
MARKS = str.maketrans({" ": "␣", "\n": "↵", "\t": "→"})


@cache
def font_characters(family: str = "DejaVu Sans Mono") -> frozenset[int]:
    """Code points of a font that matplotlib brings along."""
    return frozenset(FT2Font(font_manager.findfont(family)).get_charmap())


def label(data: bytes) -> str:
    """A token's bytes as text, blanks made visible; in hexadecimal where they are no text that can be drawn."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    if text and all(ord(char) in font_characters() or char in "\n\t" for char in text):
        return text.translate(MARKS)
    return data.hex(" ").upper()


def tile(axes: Axes, x: float, y: float, width: float, height: float, text: str, fill: str, **style) -> None:
    """One tile with its lower left corner at (x, y), in inches if the axes are; `style` goes to the text."""
    look = {"boxstyle": "round,pad=0,rounding_size=0.05", "facecolor": fill, "edgecolor": "#8d949b", "linewidth": 0.8}
    axes.add_patch(FancyBboxPatch((x + 0.015, y), width - 0.03, height, label=text, **look))
    font = {"family": "DejaVu Sans Mono", "fontsize": 9, "color": INK, **style}
    safe = text.replace("$", r"\$")  # matplotlib sets what stands between two $ as a formula
    axes.text(x + width / 2, y + height / 2, safe, ha="center", va="center_baseline", **font)
