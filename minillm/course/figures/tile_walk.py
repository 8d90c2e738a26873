"""F8, tile walk and traffic: in which order a kernel visits the tiles of the scores, and what that saves in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.style import BLUE, INK, ORANGE, PAPER, SKY, card, describe, place, styled, write

WIDTH, SIDE = 8.6, 2.9  # inches of the card and of the longer side of the grid
LEAST = 2.2  # inches that the bars need
TOP, BOTTOM, LEFT = 0.98, 0.78, 0.62
NAMED = 12  # beyond so many tiles in a row their numbers would overlap
LOOKS = {
    "all keys seen": {"facecolor": SKY, "edgecolor": PAPER},
    "masked in part": {"facecolor": "#cfe8f7", "edgecolor": PAPER},
    "never visited": {"facecolor": "#efece3", "edgecolor": "#b5b0a2", "hatch": "////"},
}
BARS = ({"facecolor": ORANGE, "hatch": "...."}, {"facecolor": BLUE, "hatch": ""})


class Visit(NamedTuple):
    """One tile: where it begins, how large it is, and when it is visited: 1, 2, ..., 0 for never."""

    query: int
    key: int
    height: int
    width: int
    number: int
    kind: str


def visits(n: int, keys: int, query_tile: int, key_tile: int) -> list[Visit]:
    """All tiles of n queries at the end of `keys` keys, row by row; keys behind a tile's last query are not read."""
    found, number = [], 0
    for query in range(0, n, query_tile):
        height = min(query_tile, n - query)
        first, last = keys - n + query, keys - n + query + height - 1  # positions of the tile's queries
        for key in range(0, keys, key_tile):
            width = min(key_tile, keys - key)
            seen = key <= last
            number += seen
            kind = "never visited" if not seen else "all keys seen" if key + width - 1 <= first else "masked in part"
            found.append(Visit(query, key, height, width, number if seen else 0, kind))
    return found


@styled
def tile_walk(
    n: int, keys: int, query_tile: int, key_tile: int, traffic: Mapping[str, Mapping[str, float]], subtitle: str = ""
) -> Figure:
    """Left the tiles, numbered as they are visited; right the bytes of each tensor, a bar for each of two ways.

    traffic  way -> {tensor: bytes}; two ways, the same tensors in both
    """
    if len(traffic) != 2 or len({tuple(bytes_of) for bytes_of in traffic.values()}) != 1:
        raise ValueError(f"{len(traffic)} ways: this figure compares two, by the same tensors")
    tiles = visits(n, keys, query_tile, key_tile)
    across, down = (SIDE * length / max(n, keys) for length in (keys, n))
    height = TOP + max(down, LEAST) + BOTTOM
    figure = card(WIDTH, height, "The walk over the tiles, and the bytes that it moves", subtitle)
    _grid(place(figure, LEFT, height - TOP - down, WIDTH - LEFT - across, TOP), tiles, n, keys)
    _bytes(place(figure, LEFT + across + 1.05, BOTTOM, 0.95, TOP), traffic)
    write(figure, LEFT + across + 1.05, height - TOP + 0.13, "bytes through memory", fontsize=9.5, fontweight="bold")
    totals = {way: sum(bytes_of.values()) for way, bytes_of in traffic.items()}
    _key(figure, LEFT + across + 1.05, totals)

    seen = sum(tile.number > 0 for tile in tiles)
    sums = ", ".join(f"{way} {_megabytes(total)}" for way, total in totals.items())
    print(f"tile_walk: {seen} of {len(tiles)} tiles visited, {len(tiles) - seen} skipped; {sums}")
    return describe(figure, _alt(tiles, traffic, sums))


def _grid(axes: Axes, tiles: list[Visit], n: int, keys: int) -> None:
    axes.set(xlim=(0, keys), ylim=(n, 0), aspect="equal")
    crowded = max(len({tile.key for tile in tiles}), len({tile.query for tile in tiles})) > NAMED
    for tile in tiles:
        box = Rectangle((tile.key, tile.query), tile.width, tile.height, linewidth=1.3, label=tile.kind, zorder=1)
        box.set(**LOOKS[tile.kind])
        axes.add_patch(box)
        if tile.number and not crowded:
            right, down = (0.3, 0.7) if tile.kind == "masked in part" else (0.5, 0.5)  # beside the dashed line
            place_at = tile.key + right * tile.width, tile.query + down * tile.height
            axes.text(*place_at, f"{tile.number}", ha="center", va="center", fontsize=9, color=INK, zorder=4)
    first = keys - n
    axes.plot([first, keys], [0, n], color=INK, linewidth=1.1, linestyle=(0, (4, 2)), zorder=3)  # who sees whom
    axes.set_xticks([0, keys], ["0", f"{keys:,}"])
    axes.set_yticks([0, n], [f"{first:,}", f"{keys:,}"])
    axes.set_xlabel("keys →", labelpad=-8)
    axes.set_ylabel("← queries", labelpad=-14)
    axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0, pad=2)
    axes.xaxis.set_label_position("top")
    axes.spines[:].set_visible(False)


def _bytes(axes: Axes, traffic: Mapping[str, Mapping[str, float]]) -> None:
    """A pair of bars for each tensor, and the totals below a line."""
    ways = list(traffic)
    tensors = list(traffic[ways[0]])
    most = max(max(bytes_of.values()) for bytes_of in traffic.values())
    axes.set(xlim=(0, most), ylim=(len(tensors) + 0.1, -0.35))
    for row, tensor in enumerate(tensors):
        for offset, (way, look) in enumerate(zip(ways, BARS, strict=True)):
            size, y = traffic[way][tensor], row + 0.33 * offset
            axes.add_patch(Rectangle((0, y), size, 0.29, label=f"{way} {tensor}", edgecolor=PAPER, linewidth=0, **look))
            words = _megabytes(size) if size else "none"
            axes.text(size + 0.015 * most, y + 0.155, words, va="center", fontsize=8.2, color=INK)
    axes.set_yticks([row + 0.31 for row in range(len(tensors))], tensors, fontsize=9)
    axes.set_xticks([])
    axes.spines[["bottom"]].set_visible(False)
    axes.tick_params(length=0, labelcolor=INK)


def _key(figure: Figure, left: float, totals: Mapping[str, float]) -> None:
    """What the tiles are, and right of it, from `left` inches on, whose bars are whose."""
    height = figure.get_size_inches()[1]
    axes = place(figure, LEFT, 0.26, 0.2, height - 0.26 - 0.2)
    axes.set(xlim=(0, WIDTH - LEFT - 0.2), ylim=(0, 0.2))
    axes.axis("off")
    entries = [(0.0, "all keys seen"), (1.18, "masked in part"), (2.42, "never visited")]
    shown = [(x, name, LOOKS[name]) for x, name in entries]
    for number, ((way, total), look) in enumerate(zip(totals.items(), BARS, strict=True)):
        shown.append((left - LEFT + 1.75 * number, f"{way}, {_megabytes(total)}", look))
    for x, name, look in shown:
        axes.add_patch(Rectangle((x, 0.02), 0.18, 0.16, **{"linewidth": 0.6, "edgecolor": PAPER, **look}))
        axes.text(x + 0.24, 0.1, name, va="center", fontsize=8.4)


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 99.5e6 else f"{count / 1e6:.2g} MB"


def _alt(tiles: list[Visit], traffic: Mapping[str, Mapping[str, float]], sums: str) -> str:
    kinds = ", ".join(f"{sum(tile.kind == kind for tile in tiles)} {kind}" for kind in LOOKS)
    rows = "; ".join(
        f"{way}: {', '.join(f'{tensor} {_megabytes(size)}' for tensor, size in bytes_of.items())}"
        for way, bytes_of in traffic.items()
    )
    return (
        f"A grid of {len(tiles)} tiles, queries down and keys across, numbered row by row in visiting order: {kinds}. "
        f"Beside it the bytes of each tensor as bars. {rows}. In all: {sums}."
    )
