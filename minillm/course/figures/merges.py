"""A word on its way from bytes to tokens: one line for each merge, the new token marked, its rank beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from minillm.course.figures.tiles import label, tile
from minillm.course.style import MARGIN, MUTED, card, describe, place, styled

LETTER, LINE, HEIGHT = 0.36, 0.37, 0.27  # inches: of one byte, from line to line, of a tile
PLAIN, NEW = "#eef0ee", "#f3c55f"


@dataclass(frozen=True)
class Merge:
    """One line: the tokens after a merge, which of them is new (None in the first line), and the merge's rank."""

    tokens: Sequence[bytes]
    new: int | None = None
    rank: int | None = None


@styled
def merges(lines: Sequence[Merge], title: str = "") -> Figure:
    """One line for each of `lines`, from the bytes down to the tokens; a tile is as wide as it has bytes."""
    length = sum(map(len, lines[0].tokens))
    left = 1.34
    figure = card(max(left + length * LETTER + MARGIN, 5.0), 0.72 + LINE * len(lines), title)
    axes = place(figure, left, 0.12, figure.get_size_inches()[0] - left - length * LETTER, 0.56)
    axes.set(xlim=(0, length * LETTER), ylim=(LINE * len(lines), 0))
    axes.axis("off")
    for row, line in enumerate(lines):
        y, x = row * LINE + 0.05, 0.0
        for i, token in enumerate(line.tokens):
            width = len(token) * LETTER
            weight = "bold" if i == line.new else "normal"
            tile(axes, x, y, width, HEIGHT, label(token), NEW if i == line.new else PLAIN, fontweight=weight)
            x += width
        words = "bytes" if line.rank is None else f"rank {line.rank:,}"
        axes.text(-0.14, y + HEIGHT / 2, words, ha="right", va="center_baseline", fontsize=8.8, color=MUTED)

    last = [label(token) for token in lines[-1].tokens]
    print(f"merges: {len(lines) - 1} merges, {len(lines[0].tokens)} bytes become {len(last)} tokens: {' '.join(last)}")
    told = "; ".join(f"rank {line.rank:,} makes {label(line.tokens[line.new])}" for line in lines[1:])
    return describe(
        figure, f"A word of {length} bytes becomes {' and '.join(last)} in {len(lines) - 1} merges: {told}."
    )
