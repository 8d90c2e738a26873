"""TTFT over the number of prompt tokens that were found in the prefix cache, and a guess for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from minillm.course.style import BLUE, INK, MUTED, PAPER, card, describe, place, styled
from minillm.course.timing import Timing, show_time


@styled
def found_tokens(times: Mapping[int, Timing], prompt: int, guess: tuple[int, float]) -> Figure:
    """Points with their spread, one per number of tokens found; a thin line is what is left, in proportion.

    times   tokens found -> TTFT; 0 must be among them
    prompt  tokens of the prompt
    guess   (tokens found, seconds), drawn as a dashed line and a diamond
    """
    if 0 not in times or not all(0 <= n < prompt for n in times):
        raise ValueError(f"times of {sorted(times)} tokens found: wanted are 0 and others below {prompt}")
    counts, cold = sorted(times), times[0].median
    medians = [times[n].median for n in counts]
    spread = [[times[n].median - times[n].low for n in counts], [times[n].high - times[n].median for n in counts]]
    figure = card(7.4, 3.6, f"A prompt of {prompt:,} tokens, more and more of it found")
    axes = place(figure, 0.92, 0.62, 0.5, 0.66)
    axes.plot([0, prompt], [cold, 0], color=MUTED, linewidth=1, label="in proportion")
    axes.errorbar(counts, medians, spread, fmt="o-", color=BLUE, linewidth=1.7, markersize=6, capsize=3)
    axes.axhline(guess[1], color=INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=2)
    look = {"markersize": 9, "markerfacecolor": PAPER, "markeredgecolor": INK, "markeredgewidth": 1.6, "zorder": 6}
    axes.plot(*([value] for value in guess), "D", label="your guess", **look)
    small = {"fontsize": 8.8, "textcoords": "offset points"}
    axes.annotate("your guess", (0, guess[1]), xytext=(4, 3), color=INK, **small)
    axes.annotate(
        "what is left, in proportion", (prompt / 2, cold / 2), xytext=(-10, -16), ha="right", color=MUTED, **small
    )
    axes.set(xlim=(-0.03 * prompt, prompt * 1.03), ylim=(0, 1.12 * max(*medians, guess[1], times[0].high)))
    axes.set_xticks(counts, [f"{n:,}" for n in counts])
    axes.yaxis.set_major_formatter(lambda s, _: f"{s:g} s" if s >= 1 else f"{s * 1000:g} ms")
    axes.set(xlabel="prompt tokens found in the cache", ylabel="time to first token")

    print(f"found_tokens: {prompt} prompt tokens, {', '.join(map(str, counts))} of them found")
    told = ", ".join(f"{show_time(times[n].median)} with {n:,} found" for n in counts)
    return describe(
        figure,
        f"Time to first token of a prompt of {prompt:,} tokens over how many of them were found in the cache: {told}. "
        f"A thin line falls from the first point to zero. The guess was {show_time(guess[1])} with {guess[0]:,} found.",
    )
