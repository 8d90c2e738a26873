"""Small matrices with their numbers written in, and what happens between them: attention checked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.style import INK, MARGIN, MUTED, PAPER, SKY, card, describe, place, styled, write

CELL = 0.46  # inches
HIDDEN = "#e9e6dd"


@dataclass(frozen=True)
class Matrix:
    """A matrix to draw. rows, columns: a label for each; digits: after the point; before: what leads to it."""

    name: str
    values: object
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    digits: int = 2
    before: str = ""


@styled
def matrices(title: str, row: Sequence[Matrix], subtitle: str = "") -> Figure:
    """The matrices from left to right. Shades follow the numbers of each matrix; -inf is drawn as hidden."""
    values = [np.atleast_2d(np.asarray(m.values, dtype=float)) for m in row]
    tallest = max(v.shape[0] for v in values) * CELL
    lefts, x = [], MARGIN
    for m, v in zip(row, values, strict=True):
        x += (0.082 * max(map(len, m.before.split("\n"))) + 0.2 if m.before else 0) + 0.1
        x += 0.085 * max(map(len, m.rows), default=0)
        lefts.append(x)
        x += v.shape[1] * CELL + 0.08
    above = 1.2 if subtitle else 0.95
    height = above + 0.22 + tallest + 0.28
    figure = card(max(x + MARGIN, 4.2), height, title, subtitle)
    for m, v, left in zip(row, values, lefts, strict=True):
        drop = (tallest - v.shape[0] * CELL) / 2
        bottom = 0.28 + drop
        axes = place(figure, left, bottom, figure.get_size_inches()[0] - left - v.shape[1] * CELL, above + 0.22 + drop)
        _draw(axes, m, v)
        name_at = height - above - 0.22 - drop + (0.26 if m.columns else 0.08)
        write(figure, left, name_at, m.name, fontsize=9.5, fontweight="bold", va="bottom")
        if m.before:
            middle = left - 0.085 * max(map(len, m.rows), default=0) - 0.12
            write(figure, middle, 0.28 + tallest / 2, m.before, ha="right", va="center", fontsize=9.5, color=MUTED)

    print(f"matrices: {', '.join(f'{m.name} {v.shape[0]}x{v.shape[1]}' for m, v in zip(row, values, strict=True))}")
    return describe(figure, _alt(title, row, values))


def _draw(axes: Axes, m: Matrix, v: np.ndarray) -> None:
    n, width = v.shape
    finite = v[np.isfinite(v)]
    shade = Normalize(min(0.0, finite.min()), max(finite.max(), finite.min() + 1e-9))
    axes.set(xlim=(0, width), ylim=(n, 0))
    for i in range(n):
        for j in range(width):
            seen = np.isfinite(v[i, j])
            box = {"edgecolor": PAPER, "linewidth": 1.6}
            axes.add_patch(Rectangle((j, i), 1, 1, facecolor=HIDDEN, **box))
            if seen:
                strength = 0.12 + 0.75 * float(shade(v[i, j]))
                axes.add_patch(Rectangle((j, i), 1, 1, facecolor=SKY, alpha=strength, **box))
            number = f"{v[i, j]:.{m.digits}f}" if seen else "−∞"
            axes.text(j + 0.5, i + 0.52, number.replace("-", "−"), ha="center", va="center", fontsize=9, color=INK)
    axes.set_yticks(np.arange(len(m.rows)) + 0.5, m.rows, fontsize=9)
    axes.set_xticks(np.arange(len(m.columns)) + 0.5, m.columns, fontsize=9)
    axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0, pad=2, labelcolor=INK)
    axes.spines[:].set_visible(False)


def _alt(title: str, row: Sequence[Matrix], values: Sequence[np.ndarray]) -> str:
    told = []
    for m, v in zip(row, values, strict=True):
        lines = ["; ".join(" ".join(f"{x:.{m.digits}f}" for x in line) for line in v)]
        told.append(f"{m.name}: {lines[0]}".replace("-inf", "hidden"))
    return f"{title}. Matrices with their numbers, rows separated by semicolons. {'. '.join(told)}."
