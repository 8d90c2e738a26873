"""What a later token costs over the length of the text before it: a line per version of the engine, and a guess."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from minillm.course.style import BLUE, GREEN, INK, PAPER, VERMILION, card, describe, place, styled
from minillm.course.timing import show_time

LOOKS = (
    {"color": BLUE, "marker": "o", "linestyle": "-"},
    {"color": VERMILION, "marker": "s", "linestyle": (0, (5, 2))},
    {"color": GREEN, "marker": "^", "linestyle": (0, (1, 1.5))},
)
GUESS = {"markersize": 9, "markerfacecolor": PAPER, "markeredgecolor": INK, "markeredgewidth": 1.6, "zorder": 6}


@styled
def later_tokens(seconds: Mapping[str, Mapping[int, float]], guess: tuple[int, float]) -> Figure:
    """Points and lines on two logarithmic axes.

    seconds  version -> {tokens before: seconds of the next token}; three versions at most
    guess    (tokens before, seconds), drawn as a dashed line and a diamond
    """
    if not 0 < len(seconds) <= len(LOOKS):
        raise ValueError(f"{len(seconds)} versions: this figure draws one to {len(LOOKS)}")
    lengths = sorted({n for times in seconds.values() for n in times})
    figure = card(7.4, 3.8, "What one later token costs")
    axes = place(figure, 0.86, 0.62, 1.62, 0.64)
    axes.set(xscale="log", yscale="log", xlim=(lengths[0] / 1.2, lengths[-1] * 1.3))
    for (name, times), look in zip(seconds.items(), LOOKS, strict=False):
        points = sorted(times)
        axes.plot(points, [times[n] for n in points], label=name, linewidth=1.6, markersize=6, **look)
        ends = {"va": "center", "fontsize": 9, "color": INK, "clip_on": False}
        axes.text(axes.get_xlim()[1] * 1.05, times[points[-1]], name, **ends)
    axes.axhline(guess[1], color=INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=2)
    axes.plot(*([value] for value in guess), "D", label="your guess", **GUESS)
    above = {"xytext": (0, 3), "textcoords": "offset points", "fontsize": 8.8, "color": INK}
    axes.annotate("your guess", (lengths[0], guess[1]), **above)
    every = [guess[1], *(s for times in seconds.values() for s in times.values())]
    axes.set_ylim(min(every) / 1.7, max(every) * 1.7)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda s, _: f"{s:g} s" if s >= 1 else f"{s * 1000:g} ms")
    axes.set(xlabel="tokens before it", ylabel="time")

    print(f"later_tokens: {', '.join(f'{name} at {len(times)} lengths' for name, times in seconds.items())}")
    told = "; ".join(
        f"{name}: {', '.join(f'{show_time(times[n])} behind {n:,} tokens' for n in sorted(times))}"
        for name, times in seconds.items()
    )
    return describe(
        figure,
        f"Time of one later token over the tokens before it, both axes logarithmic. {told}. The guess was "
        f"{show_time(guess[1])} behind {guess[0]:,}.",
    )
