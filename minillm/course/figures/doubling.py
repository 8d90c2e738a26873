"""Measured times over a size that doubles, with the guess for the last one and rulers of slope 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from minillm.course.style import INK, MARGIN, PAPER, VERMILION, card, describe, place, styled
from minillm.course.timing import show_time

POINT = {"color": INK, "markersize": 6, "markeredgecolor": PAPER, "zorder": 7}
DIAMOND = {"markersize": 9, "markerfacecolor": PAPER, "markeredgecolor": VERMILION, "markeredgewidth": 1.6, "zorder": 6}


@styled
def doubling(seconds: Mapping[int, float], guess_s: float, title: str, size: str = "tokens n") -> Figure:
    """Points of `seconds` (size -> seconds) on two logarithmic axes; the guess is for the largest size.

    The rulers start at the point before the last: where slope 1 ends the time would have doubled, where slope 2
    ends it would have grown fourfold.
    """
    sizes = sorted(seconds)
    if len(sizes) < 2:
        raise ValueError(f"{len(sizes)} size(s): two are the least that show growth")
    before, last = sizes[-2:]
    figure = card(6.6, 3.7, title)
    axes = place(figure, 0.86, 0.62, MARGIN + 0.1, 0.64)
    axes.set(xscale="log", yscale="log", xlim=(sizes[0] / 1.2, last * 1.75))
    for slope, style in ((1, (0, (6, 3))), (2, (0, (1, 1.5)))):
        end = seconds[before] * (last / before) ** slope
        axes.plot([before, last], [seconds[before], end], color=INK, linewidth=1.2, linestyle=style, zorder=3)
        axes.text(last * 1.06, end, f"slope {slope}: ×{(last / before) ** slope:g}", fontsize=8.8, va="center")
    axes.plot(sizes, [seconds[n] for n in sizes], "o", label="measured", **POINT)
    axes.axhline(guess_s, color=VERMILION, linewidth=1.2, linestyle=(0, (4, 3)), zorder=2)
    axes.plot([last], [guess_s], "D", label="your guess", **DIAMOND)
    axes.set_ylim(top=1.5 * max(axes.get_ylim()[1], guess_s))
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda s, _: f"{s:g} s" if s >= 1 else f"{s * 1000:g} ms")
    axes.set(xlabel=size, ylabel="time")
    axes.legend(loc="lower right")

    print(f"doubling: {len(sizes)} points from {sizes[0]:,} to {last:,}, and a guess")
    points = ", ".join(f"{show_time(seconds[n])} at {n:,}" for n in sizes)
    return describe(
        figure,
        f"{title}: {points}, both axes logarithmic, with rulers of slope 1 and 2. The guess was {show_time(guess_s)}.",
    )
