"""How every picture of the course looks: a paper card that reads the same on a light and on a dark page.

The page around a card is not ours, so a card brings its own background, and only its rounded corners are
transparent. Colours are Okabe and Ito's, told apart by all common kinds of colour vision; whatever differs in
colour also differs in hatching or has its name beside it. `show` puts a figure into a notebook with a text
for readers who cannot see it.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable

import matplotlib
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PAPER, EDGE = "#fbfaf6", "#d9d5c9"
INK, MUTED, FAINT = "#22272e", "#5c646d", "#d5d7d6"

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"

DPI = 160  # dots per inch of the stored picture
SCREEN_DPI = 96  # and of the page it is laid out for
MARGIN = 0.22  # inches between a card's edge and its title

RC = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a picture is the same everywhere
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorator of figure functions: the course's settings inside, the caller's own ones untouched."""

    @functools.wraps(draw)
    def wrapper(*args, **kwargs) -> Figure:
        with matplotlib.rc_context(RC):
            return draw(*args, **kwargs)

    return wrapper


def card(width: float, height: float, title: str = "", subtitle: str = "") -> Figure:
    """An empty card, sizes in inches. `place` puts axes on it."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="none")
    inset, radius = 0.015, 0.13
    figure.add_artist(
        FancyBboxPatch(
            (inset, inset),
            width - 2 * inset,
            height - 2 * inset,
            boxstyle=f"round,pad=0,rounding_size={radius}",
            transform=figure.dpi_scale_trans,
            facecolor=PAPER,
            edgecolor=EDGE,
            linewidth=0.9,
            zorder=-10,
        )
    )
    top = height - MARGIN
    if title:
        write(figure, MARGIN, top, title, fontsize=12.5, fontweight="bold", va="top")
    if subtitle:
        write(figure, MARGIN, top - 0.27, subtitle, fontsize=9.5, color=MUTED, va="top")
    return figure


def write(figure: Figure, x: float, y: float, text: str, **style) -> None:
    """Text on a card at inches from its lower left corner."""
    width, height = figure.get_size_inches()
    figure.text(x / width, y / height, text, **style)


def place(figure: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes with the given margins to the card's four edges, in inches."""
    width, height = figure.get_size_inches()
    return figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    )


def describe(figure: Figure, alt: str) -> Figure:
    """Attach the sentence that stands for the picture where it cannot be seen."""
    figure.set_label(alt)
    return figure


def show(figure: Figure) -> None:
    """Display a card in the notebook as a PNG with its alt text."""
    png = to_png(figure)
    width, height = figure.get_size_inches() * SCREEN_DPI
    alt = figure.get_label()
    if not alt:
        raise ValueError("this figure has no alt text; give it one with describe(figure, alt)")
    display(
        {"image/png": base64.b64encode(png).decode("ascii"), "text/plain": "<picture>"},
        metadata={"image/png": {"alt": alt, "width": round(width), "height": round(height)}},
        raw=True,
    )


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        # No creation date and no version inside, so the same data give the same bytes.
        figure.savefig(buffer, format="png", dpi=DPI, facecolor="none", metadata={"Software": None})
    return buffer.getvalue()
