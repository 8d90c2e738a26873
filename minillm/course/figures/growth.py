"""F2, growth: TTFT over prompt length on two logarithmic axes, with the three terms that it is made of."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minillm.course.fit import Growth
from minillm.course.style import INK, MARGIN, MUTED, PAPER, VERMILION, card, describe, place, styled

AREAS = (  # what a term is, its fill, the colour of its hatching, its hatching
    ("a: once per request", "#c3c8cc", "#777e85", "..."),
    ("b n: once per token", "#8fc1dd", "#8fc1dd", ""),
    ("c n²: once per pair of tokens", "#f3c55f", "#9a6a00", "///"),
)


@styled
def growth(
    ttft_s: Mapping[int, float],
    fit: Growth,
    overtakes: float,
    guess: tuple[int, float] | None = None,
) -> Figure:
    """Measured points over the fitted terms.

    ttft_s     {prompt tokens: seconds}
    overtakes  prompt length where counting says that pairs cost as much as tokens (costs.quadratic_crossover)
    guess      (prompt tokens, seconds) that were guessed beforehand
    """
    lengths = sorted(ttft_s)
    right = 2.0 * max(overtakes, lengths[-1])
    figure = card(8.6, 5.0, "How the wait grows with the prompt")
    axes = place(figure, 0.86, 0.62, MARGIN + 0.08, 0.64)
    axes.set(xscale="log", yscale="log", xlim=(lengths[0] / 1.25, right))
    axes.set_ylim(min(ttft_s.values()) / 4, 2.2 * max(fit.seconds(right), guess[1] if guess else 0))

    _areas(axes, fit, lengths[-1])
    points = [ttft_s[n] for n in lengths]
    axes.plot(lengths, points, "o", color=INK, markersize=7, markeredgecolor=PAPER, zorder=5, label="measured")
    _slopes(axes, lengths[-1], ttft_s[lengths[-1]])
    _overtakes(axes, overtakes)
    if guess:
        _guess(axes, *guess)
    _dress(axes)

    print(f"growth: {len(lengths)} points from {lengths[0]:,} to {lengths[-1]:,} tokens, line at {overtakes:,.0f}")
    return describe(figure, _alt(ttft_s, fit, overtakes, guess))


def _areas(axes: Axes, fit: Growth, measured_to: int) -> None:
    (left, right), floor = axes.get_xlim(), axes.get_ylim()[0]
    n = np.geomspace(left, right, 200)
    below = np.zeros_like(n)
    for (label, fill, ink, hatch), term in zip(AREAS, fit.terms(n), strict=True):
        above = below + term
        axes.fill_between(
            n,
            np.maximum(below, floor),
            np.maximum(above, floor),
            facecolor=fill,
            edgecolor=ink,
            hatch=hatch,
            linewidth=0,
            label=label,
        )
        below = above
    axes.plot(n, below, color=INK, linewidth=1.4, zorder=4)
    axes.axvspan(measured_to * 1.08, right, facecolor=PAPER, alpha=0.5, linewidth=0, zorder=2)
    axes.text(measured_to * 1.14, floor * 1.2, "the fit, not\nmeasured", fontsize=8.5, color=MUTED, zorder=6)


def _slopes(axes: Axes, n: int, seconds: float) -> None:
    """Two rulers through the last point: how the wait would go on if it were all tokens, or all pairs."""
    end = min(4 * n, axes.get_xlim()[1] * 0.8)
    for slope, style in ((1, (0, (6, 3))), (2, (0, (1, 1.5)))):
        high = seconds * (end / n) ** slope
        axes.plot([n, end], [seconds, high], color=INK, linewidth=1.2, linestyle=style, zorder=4)
        paper = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.5}  # the curve may pass behind it
        axes.text(end * 1.03, high, f"slope {slope}", fontsize=8.8, va="center", zorder=6, bbox=paper)


def _overtakes(axes: Axes, n: float) -> None:
    axes.axvline(n, color=VERMILION, linewidth=1.4, zorder=4)
    height = axes.get_ylim()[1]
    note = f"{n:,.0f} tokens: from here\npairs cost more (counted)"
    axes.text(n / 1.05, height / 1.12, note, ha="right", va="top", fontsize=8.8, color=INK, zorder=6)


def _guess(axes: Axes, n: int, seconds: float) -> None:
    left = axes.get_xlim()[0]
    axes.plot([left, n], [seconds, seconds], color=INK, linewidth=1.2, linestyle=(0, (2, 2)), zorder=4)
    diamond = {"markersize": 7, "markerfacecolor": PAPER, "markeredgecolor": INK, "zorder": 6}
    axes.plot([n], [seconds], "D", label="your guess", **diamond)


def _dress(axes: Axes) -> None:
    left, right = axes.get_xlim()
    ticks = [2**k for k in range(3, 21) if left <= 2**k <= right]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda s, _: f"{s:g} s" if s >= 1 else f"{s * 1000:g} ms")
    axes.set(xlabel="prompt tokens n", ylabel="time to first token")
    key = axes.legend(loc="upper left", bbox_to_anchor=(0.0, 1.02), frameon=True, facecolor=PAPER, edgecolor="none")
    key.set_zorder(7)


def _alt(ttft_s: Mapping[int, float], fit: Growth, overtakes: float, guess: tuple[int, float] | None) -> str:
    points = ", ".join(f"{s:.2g} s at {n:,}" for n, s in sorted(ttft_s.items()))
    last = max(ttft_s)
    shares = "{:.0%} is paid once, {:.0%} per token, {:.0%} per pair of tokens".format(*fit.shares(last))
    said = f" The guess was {guess[1]:.2g} s at {guess[0]:,}." if guess else ""
    return (
        f"Time to first token over prompt length, both axes logarithmic: {points}. Of the wait at {last:,} tokens "
        f"{shares}. A vertical line marks {overtakes:,.0f} tokens, where pairs start to cost more.{said}"
    )
