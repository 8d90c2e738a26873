"""What the size of a tile decides: time and memory of a tiled attention beside the one big product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from minillm.course.style import BLUE, INK, MUTED, ORANGE, PAPER, card, describe, place, styled, write
from minillm.course.timing import show_time

TEXT = {"color": INK, "path_effects": [withStroke(linewidth=3, foreground=PAPER)], "zorder": 7}  # readable over lines


class Cost(NamedTuple):
    """What one run takes."""

    seconds: float
    bytes: float


@styled
def tile_size(costs: Mapping[int, Cost], naive: Cost, tokens: int, guess: tuple[int, float]) -> Figure:
    """Two panels over the tile's size: time, with the guess as a dashed line, and the most memory at once.

    costs   rows and keys of a tile -> Cost
    naive   of the n x n matrix, drawn as a line across
    guess   (tile, seconds)
    """
    if not costs:
        raise ValueError("no tile was measured")
    figure = card(8.6, 3.5, "What a tile costs", f"attention of one layer, {tokens:,} tokens")
    time, memory = place(figure, 0.78, 0.66, 4.5, 1.12), place(figure, 5.0, 0.66, 0.28, 1.12)
    _panel(time, {tile: cost.seconds for tile, cost in costs.items()}, naive.seconds, show_time, [guess[1]])
    _panel(memory, {tile: cost.bytes for tile, cost in costs.items()}, naive.bytes, _megabytes)
    dashed = {"color": INK, "linewidth": 1.1, "linestyle": (0, (4, 3)), "zorder": 2}
    time.axhline(guess[1], label="your guess", **dashed)
    mark = {"markersize": 8, "markerfacecolor": PAPER, "markeredgecolor": INK, "markeredgewidth": 1.6, "zorder": 6}
    time.plot([guess[0]], [guess[1]], "D", **mark)
    beside = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 8.6, **TEXT}
    time.annotate("your guess", guess, **beside)
    for left, words in ((0.78, "time"), (5.0, "most memory at once")):
        write(figure, left, 3.5 - 0.98, words, fontsize=9.5, fontweight="bold")

    print(f"tile_size: {len(costs)} tiles from {min(costs)} to {max(costs)}, beside the whole matrix")
    told = "; ".join(f"tiles of {tile}: {show_time(c.seconds)}, {_megabytes(c.bytes)}" for tile, c in costs.items())
    return describe(
        figure,
        f"Time and most memory at once of attention over {tokens:,} tokens by the size of its tiles. {told}. The whole "
        f"matrix: {show_time(naive.seconds)}, {_megabytes(naive.bytes)}. The guess for tiles of {guess[0]} was "
        f"{show_time(guess[1])}.",
    )


def _panel(
    axes: Axes, values: Mapping[int, float], naive: float, show: Callable[[float], str], others: list[float] = ()
) -> None:
    """Points over the tile, each with its value, and the naive one as a line with its name."""
    tiles = sorted(values)
    axes.set(xscale="log", yscale="log", xlim=(tiles[0] / 1.5, tiles[-1] * 1.5))
    axes.plot(tiles, [values[tile] for tile in tiles], "o-", color=BLUE, linewidth=1.6, markersize=6, label="tiles")
    for tile in tiles:
        above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 8, **TEXT}
        axes.annotate(show(values[tile]), (tile, values[tile]), **above)
    axes.axhline(naive, color=ORANGE, linewidth=2, label="naive", zorder=1)
    axes.text(tiles[0] / 1.4, naive, f"whole matrix, {show(naive)}", va="bottom", fontsize=8.6, **TEXT)
    every = [naive, *values.values(), *others]
    axes.set_ylim(min(every) / 1.6, max(every) * 2.2)
    axes.set_xticks(tiles, [f"{tile:,}" for tile in tiles])
    axes.set_xticks([], minor=True)
    axes.set_yticks([])
    axes.set_yticks([], minor=True)
    axes.spines["left"].set_color(MUTED)
    axes.set_xlabel("queries and keys of a tile")


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 9.5e6 else f"{count / 1e6:.1f} MB"
