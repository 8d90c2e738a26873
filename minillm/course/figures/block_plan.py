"""One block as a plan: the residual stream runs straight through, and two branches each add something to it."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from minillm.course.style import INK, MUTED, PAPER, card, describe, place, styled

STREAM, BRANCH = 0.45, 1.62  # heights of the stream and of the branches
NORM, MATRIX, OTHER = "#e3b0cc", "#8fbfe0", "#f3c262"


@styled
def block_plan(hidden: int, heads: int, kv_heads: int, head_dim: int, feed_forward: int) -> Figure:
    """The plan with the sizes of a model: E, H, Hkv, D, F. Weights are counted at each matrix."""
    queries, keys = heads * head_dim, kv_heads * head_dim
    matrices = {
        "q, k, v": hidden * (queries + 2 * keys),
        "o": queries * hidden,
        "gate, up": 2 * hidden * feed_forward,
        "down": feed_forward * hidden,
    }
    figure = card(8.6, 2.95, "One block, two additions", f"a row of {hidden} numbers per token runs through")
    axes = place(figure, 0.2, 0.1, 0.2, 0.62)
    axes.set(xlim=(0, 8.2), ylim=(-0.25, 2.2))
    axes.axis("off")
    axes.add_patch(
        FancyArrowPatch((0.05, STREAM), (8.15, STREAM), arrowstyle="-|>", mutation_scale=16, lw=3, color=INK)
    )
    axes.text(0.05, STREAM - 0.32, "x", fontsize=10, fontweight="bold")
    axes.text(8.1, STREAM - 0.32, "x", fontsize=10, fontweight="bold", ha="right")
    axes.text(4.1, STREAM - 0.36, "the residual stream", ha="center", fontsize=8.6, color=MUTED)

    first = [("norm", NORM), ("q, k, v", MATRIX), ("turn q, k", OTHER), ("attention", OTHER), ("o", MATRIX)]
    second = [("norm", NORM), ("gate, up", MATRIX), ("silu(g) · u", OTHER), ("down", MATRIX)]
    _branch(axes, 0.5, 4.35, first, matrices)
    _branch(axes, 4.85, 7.75, second, matrices)

    total = sum(matrices.values())
    print(f"block_plan: {total:,} weights, attention {(matrices['q, k, v'] + matrices['o']) / total:.0%}")
    parts = ", ".join(f"{name} {count:,}" for name, count in matrices.items())
    return describe(
        figure,
        f"A straight arrow, the residual stream of {hidden} numbers per token. A first branch leaves it, goes through "
        "norm, q k v, the turn of q and k, attention and o, and is added to it. A second one goes through norm, gate "
        f"and up, silu of gate times up, and down, and is added again. Weights: {parts}.",
    )


def _branch(axes: Axes, start: float, end: float, stations: list[tuple[str, str]], matrices: dict[str, int]) -> None:
    """From the stream up, through the stations, and down again to an addition."""
    line = {"color": MUTED, "linewidth": 1.4, "zorder": 1}
    axes.plot([start, start, end, end], [STREAM, BRANCH, BRANCH, STREAM + 0.16], **line)
    axes.add_patch(Circle((start, STREAM), 0.045, color=INK, zorder=3))
    step = (end - start) / len(stations)
    for index, (name, color) in enumerate(stations):
        x, width = start + step * (index + 0.5), step * 0.86
        box = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": color, "edgecolor": INK, "linewidth": 0.7}
        axes.add_patch(FancyBboxPatch((x - width / 2, BRANCH - 0.2), width, 0.4, zorder=2, **box))
        axes.text(x, BRANCH, name, ha="center", va="center", fontsize=7.8, zorder=3)
        if name in matrices:
            axes.text(x, BRANCH - 0.29, f"{matrices[name]:,}", ha="center", va="top", fontsize=6.8, color=MUTED)
    axes.add_patch(Circle((end, STREAM), 0.15, facecolor=PAPER, edgecolor=INK, linewidth=1.2, zorder=3))
    axes.text(end, STREAM - 0.01, "+", ha="center", va="center", fontsize=12, fontweight="bold", zorder=4)
