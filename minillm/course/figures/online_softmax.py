"""F7, the online softmax strip: one query reads its keys tile by tile; what it keeps shrinks when the maximum jumps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from minillm.course.style import BLUE, MUTED, ORANGE, PAPER, SKY, VERMILION, card, describe, place, styled, write

WIDTH, LEFT, RIGHT = 8.6, 1.14, 1.8  # inches; names of the rows stand left of the tiles, the result right of them
TOP, GAP, BOTTOM = 1.02, 0.2, 0.3
ROWS = (1.25, 1.1, 1.1)  # heights: scores, sum, mix
BEFORE, AFTER, BAR = 0.18, 0.72, 0.15  # places of the two bars in a tile of width 1, and their width
LOOKS = {
    "before the tile": {"fill": False, "edgecolor": MUTED, "linewidth": 1.1, "linestyle": (0, (3, 2))},
    "kept, rescaled": {"facecolor": SKY, "edgecolor": PAPER, "hatch": "////", "linewidth": 0},
    "added by the tile": {"facecolor": BLUE, "linewidth": 0},
}


class Tile(NamedTuple):
    """What one tile does. highest: the maximum after it; shrink: what the sum and the mix so far are multiplied by."""

    highest: float
    shrink: float
    sum_before: float
    sum_added: float
    mix_before: float
    mix_added: float

    @property
    def sum(self) -> float:
        return self.sum_before * self.shrink + self.sum_added

    @property
    def mix(self) -> float:
        return self.mix_before * self.shrink + self.mix_added


def walk(scores: Sequence[float], values: Sequence[float], tile: int, base: float = math.e) -> list[Tile]:
    """One query's keys in tiles of `tile`: the state after each of them. Powers are those of `base`."""
    tiles: list[Tile] = []
    highest, total, mix = -math.inf, 0.0, 0.0
    for start in range(0, len(scores), tile):
        s, v = scores[start : start + tile], values[start : start + tile]
        higher = max(highest, *s)
        powers = [base ** (score - higher) for score in s]
        mixed = sum(p * value for p, value in zip(powers, v, strict=True))
        shrink = base ** (highest - higher) if tiles else 0.0
        tiles.append(Tile(higher, shrink, total, sum(powers), mix, mixed))
        highest, total, mix = higher, tiles[-1].sum, tiles[-1].mix
    return tiles


@styled
def online_softmax(
    scores: Sequence[float], values: Sequence[float], tile: int = 4, base: float = math.e, read: int | None = None
) -> Figure:
    """Three rows over the tiles: scores with their running maximum, the sum and the mix before and after each tile.

    scores, values  one number for each key
    base            of the powers: e, or 2 for numbers that can be checked by hand
    read            tiles that have been read so far; None: all
    """
    if not len(scores) == len(values) > 0:
        raise ValueError(f"{len(scores)} scores and {len(values)} values: each key needs one of both")
    tiles = walk(scores, values, tile, base)
    read = len(tiles) if read is None else read
    if not 0 < read <= len(tiles):
        raise ValueError(f"{read} tiles read of {len(tiles)}: one is the least, all are the most")
    height = TOP + sum(ROWS) + 2 * GAP + BOTTOM
    powers = "powers of 2 in place of e" if base == 2 else f"powers of {'e' if base == math.e else f'{base:g}'}"
    subtitle = f"one query, {len(scores)} keys in tiles of {tile}, {powers}"
    figure = card(WIDTH, height, "A softmax that never sees all of its scores", subtitle)
    bottoms = [BOTTOM + sum(ROWS[row + 1 :]) + GAP * (2 - row) for row in range(3)]
    axes = [place(figure, LEFT, b, RIGHT, height - b - h) for b, h in zip(bottoms, ROWS, strict=True)]
    _bands(place(figure, LEFT, BOTTOM, RIGHT, TOP), len(tiles))
    _scores(axes[0], scores, tiles, tile, read)
    _sums(axes[1], [(t.sum_before, t.shrink, t.sum_added) for t in tiles], read)
    _sums(axes[2], [(t.mix_before, t.shrink, t.mix_added) for t in tiles], read)
    names = (("scores", "line: maximum m"), ("sum", "of the powers"), ("mix", "powers × values"))
    for (name, what), bottom, row in zip(names, bottoms, ROWS, strict=True):
        write(figure, 0.22, bottom + row * 0.58, name, fontsize=10, fontweight="bold")
        write(figure, 0.22, bottom + row * 0.58 - 0.17, what, fontsize=7.4, color=MUTED)
    exact = walk(scores, values, len(scores), base)[0]
    out, wanted = tiles[read - 1].mix / tiles[read - 1].sum, exact.mix / exact.sum
    _result(place(figure, WIDTH - RIGHT + 0.2, BOTTOM, 0.22, height - bottoms[1] - ROWS[1]), tiles[read - 1], wanted)
    _key(place(figure, WIDTH - RIGHT + 0.2, bottoms[0] + 0.1, 0.22, TOP - 0.1))

    jumps = _jumps(tiles[:read])
    same = math.isclose(out, wanted, rel_tol=1e-9, abs_tol=1e-12)
    print(
        f"online_softmax: {read} of {len(tiles)} tiles read, the maximum jumps in {jumps or 'none'}, "
        f"result {out:.3g}, exact {wanted:.3g}, equal: {same}"
    )
    return describe(figure, _alt(tiles[:read], len(tiles), tile, out, wanted))


def _jumps(tiles: Sequence[Tile]) -> str:
    """Which tiles behind the first one raise the maximum: "tile 3"."""
    found = [f"tile {number}" for number, t in enumerate(tiles, 1) if number > 1 and t.shrink < 1]
    return " and ".join(found)


def _bands(axes: Axes, columns: int) -> None:
    """Every second tile on a shade of its own, its number above it."""
    axes.set(xlim=(0, columns), ylim=(0, 1), zorder=-1)
    axes.axis("off")
    for column in range(columns):
        if not column % 2:
            axes.add_patch(Rectangle((column, 0), 1, 1, facecolor="#f1eee5", linewidth=0))
        axes.text(column + 0.5, 1.02, f"tile {column + 1}", ha="center", fontsize=9, fontweight="bold")


def _blank(axes: Axes, columns: int, low: float, high: float) -> None:
    axes.set(xlim=(0, columns), ylim=(low, high))
    axes.axis("off")


def _scores(axes: Axes, scores: Sequence[float], tiles: Sequence[Tile], tile: int, read: int) -> None:
    """A bar per score, and the running maximum as a line of steps at its height."""
    low, high = min(0.0, *scores), max(0.0, *scores)
    spread = high - low or 1.0
    _blank(axes, len(tiles), low - 0.2 * spread, high + 0.24 * spread)
    for index, score in enumerate(scores):
        column, number = divmod(index, tile)
        x = column + 0.1 + 0.8 * (number + 0.5) / tile
        bar = {"facecolor": MUTED, "linewidth": 0} if column < read else {"fill": False, "edgecolor": MUTED}
        axes.add_patch(Rectangle((x - 0.28 / tile, min(0, score)), 0.56 / tile, abs(score), label="score", **bar))
        axes.text(x, low - 0.05 * spread, f"{score:g}", ha="center", va="top", fontsize=7.8)
    for column, t in enumerate(tiles[:read]):
        line = {"color": VERMILION, "linewidth": 2.2, "solid_capstyle": "butt", "zorder": 4}
        axes.plot([column + 0.04, column + 0.96], [t.highest] * 2, label="maximum", **line)
        axes.text(column + 0.5, t.highest + 0.05 * spread, f"m = {t.highest:g}", ha="center", fontsize=8.8)


def _sums(axes: Axes, states: Sequence[tuple[float, float, float]], read: int) -> None:
    """Two bars per tile: what was there, and beside it what is kept of that, with what the tile adds on top."""
    steps = [(before, before * shrink, added) for before, shrink, added in states]
    ends = [0.0, *(end for before, kept, added in steps for end in (before, kept, kept + added))]
    low, high = min(ends), max(ends)
    spread = high - low or 1.0
    _blank(axes, len(states), low, high + 0.3 * spread)
    text = {"ha": "center", "fontsize": 8.4, "zorder": 5}
    for column, (before, kept, added) in enumerate(steps[:read]):
        bars = (BEFORE, 0, before), (AFTER, 0, kept), (AFTER, kept, added)
        for (x, foot, tall), (name, look) in zip(bars, LOOKS.items(), strict=True):
            if tall:
                axes.add_patch(Rectangle((column + x - BAR / 2, foot), BAR, tall, label=name, zorder=3, **look))
        said = f"{kept:.3g} + {added:.3g} = {kept + added:.3g}" if column else f"{added:.3g}"
        axes.text(column + AFTER, max(kept, kept + added, 0) + 0.06 * spread, said, **text)
        if column:
            axes.text(column + BEFORE, max(before, 0) + 0.06 * spread, f"{before:.3g}", **text)
        if states[column][1] < 1 and column:
            line = {"arrowstyle": "-|>", "mutation_scale": 9, "color": VERMILION, "linewidth": 1.4, "zorder": 4}
            start, stop = (column + BEFORE + BAR / 2, before), (column + AFTER - BAR / 2, kept)
            axes.add_patch(FancyArrowPatch(start, stop, shrinkA=2, shrinkB=1, **line))
            label = f"× {_factor(states[column][1])}"
            axes.text(column + 0.41, 0.06 * spread, label, color=VERMILION, **text)


def _factor(shrink: float) -> str:
    """A quarter as 1/4, and what is no such fraction in digits."""
    whole = round(1 / shrink) if shrink > 1e-4 else 0
    return f"1/{whole}" if whole and math.isclose(whole * shrink, 1) else f"{shrink:.2g}"


def _result(axes: Axes, last: Tile, wanted: float) -> None:
    """What the tiles give, beside what a softmax over all keys at once gives."""
    out = last.mix / last.sum
    low, high = min(0.0, out, wanted), max(0.0, out, wanted)
    spread = high - low or 1.0
    axes.set(xlim=(0, 2), ylim=(low - 0.5 * spread, high + 0.55 * spread))
    axes.axis("off")
    bars = {"mix / sum": (out, {"facecolor": BLUE}), "all at once": (wanted, {"facecolor": ORANGE, "hatch": "...."})}
    for x, (name, (value, look)) in enumerate(bars.items()):
        axes.add_patch(Rectangle((x + 0.25, 0), 0.5, value, label=name, edgecolor=PAPER, linewidth=0, **look))
        axes.text(x + 0.5, max(value, 0) + 0.04 * spread, f"{value:.3g}", ha="center", fontsize=11, fontweight="bold")
        axes.text(x + 0.5, low - 0.08 * spread, name, ha="center", va="top", fontsize=8.6)
    below = {"ha": "center", "va": "top", "fontsize": 8.6, "color": MUTED}
    axes.text(0.5, low - 0.26 * spread, f"{last.mix:.3g} / {last.sum:.3g}", **below)
    axes.text(1.5, low - 0.26 * spread, "softmax", **below)
    axes.text(1, high + 0.38 * spread, "the result", ha="center", fontsize=10, fontweight="bold")


def _key(axes: Axes) -> None:
    """What the three kinds of bars mean."""
    axes.set(xlim=(0, 1), ylim=(3, 0))
    axes.axis("off")
    for row, (name, look) in enumerate(LOOKS.items()):
        axes.add_patch(Rectangle((0, row + 0.2), 0.1, 0.6, **look))
        axes.text(0.16, row + 0.5, name, va="center", fontsize=8.6)


def _alt(tiles: Sequence[Tile], number: int, tile: int, out: float, wanted: float) -> str:
    told = []
    for column, t in enumerate(tiles, 1):
        shrunk = f", what was there times {_factor(t.shrink)}" if column > 1 and t.shrink < 1 else ""
        told.append(f"tile {column}: maximum {t.highest:g}{shrunk}, sum {t.sum:.3g}, mix {t.mix:.3g}")
    return (
        f"One query reads its keys in {number} tiles of {tile}. Above, the scores as bars with the running maximum; "
        f"below, the sum of the powers and the mix of the values before and after each tile. {'; '.join(told)}. "
        f"Mix over sum is {out:.3g}; a softmax over all keys at once gives {wanted:.3g}."
    )
