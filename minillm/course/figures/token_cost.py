"""What texts cost: one bar per text, as long as it has tokens."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from minillm.course.style import BLUE, INK, MUTED, card, describe, place, styled

LINE = 0.3  # inches per bar


@styled
def token_cost(sizes: Mapping[str, tuple[int, int]], title: str = "Tokens of a text", subtitle: str = "") -> Figure:
    """Bars for `sizes`: name -> (characters, tokens), cheapest first."""
    order = sorted(sizes, key=lambda name: sizes[name][1])
    most = sizes[order[-1]][1]
    above = 0.84 if subtitle else 0.6
    figure = card(8.6, above + LINE * len(order) + 0.2, title, subtitle)
    axes = place(figure, 1.1, 0.16, 2.0, above)
    axes.set(xlim=(0, most), ylim=(len(order) - 0.4, -0.6))
    axes.barh(range(len(order)), [sizes[name][1] for name in order], height=0.62, color=BLUE)
    for row, name in enumerate(order):
        characters, tokens = sizes[name]
        words = f"{tokens:,}   ({characters:,} characters)"
        axes.text(tokens + most * 0.012, row, words, va="center", fontsize=8.8, color=INK)
    axes.set_yticks(range(len(order)), order, fontsize=9.2)
    axes.tick_params(length=0, labelcolor=INK)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.axvline(0, color=MUTED, linewidth=0.8)

    told = ", ".join(f"{name} {sizes[name][1]:,}" for name in order)
    print(f"token_cost: {told}")
    return describe(figure, f"{title}. Bars of token counts, from few to many: {told}.")
