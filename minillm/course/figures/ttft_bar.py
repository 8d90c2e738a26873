"""The TTFT bar: one wait at full width, cut into its parts, each part with its milliseconds and its share."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.figures.parts import LOOKS, in_order, patch
from minillm.course.style import INK, MARGIN, MUTED, card, describe, place, styled

BAR = (0.62, 1.0)  # bottom and top, as shares of the axes
CHIP = 0.34  # top of the small square above a part's name


@styled
def ttft_bar(parts: dict[str, float], title: str = "Where the wait goes") -> Figure:
    """`parts` maps the names of LOOKS to seconds, as `RequestMetrics.ttft_parts` does."""
    parts = in_order(parts)
    total = sum(parts.values())
    figure = card(8.6, 2.2, title)
    axes = place(figure, MARGIN + 0.02, 0.2, MARGIN + 0.02, 0.62)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")

    start = 0.0
    for index, (name, seconds) in enumerate(parts.items()):
        share = seconds / total
        axes.add_patch(patch(name, start, BAR[0], share, BAR[1] - BAR[0]))
        _name_below(axes, name, seconds, share, start + share / 2, (index + 0.5) / len(parts))
        start += share
    axes.add_patch(Rectangle((0, BAR[0]), 1, BAR[1] - BAR[0], fill=False, edgecolor=INK, linewidth=0.9, clip_on=False))
    axes.text(1, 1.1, f"{total * 1000:,.0f} ms to the first token", ha="right", va="bottom", color=MUTED)

    print(f"ttft_bar: {len(parts)} parts, shares sum to {100 * sum(v / total for v in parts.values()):.0f}%")
    shares = ", ".join(f"{LOOKS[name].label} {seconds / total:.1%}" for name, seconds in parts.items())
    return describe(figure, f"One bar of {total * 1000:,.0f} ms to the first token, cut into parts: {shares}.")


def _name_below(axes, name: str, seconds: float, share: float, x: float, column: float) -> None:
    """A line from the middle of the part down to its column, and what the column says."""
    look = LOOKS[name]
    axes.plot([x, x, column, column], [BAR[0], BAR[0] - 0.04, CHIP + 0.06, CHIP], color=MUTED, linewidth=0.8)
    chip = patch(name, column - 0.016, CHIP - 0.1, 0.032, 0.1)
    chip.set(linewidth=0.5)
    axes.add_patch(chip)
    axes.text(column, CHIP - 0.15, look.label, ha="center", va="top", fontsize=8.8)
    number = f"{seconds * 1000:,.1f} ms" if seconds < 0.1 else f"{seconds * 1000:,.0f} ms"
    axes.text(column, CHIP - 0.31, f"{number}, {share:.1%}", ha="center", va="top", fontsize=8, color=MUTED)
