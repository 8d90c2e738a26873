"""F4, masks: which query sees which key, one panel per rule, and a cross on every cell that a rule gets wrong."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from minillm.course.style import BLUE, INK, MARGIN, MUTED, PAPER, VERMILION, card, describe, place, styled, write

CELL = 0.3  # inches
HIDDEN = "#e9e6dd"


@styled
def masks(panels: Mapping[str, object], right: Mapping[str, object] | None = None, subtitle: str = "") -> Figure:
    """One panel per mask, side by side.

    panels  title -> bool [n, S], True where the query sees the key; a title may have two lines
    right   title -> the mask it should have been; cells that differ get a cross
    """
    shown = {title: np.asarray(mask, dtype=bool) for title, mask in panels.items()}
    wanted = {title: np.asarray((right or {}).get(title, mask), dtype=bool) for title, mask in shown.items()}
    rows = max(mask.shape[0] for mask in shown.values())
    left, gap, above = 0.86, 0.34, (1.38 if subtitle else 1.14)
    width = max(left + sum(m.shape[1] for m in shown.values()) * CELL + gap * (len(shown) - 1) + MARGIN, 5.6)
    height = above + 0.2 + rows * CELL + 0.62
    figure = card(width, height, "Which query sees which key", subtitle)
    x = left
    for index, (title, mask) in enumerate(shown.items()):
        across, down = mask.shape[1] * CELL, mask.shape[0] * CELL
        write(figure, x, height - above + 0.12, title, fontsize=9.5, fontweight="bold", va="bottom", linespacing=1.3)
        axes = place(figure, x, height - above - 0.2 - down, width - x - across, above + 0.2)
        _panel(axes, mask, wanted[title], queries_named=index == 0)
        x += across + gap
    _legend(figure, left, crossed=any((shown[t] != wanted[t]).any() for t in shown))

    wrong = sum(int((shown[title] != wanted[title]).sum()) for title in shown)
    print(f"masks: {len(shown)} panels, {sum(int(m.sum()) for m in shown.values())} cells seen, {wrong} wrong")
    return describe(figure, _alt(shown, wanted))


def _panel(axes: Axes, mask: np.ndarray, wanted: np.ndarray, queries_named: bool) -> None:
    n, keys = mask.shape
    axes.set(xlim=(0, keys), ylim=(n, 0), aspect="equal")
    for row in range(n):
        for key in range(keys):
            _cell(axes, row, key, seen=mask[row, key], wrong=mask[row, key] != wanted[row, key])
    axes.set_xticks(np.arange(keys) + 0.5, [str(key) for key in range(keys)], fontsize=8)
    names = [f"token {keys - n + row}" for row in range(n)]
    axes.set_yticks(np.arange(n) + 0.5, names if queries_named else [""] * n, fontsize=8.5)
    axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0, pad=2)
    axes.spines[:].set_visible(False)


def _cell(axes: Axes, row: int, key: int, seen: bool, wrong: bool) -> None:
    box = {"facecolor": BLUE if seen else HIDDEN, "edgecolor": PAPER, "linewidth": 1.6}
    axes.add_patch(Rectangle((key, row), 1, 1, **box))
    if seen:
        axes.add_patch(Circle((key + 0.5, row + 0.5), 0.16, facecolor=PAPER, linewidth=0))
    if wrong:
        for ends in ((0.2, 0.8), (0.8, 0.2)):
            style = {"color": VERMILION, "linewidth": 2.2, "solid_capstyle": "round"}
            axes.plot([key + 0.2, key + 0.8], [row + end for end in ends], **style)


def _legend(figure: Figure, left: float, crossed: bool) -> None:
    width, height = figure.get_size_inches()
    axes = place(figure, left, 0.2, MARGIN, height - 0.46)
    axes.set(xlim=(0, (width - left - MARGIN) / 0.26), ylim=(1, 0))
    axes.axis("off")
    entries = [("seen", True, False), ("not seen", False, False)] + [("wrong", False, True)] * crossed
    x = 0.0
    for words, seen, wrong in entries:
        _cell(axes, 0, x, seen, wrong)
        axes.text(x + 1.35, 0.5, words, va="center", fontsize=8.5, color=INK)
        x += 2.6 + 0.28 * len(words)
    axes.text((width - left - MARGIN) / 0.26, 0.5, "columns: keys", va="center", ha="right", fontsize=8.5, color=MUTED)


def _alt(shown: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> str:
    told = []
    for title, mask in shown.items():
        n, keys = mask.shape
        rows = [f"token {keys - n + row} sees {_keys(mask[row])}" for row in range(n)]
        wrong = int((mask != wanted[title]).sum())
        rows += [f"{wrong} cells are crossed out as wrong"] * (wrong > 0)
        told.append(f"{' '.join(title.split())}: {', '.join(rows)}")
    return f"{len(shown)} masks of queries (rows) and keys (columns). {'. '.join(told)}."


def _keys(row: np.ndarray) -> str:
    """The seen keys in words: "0 and 3 to 5"."""
    runs = np.split(seen := np.flatnonzero(row), np.flatnonzero(np.diff(seen) > 1) + 1)
    return " and ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs if len(run)) or "none"
