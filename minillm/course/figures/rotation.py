"""RoPE in one picture: which numbers are a pair, how pairs turn with the position, and what a score then depends on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from minillm.course.style import (
    BLUE,
    GREEN,
    INK,
    MARGIN,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    VERMILION,
    card,
    describe,
    place,
    styled,
    write,
)

LAYOUTS = {"half a head apart (this model)": "abcdabcd", "neighbours (GGUF files)": "aabbccdd"}
FILLS = {"a": "#f3c262", "b": "#9fd3f2", "c": "#8fd0b8", "d": "#e3b0cc"}
MARKERS = (("o", BLUE), ("x", VERMILION), ("s", GREEN), ("+", PURPLE), ("^", ORANGE))
POSITIONS = 8  # hands on each dial
HEIGHT = 3.7  # inches of the card


@styled
def rotation(
    frequencies: Mapping[str, float], distances: Sequence[int], scores: Mapping[str, Sequence[float]]
) -> Figure:
    """Dials, layouts, scores.

    frequencies  {name of a pair: radians per token}, a dial each, three fit
    scores       {where the query stands: q.k for each of `distances`}
    """
    figure = card(8.6, HEIGHT, "A position is a turn")
    for index, (name, frequency) in enumerate(frequencies.items()):
        axes = place(figure, 0.3 + 1.42 * index, 1.5, 8.6 - 0.3 - 1.42 * index - 1.3, 0.86)
        _dial(axes, name, frequency)
    strip = place(figure, 0.3, 0.2, 8.6 - 4.55, HEIGHT - 1.36)
    _layouts(strip)
    _scores(place(figure, 5.45, 0.62, MARGIN + 0.1, 0.86), distances, scores)
    write(figure, 5.02, HEIGHT - 0.6, "score q·k over the distance to the key", fontsize=9.5)

    spread = max(max(v) - min(v) for v in zip(*scores.values(), strict=True))
    print(f"rotation: {len(frequencies)} dials, {len(scores)} x {len(distances)} scores, equal: {spread < 1e-3}")
    return describe(figure, _alt(frequencies, distances, scores))


def _dial(axes: Axes, name: str, frequency: float) -> None:
    axes.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
    axes.axis("off")
    axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=MUTED, linewidth=0.9))
    for position in reversed(range(POSITIONS)):
        angle = position * frequency
        x, y = math.cos(angle), math.sin(angle)
        axes.plot([0, x], [0, y], color=INK, alpha=1 - 0.11 * position, linewidth=1.3)
        if position in (0, POSITIONS - 1) or (position == 1 and angle > 0.4):
            axes.plot([x], [y], "o", markersize=12, color=PAPER, markeredgecolor=MUTED, markeredgewidth=0.6)
            axes.text(x, y, position, fontsize=7.5, ha="center", va="center")
    turn = 2 * math.pi / frequency
    axes.set_title(f"{name}\n{turn:,.0f} tokens a turn", fontsize=8.6, color=INK, pad=2)


def _layouts(axes: Axes) -> None:
    axes.set(xlim=(0, 8), ylim=(0, 2))
    axes.axis("off")
    for row, (name, letters) in enumerate(LAYOUTS.items()):
        y = 1.14 - row * 1.1
        for column, letter in enumerate(letters):
            axes.add_patch(Rectangle((0.42 * column, y), 0.4, 0.5, facecolor=FILLS[letter], edgecolor=MUTED, lw=0.6))
            axes.text(0.42 * column + 0.2, y + 0.25, letter, ha="center", va="center", fontsize=8)
        axes.text(3.6, y + 0.25, name, va="center", fontsize=8.6)


def _scores(axes: Axes, distances: Sequence[int], scores: Mapping[str, Sequence[float]]) -> None:
    for (marker, color), (label, values) in zip(MARKERS, scores.items(), strict=False):
        hollow = {"markerfacecolor": "none"} if marker in "os" else {}
        size = 8 if marker == "o" else 6
        axes.plot(distances, values, marker, color=color, markersize=size, label=label, linestyle="", **hollow)
    first = next(iter(scores.values()))
    axes.plot(distances, first, color=MUTED, linewidth=0.7, zorder=0)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.12 * (high - low))
    axes.set_xlabel("tokens between query and key")
    axes.legend(loc="upper right", handletextpad=0.2, borderaxespad=0)


def _alt(frequencies: Mapping[str, float], distances: Sequence[int], scores: Mapping[str, Sequence[float]]) -> str:
    dials = ", ".join(f"{name} once in {2 * math.pi / f:,.0f} tokens" for name, f in frequencies.items())
    return (
        f"Three dials whose hands stand for positions 0 to {POSITIONS - 1}: {dials}. Below, which of eight numbers are "
        "a pair: a b c d a b c d, half a head apart, in this model, and a a b b c c d d, neighbours, in GGUF files. "
        f"Right: the score over distances {distances[0]} to {distances[-1]} for queries at {', '.join(scores)}: the "
        "marks lie on each other."
    )
