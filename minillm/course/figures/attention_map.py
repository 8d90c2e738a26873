"""One attention map of one sentence: who looks at whom, in shades on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from minillm.course.figures.tiles import font_characters
from minillm.course.style import EDGE, INK, MUTED, PAPER, VERMILION, card, describe, place, styled

FAINTEST = 0.003  # share of attention that still gets a shade of its own


@styled
def attention_map(
    tokens: Sequence[str], probabilities, title: str = "Who looks at whom", point_out: str = ""
) -> Figure:
    """One head's map.

    probabilities  [n, n]: row i is what token i takes from each token 0 .. i; rows sum to 1
    point_out      a word; in each of its rows the cell that it looks at most gets a ring
    """
    p = np.asarray(probabilities, dtype=float)
    n = len(tokens)
    if p.shape != (n, n):
        raise ValueError(f"{n} tokens need probabilities of shape ({n}, {n}), not {p.shape}")
    names = [readable(token) for token in tokens]
    side = min(6.2, max(2.6, 0.235 * n))  # inches
    across = 0.085 * max(map(len, names))  # inches that the longest name takes
    left, top = 0.45 + across, 0.72 + across * 0.8
    figure = card(left + side + 1.35, top + side + 0.45, title)
    axes = place(figure, left, 0.45, 1.35, top)

    below = np.ma.masked_where(np.triu(np.ones((n, n), bool), 1), np.clip(p, FAINTEST, 1))
    edges = np.arange(n + 1) - 0.5
    image = axes.pcolormesh(
        edges, edges, below, cmap="cividis", norm=LogNorm(FAINTEST, 1), edgecolors=PAPER, linewidth=0.8
    )
    axes.set(xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5), aspect="equal")
    _never_computed(axes, n)
    rows = [i for i, name in enumerate(names) if name == point_out]
    for row in rows:
        _ring(axes, int(p[row].argmax()), row)
    axes.set_xticks(range(n), names, rotation=60, ha="left", rotation_mode="anchor", fontsize=8.5)
    axes.set_yticks(range(n), names, fontsize=8.5)
    axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
    axes.set_ylabel("the token that looks", fontsize=9, labelpad=4)
    axes.set_xlabel("the token it looks at", fontsize=9, labelpad=4)
    _scale(figure, axes, image)

    print(f"attention_map: {n} tokens, {n * (n + 1) // 2} of {n * n} cells computed")
    return describe(figure, _alt(names, p, rows or [n - 1]))


def readable(token: str) -> str:
    """A token as a label: line ends and tabs written out, the space before a word dropped, $ kept from matplotlib.

    A character that the font lacks is written as its number, U+4E2D.
    """
    text = token.replace("\n", "\\n").replace("\t", "\\t").strip() or "␣"
    text = "".join(char if ord(char) in font_characters("DejaVu Sans") else f"U+{ord(char):X}" for char in text)
    return text.replace("$", r"\$")


def _never_computed(axes: Axes, n: int) -> None:
    """Hatch the staircase above the diagonal: tokens that had not been read yet."""
    steps = [(x, y) for i in range(n) for x, y in ((i + 0.5, i - 0.5), (i + 0.5, i + 0.5))]
    outline = [(0.5, -0.5), *steps[1:-1], (n - 0.5, n - 1.5), (n - 0.5, -0.5)]
    axes.add_patch(Polygon(outline, facecolor=PAPER, edgecolor=EDGE, hatch="////", linewidth=0.6))
    if n >= 8:
        strip = {"boxstyle": "round,pad=0.35", "facecolor": PAPER, "edgecolor": EDGE, "linewidth": 0.8}
        axes.text(n * 0.68, n * 0.2, "never computed", ha="center", va="center", fontsize=9, color=MUTED, bbox=strip)


def _ring(axes: Axes, x: int, y: int) -> None:
    for color, width in ((PAPER, 3.4), (VERMILION, 1.8)):
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=color, linewidth=width, zorder=4))


def _scale(figure: Figure, axes: Axes, image) -> None:
    box = axes.get_position()
    width = figure.get_size_inches()[0]
    bar = figure.colorbar(image, cax=figure.add_axes((box.x1 + 0.25 / width, box.y0, 0.14 / width, box.height)))
    bar.set_ticks([1, 0.3, 0.1, 0.03, 0.01, FAINTEST], labels=["100%", "30%", "10%", "3%", "1%", "less"])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, which="both", labelsize=8.5)
    bar.ax.minorticks_off()


def _alt(names: list[str], p: np.ndarray, rows: list[int]) -> str:
    looks = []
    for row in rows:
        best = np.argsort(-p[row], kind="stable")[:2]
        what = " and ".join(f"{names[i]} ({p[row, i]:.0%})" for i in best)
        looks.append(f"token {row + 1}, {names[row]}, looks most at {what}")
    return (
        f"Triangular map of the attention between {len(names)} tokens: {'; '.join(looks)}. "
        "The upper half is hatched: never computed."
    )
