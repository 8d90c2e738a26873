"""What the size of a page costs: rows that stay unused, and the time to read a text back from its pages."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.figures.later_tokens import GUESS
from minillm.course.style import BLUE, INK, ORANGE, card, describe, place, styled
from minillm.course.timing import show_time

WIDTH, HEIGHT = 8.6, 3.5
LEFT, PANEL, BETWEEN = 0.62, 3.35, 1.02  # inches


@styled
def block_sizes(unused: Mapping[int, float], seconds: Mapping[int, float], guess: tuple[int, float]) -> Figure:
    """Two panels over the same page sizes.

    unused   page size -> share of the rows in use that hold no token, 0 to 1
    seconds  page size -> seconds to read a text
    guess    (page size, seconds), drawn as a dashed line and a diamond
    """
    if set(unused) != set(seconds) or guess[0] not in seconds:
        raise ValueError(f"page sizes differ: {sorted(unused)}, {sorted(seconds)}, a guess for {guess[0]}")
    sizes = sorted(unused)
    figure = card(WIDTH, HEIGHT, "The size of a page")
    second = LEFT + PANEL + BETWEEN
    left = place(figure, LEFT, 0.66, WIDTH - LEFT - PANEL, 0.86)
    right = place(figure, second, 0.66, WIDTH - second - PANEL, 0.86)
    _unused(left, [unused[size] for size in sizes])
    _seconds(right, [seconds[size] for size in sizes], sizes.index(guess[0]), guess[1])
    for axes in (left, right):
        axes.set_xlim(-0.6, len(sizes) - 0.4)
        axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        axes.set_xlabel("rows in a page")

    print(f"block_sizes: pages of {', '.join(map(str, sizes))}, a guess for {guess[0]}")
    shares = ", ".join(f"{unused[size]:.1%} with pages of {size}" for size in sizes)
    times = ", ".join(f"{show_time(seconds[size])} from pages of {size}" for size in sizes)
    return describe(
        figure,
        f"Left, bars: rows in use that hold no token, {shares}. Right, a line on a logarithmic axis: time to read a "
        f"text back, {times}. The guess was {show_time(guess[1])} for pages of {guess[0]}.",
    )


def _unused(axes: Axes, shares: list[float]) -> None:
    for x, share in enumerate(shares):
        axes.add_patch(
            Rectangle((x - 0.34, 0), 0.68, share, facecolor=ORANGE, edgecolor=INK, linewidth=0.8, hatch="////")
        )
        words = f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"
        axes.text(x, share + 0.02 * max(shares), words, ha="center", va="bottom", fontsize=8.2)
    axes.set(ylim=(0, 1.15 * (max(shares) or 1)), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.set_title("rows in use that hold no token", loc="left", fontsize=9.5, color=INK)


def _seconds(axes: Axes, times: list[float], guessed: int, guess_s: float) -> None:
    axes.set_yscale("log")
    axes.plot(range(len(times)), times, "-o", color=BLUE, linewidth=1.6, markersize=6, label="read")
    axes.axhline(guess_s, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=2)
    axes.plot(guessed, guess_s, "D", label="your guess", **GUESS)
    at_the_end = {"xytext": (0, 3), "textcoords": "offset points", "fontsize": 8.8, "ha": "right"}
    axes.annotate("your guess", (len(times) - 0.5, guess_s), **at_the_end)
    every = [guess_s, *times]
    axes.set_ylim(min(every) / 1.7, max(every) * 1.7)
    axes.yaxis.set_major_formatter(lambda s, _: show_time(s).replace(".00", "").replace(".0", ""))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.set_title("time to read a text back", loc="left", fontsize=9.5, color=INK)
