"""The logit lens: what the model would say if it stopped after each layer, read from one row of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.figures.attention_map import readable
from minillm.course.style import BLUE, INK, MARGIN, MUTED, VERMILION, card, describe, place, styled

LINE = 0.158  # inches per layer


@styled
def logit_lens(readings: Sequence[tuple[str, float, float]], answer: str, title: str = "The last row, layer by layer"):
    """`readings[l]` after l layers: (the likeliest token, its probability, the probability of `answer`)."""
    count = len(readings)
    figure: Figure = card(8.6, 1.5 + LINE * count, title, "what the LM head makes of the last row after each layer")
    axes = place(figure, 1.25, 0.5, MARGIN + 0.2, 0.78)
    axes.set(xlim=(0, 1.38), ylim=(count - 0.5, -0.5))
    for layer, (token, probability, of_answer) in enumerate(readings):
        axes.add_patch(Rectangle((0, layer - 0.36), probability, 0.72, facecolor="#c9d6df", label="likeliest"))
        axes.add_patch(Rectangle((0, layer - 0.36), of_answer, 0.72, facecolor=BLUE, label="answer"))
        final = token == answer
        weight, color = ("bold", INK) if final else ("normal", MUTED)
        axes.text(
            probability + 0.012, layer, f"{readable(token)}  {probability:.0%}", va="center", fontsize=7.6,
            fontweight=weight, color=color,
        )  # fmt: skip
    names = ["embedding", *(f"layer {layer}" for layer in range(count - 1))]
    axes.set_yticks(range(count), names, fontsize=7.4)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("probability", x=0.36)
    first = _first_kept(readings, answer)
    axes.axhline(first - 0.5, color=VERMILION, linewidth=1, linestyle=(0, (4, 3)))
    note = f"from here on {readable(answer)} is the likeliest"
    axes.text(1.37, first - 0.62, note, ha="right", va="bottom", fontsize=8.4, color=INK)

    print(f"logit_lens: {count - 1} layers, {readable(answer)!r} leads from layer {first - 1} on")
    return describe(figure, _alt(readings, answer, first))


def _first_kept(readings: Sequence[tuple[str, float, float]], answer: str) -> int:
    """The first reading from which `answer` stays the likeliest token; the number of readings if it never is."""
    first = len(readings)
    while first and readings[first - 1][0] == answer:
        first -= 1
    return first


def _alt(readings: Sequence[tuple[str, float, float]], answer: str, first: int) -> str:
    steps = [f"after {layer} layers {readable(r[0])} ({r[1]:.0%})" for layer, r in list(enumerate(readings))[::6]]
    return (
        f"One bar per layer with the token that the model would say if it stopped there: {', '.join(steps)}. "
        f"{readable(answer)} stays the likeliest from layer {first - 1} on and ends at {readings[-1][2]:.0%}."
    )
