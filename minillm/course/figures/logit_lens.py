"""The logit lens: what the model would say if it stopped after each layer, read from one row of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.figures.attention_map import readable
from minillm.course.style import BLUE, INK, MUTED, card, describe, place, styled

LINE = 0.158  # inches per layer
PLAIN = "#c9d6df"


@styled
def logit_lens(readings: Sequence[tuple[str, float, int]], answer: str, title: str) -> Figure:
    """`readings[l]` after l layers: (the likeliest token, its probability, the rank of `answer`, from 1)."""
    count = len(readings)
    figure = card(8.6, 1.62 + LINE * count, title)
    left = place(figure, 1.02, 0.52, 8.6 - 1.02 - 4.1, 0.88)
    right = place(figure, 5.45, 0.52, 0.4, 0.88)
    for axes in (left, right):
        axes.set_ylim(count - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
    _likeliest(left, readings, answer)
    _rank(right, [rank for _, _, rank in readings], answer)

    first = _first_kept(readings, answer)
    print(f"logit_lens: {count - 1} layers, {readable(answer)} leads from layer {first - 1} on")
    return describe(figure, _alt(readings, answer, first))


def _likeliest(axes: Axes, readings: Sequence[tuple[str, float, int]], answer: str) -> None:
    axes.set_xlim(0, 1.3)
    for layer, (token, probability, _) in enumerate(readings):
        is_answer = token == answer
        axes.add_patch(Rectangle((0, layer - 0.36), probability, 0.72, facecolor=BLUE if is_answer else PLAIN))
        style = {"fontweight": "bold", "color": INK} if is_answer else {"color": MUTED}
        label = f"{readable(token)}  {probability:.0%}"
        axes.text(probability + 0.015, layer, label, va="center", fontsize=7.6, **style)
    names = ["embedding", *(f"layer {layer}" for layer in range(len(readings) - 1))]
    axes.set_yticks(range(len(readings)), names, fontsize=7.4)
    axes.set_xticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.set_title("the likeliest token after each layer", loc="left", color=INK)


def _rank(axes: Axes, ranks: Sequence[int], answer: str) -> None:
    axes.set_xscale("log")
    axes.set_xlim(2.2 * max(ranks), 0.7)
    axes.plot(ranks, range(len(ranks)), color=BLUE, linewidth=1.1, marker="o", markersize=3.6)
    ticks = [10**k for k in range(6) if 10**k <= 2 * max(ranks)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks([])
    axes.set_title(f"the rank of {readable(answer)}, 1 is the likeliest", loc="left", color=INK)


def _first_kept(readings: Sequence[tuple[str, float, int]], answer: str) -> int:
    """The first reading from which `answer` stays the likeliest token; the number of readings if it never is."""
    first = len(readings)
    while first and readings[first - 1][0] == answer:
        first -= 1
    return first


def _alt(readings: Sequence[tuple[str, float, int]], answer: str, first: int) -> str:
    name = readable(answer)
    steps = [f"after {layer} layers {readable(r[0])} ({r[1]:.0%}), {name} has rank {r[2]:,}"
             for layer, r in list(enumerate(readings))[::6]]  # fmt: skip
    return (
        f"Two columns with a line for each layer: the token that the model would say if it stopped there, and the rank "
        f"of {name}. {'; '.join(steps)}. {name} stays the likeliest from layer {first - 1} on."
    )
