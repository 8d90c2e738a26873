"""F10, the tile staircase: time over the tokens of a step, what whole tiles predict, and three steps drawn in tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.style import BLUE, INK, MARGIN, MUTED, ORANGE, PAPER, card, describe, place, styled, write
from minillm.staircase import filled, fit

DRAWN = (128, 256, 257)  # tokens of the steps that are drawn in tiles
WASTE = "#f6e3bd"


@styled
def staircase(
    ms: Mapping[int, float],
    tile: int = 128,
    title: str = "Time of a step over its tokens",
    drawn: Sequence[int] = DRAWN,
) -> Figure:
    """Measured times with two lines of two numbers each: one that pays by the row, one that pays by the tile.

    ms     {tokens: milliseconds}, three lengths or more
    tile   rows of a tile
    drawn  steps whose tiles are drawn beside the curve
    """
    if len(ms) < 3:
        raise ValueError(f"{len(ms)} lengths: a line and a staircase can be told apart from 3 on")
    lengths = sorted(ms)
    figure = card(9.4, 4.5, title)
    axes = place(figure, 0.75, 0.62, 3.55, 0.62)
    left = _curve(axes, {n: ms[n] for n in lengths}, tile)
    _tiles(place(figure, 6.35, 0.62, MARGIN, 0.95), tile, drawn)
    write(figure, 6.35, 4.5 - 0.72, f"rows in tiles of {tile}", fontsize=9.5, fontweight="bold", va="top")
    write(figure, 6.35, 0.24, "solid: a token's row   hatched: computed for nobody", fontsize=8.2, color=MUTED)

    wasted = ", ".join(f"{n} leave {filled(n, tile) - n}" for n in drawn)
    print(f"staircase: {len(ms)} lengths from {lengths[0]} to {lengths[-1]}; of tiles of {tile} rows {wasted} empty")
    return describe(figure, _alt(ms, tile, drawn, left))


def _curve(axes: Axes, ms: Mapping[int, float], tile: int) -> tuple[float, float]:
    """Points and both lines; what the line and the staircase leave unexplained."""
    lengths = list(ms)
    first, last = lengths[0], lengths[-1]
    (a, b, line_left), (c, d, steps_left) = fit(ms, 1), fit(ms, tile)
    every = np.arange(first, last + 1)
    dashes = {"color": ORANGE, "linewidth": 1.6, "linestyle": (0, (5, 2)), "zorder": 3}
    axes.plot(every, a + b * every, label=f"pays by the row: {line_left:.1%} unexplained", **dashes)
    steps = [c + d * filled(int(n), tile) for n in every]
    label = f"pays by the tile: {steps_left:.1%}"
    axes.step(every, steps, where="post", color=BLUE, linewidth=1.8, zorder=3, label=label)
    dots = {"color": INK, "markersize": 4.5, "markeredgecolor": PAPER, "zorder": 4}
    axes.plot(lengths, list(ms.values()), "o", label="measured", **dots)
    for edge in range(filled(first, tile), last + 1, tile):
        axes.axvline(edge, color=MUTED, linewidth=0.7, linestyle=(0, (1, 2)), zorder=1)
    ticks = [n for n in range(0, last + 1, tile // 2) if first <= n <= last]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set(xlabel="tokens of the step", ylabel="milliseconds", xlim=(first - 4, last + 4), ylim=(0, None))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 1.28)
    axes.legend(loc="upper left", fontsize=8.5, frameon=True, facecolor=PAPER, edgecolor="none", framealpha=1)
    return line_left, steps_left


def _tiles(axes: Axes, tile: int, drawn: Sequence[int]) -> None:
    """One stack of tiles for each step; rows of tokens from the top of each tile."""
    axes.axis("off")
    most = max(filled(n, tile) for n in drawn)
    gap = 0.02 * most
    axes.set(xlim=(0, len(drawn)), ylim=(most + gap, -0.09 * most))
    for column, n in enumerate(drawn):
        for start in range(0, filled(n, tile), tile):
            corner, width, height = (column + 0.1, start + gap / 2), 0.74, tile - gap
            used = max(min(1.0, (n - start) / tile) * height, 0.6 * gap)  # a single row has to be seen
            waste = {"facecolor": WASTE, "edgecolor": "#9a6a00", "hatch": "////", "linewidth": 0}
            axes.add_patch(Rectangle(corner, width, height, **waste))
            axes.add_patch(Rectangle(corner, width, used, facecolor=BLUE, edgecolor="none"))
            axes.add_patch(Rectangle(corner, width, height, facecolor="none", edgecolor=INK, linewidth=0.9))
        axes.text(column + 0.47, -gap, f"{n} tokens", ha="center", va="bottom", fontsize=9)


def _alt(ms: Mapping[int, float], tile: int, drawn: Sequence[int], left: tuple[float, float]) -> str:
    shown = [n for n in drawn if n in ms] or [min(ms), max(ms)]
    times = ", ".join(f"{ms[n]:.3g} ms at {n}" for n in shown)
    stacks = "; ".join(
        f"{n} tokens fill {filled(n, tile) // tile} tiles and leave {filled(n, tile) - n} rows empty" for n in drawn
    )
    line, steps = left
    return (
        f"Time of a step over its tokens: {times}. A straight line leaves {line:.1%} of the variance unexplained, a "
        f"staircase of {tile} rows {steps:.1%}. Beside it, tiles: {stacks}."
    )
