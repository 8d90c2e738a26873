"""Memory as area: the scores of one layer as squares that grow with the prompt, beside the K and V of that layer."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.style import BLUE, GREEN, INK, MARGIN, MUTED, PAPER, card, describe, place, styled

SIDE = 3.1  # inches of the largest square
FILLS = ("#e3eef6", "#b9d6ea", "#7fb4d9", BLUE)  # largest to smallest


@styled
def score_matrix(lengths: Sequence[int], heads: int, head_dim: int, kv_heads: int, bytes_per_value: int = 2) -> Figure:
    """Squares for prompts of `lengths` tokens, one inside the other; areas are bytes, K and V on the same scale."""
    lengths = sorted(lengths)
    most = lengths[-1]
    scores = {n: heads * n * n * bytes_per_value for n in lengths}
    kv = {n: 2 * kv_heads * head_dim * n * bytes_per_value for n in lengths}
    subtitle = f"one layer, {heads} heads of {head_dim}, {kv_heads} K/V heads, {bytes_per_value} bytes per value"
    figure = card(8.6, SIDE + 1.42, "What the n × n matrix takes, and what K and V take", subtitle)
    axes = place(figure, MARGIN + 0.02, 0.3, MARGIN, 0.82)
    width, height = (8.6 - 2 * MARGIN - 0.02) / SIDE, (SIDE + 0.3) / SIDE
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")

    for fill, n in zip(FILLS[-len(lengths) :], reversed(lengths), strict=False):
        side = n / most
        axes.add_patch(
            Rectangle((0, 0), side, side, facecolor=fill, edgecolor=PAPER, linewidth=1.5, label=f"scores {n}")
        )
        axes.plot([side, 1.08], [side, side], color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.text(1.1, side, f"{n:,} tokens: {_megabytes(scores[n])}", va="center", fontsize=9.2, color=INK)
    axes.text(0.5, 1.03, "the scores of one layer", ha="center", va="bottom", fontsize=9.5, fontweight="bold")

    left = 1.72
    axes.text(left, 1.03, "its K and V, same scale", va="bottom", fontsize=9.5, fontweight="bold")
    for n in lengths:
        side = (kv[n] / scores[most]) ** 0.5
        y = min(max(n / most - side / 2, 0), 1 - side)
        look = {"facecolor": GREEN, "hatch": "---", "edgecolor": PAPER, "linewidth": 0}
        axes.add_patch(Rectangle((left, y), side, side, label=f"kv {n}", **look))
        axes.text(left + side + 0.03, y + side / 2, _megabytes(kv[n]), va="center", fontsize=9.2, color=INK)

    print(f"score_matrix: {', '.join(f'{n:,} tokens {_megabytes(scores[n])}' for n in lengths)}")
    told = "; ".join(f"{n:,} tokens: scores {_megabytes(scores[n])}, K and V {_megabytes(kv[n])}" for n in lengths)
    return describe(
        figure,
        f"Nested squares whose areas are the memory of one layer's scores, beside small ones for K and V. {told}.",
    )


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"
