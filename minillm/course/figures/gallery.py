"""F3, the attention gallery: six heads on one sentence, one shade scale, tokens on both axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from minillm.course.figures.attention_map import FAINTEST, readable
from minillm.course.style import EDGE, INK, MARGIN, MUTED, PAPER, VERMILION, card, describe, place, styled, write

COLUMNS = 3
SIDE = 2.22  # inches of one map
GAP = 0.26  # between two maps of a row
NAMES_ABOVE, CAPTION, BELOW = 0.5, 0.42, 0.2  # inches: a map's tokens, its two lines of text, the space under it


@styled
def gallery(
    tokens: Sequence[str], maps: Mapping[str, tuple[str, object]], title: str = "Six heads read one sentence"
) -> Figure:
    """One map for each of `maps`: name -> (a line below the name, probabilities [n, n]).

    A square dot marks the largest cell of each row: where that token looks most.
    """
    names = [readable(token) for token in tokens]
    n, across = len(names), 0.078 * max(len(readable(token)) for token in tokens)
    rows = -(-len(maps) // COLUMNS)
    left, block = MARGIN + across + 0.06, SIDE + NAMES_ABOVE + CAPTION + BELOW
    width = left + COLUMNS * SIDE + (COLUMNS - 1) * GAP + 0.86
    height = 0.62 + rows * block + 0.32
    figure = card(width, height, title)
    for index, (name, (line, probabilities)) in enumerate(maps.items()):
        p = np.asarray(probabilities, dtype=float)
        if p.shape != (n, n):
            raise ValueError(f"{n} tokens need probabilities of shape ({n}, {n}), not {p.shape} ({name})")
        row, column = divmod(index, COLUMNS)
        x, top = left + column * (SIDE + GAP), 0.62 + row * block
        write(figure, x, height - top, name, fontsize=10.5, fontweight="bold", va="top")
        write(figure, x, height - top - 0.2, line, fontsize=8.5, color=MUTED, va="top")
        top += CAPTION + NAMES_ABOVE
        axes = place(figure, x, height - top - SIDE, width - x - SIDE, top)
        image = _map(axes, names, p, tokens_at_left=column == 0)
    _scale(figure, image, width, height)
    note = {"color": MUTED, "fontsize": 8.5}
    write(figure, left, 0.2, "A row is the token that looks, a column the token it looks at.", **note)
    write(figure, width - MARGIN, 0.2, "dot: most of its row     hatched: never computed", ha="right", **note)

    cells = n * (n + 1) // 2
    print(f"gallery: {len(maps)} maps of {n} tokens, {cells} of {n * n} cells computed in each")
    return describe(figure, _alt(names, maps))


def _map(axes: Axes, names: list[str], p: np.ndarray, tokens_at_left: bool):
    n = len(names)
    edges = np.arange(n + 1) - 0.5
    shades = np.ma.masked_where(np.triu(np.ones((n, n), bool), 1), np.clip(p, FAINTEST, 1))
    grid = {"edgecolors": PAPER, "linewidth": 0.5}
    image = axes.pcolormesh(edges, edges, shades, cmap="cividis", norm=LogNorm(FAINTEST, 1), **grid)
    stairs = [(i + 0.5, i + side) for i in range(n - 1) for side in (-0.5, 0.5)]
    outline = [*stairs, (n - 0.5, n - 1.5), (n - 0.5, -0.5)]
    axes.add_patch(Polygon(outline, facecolor=PAPER, edgecolor=EDGE, hatch="/////", linewidth=0.5))
    most = p.argmax(axis=1)
    axes.plot(most, range(n), "s", markersize=2.6, color=VERMILION, markeredgecolor=PAPER, markeredgewidth=0.6)
    axes.set(xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5), aspect="equal")
    size = min(7.5, 150 / n)
    axes.set_xticks(range(n), names, rotation=62, ha="left", rotation_mode="anchor", fontsize=size)
    axes.set_yticks(range(n), names if tokens_at_left else [""] * n, fontsize=size)
    axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0, labelcolor=INK, pad=1.5)
    axes.spines[:].set_visible(False)
    return image


def _scale(figure: Figure, image, width: float, height: float) -> None:
    box = (1 - 0.72 / width, (0.32 + BELOW) / height, 0.13 / width, SIDE / height)
    bar = figure.colorbar(image, cax=figure.add_axes(box))
    bar.set_ticks([1, 0.3, 0.1, 0.03, 0.01, FAINTEST], labels=["100%", "30%", "10%", "3%", "1%", "less"])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, which="both", labelsize=8)
    bar.ax.minorticks_off()


def _alt(names: list[str], maps: Mapping[str, tuple[str, object]]) -> str:
    last = len(names) - 1
    told = []
    for name, (line, probabilities) in maps.items():
        row = np.asarray(probabilities, dtype=float)[last]
        told.append(f"{name} ({line}): {names[last]} looks most at {names[int(row.argmax())]}, {row.max():.0%}")
    return (
        f"{len(maps)} triangular attention maps of the sentence {' '.join(names)} with the tokens on both axes. "
        f"{'; '.join(told)}. The upper half of each is hatched: never computed."
    )
