"""F14, precision: the numbers that four formats know, below the weights that have to be among them; and what fewer bits
do to the first token, to the ones after it, and to perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minillm.course.style import BLUE, FAINT, INK, MARGIN, MUTED, PAPER, VERMILION, card, describe, place, styled, write

WIDTH, TOP, BOTTOM = 8.6, 3.75, 2.75  # inches: the card, its number lines, its times
LEFT, RIGHT = MARGIN + 0.72, 1.85  # inches for the names of the lines, and for what is written behind them
BINS = 60
SERIES = (("first token", "ttft_s", BLUE, "o", "-"), ("each one after it", "tpot_s", VERMILION, "s", (0, (4, 2))))


@dataclass(frozen=True)
class Precision:
    """What was measured with weights of so many bits; None for times that mean nothing, where a format is emulated."""

    name: str
    bits: float
    ttft_s: float | None
    tpot_s: float | None
    perplexity: float


@styled
def precision(row: Sequence[float] | torch.Tensor, measured: Sequence[Precision] = ()) -> Figure:
    """The weights of one row over the number lines of int4, int8, e4m3 and e5m2; below them times over bits.

    row       one row of a weight matrix; each format gets the scale that puts the largest weight at its largest number
    measured  ways to hold the model; the first is what the others are compared with
    """
    weights = np.asarray(torch.as_tensor(row).float(), dtype=np.float64)
    if weights.ndim != 1 or not np.abs(weights).max(initial=0) > 0:
        raise ValueError(f"a row of shape {weights.shape} has nothing to draw; give the weights of one row, not all 0")
    lines = number_lines(weights)
    below = BOTTOM if measured else 0
    subtitle = (
        "The largest weight is each format's largest number. Off by: size of the rounding beside that of the weights."
    )
    figure = card(WIDTH, TOP + below, "Which numbers there are for the weights of a row", subtitle)
    _histogram(place(figure, LEFT, 1.95 + below, RIGHT, 0.78), weights)
    _lines(place(figure, LEFT, 0.5 + below, RIGHT, TOP - 1.9), weights, lines)
    if measured:
        write(
            figure, MARGIN, below - 0.05, "What fewer bits did to the waits", fontsize=12.5, fontweight="bold", va="top"
        )
        _times(place(figure, LEFT, 0.78, RIGHT, TOP + 0.45), measured)

    print(f"precision: {len(weights):,} weights, {', '.join(lines)}, {len(measured)} ways")
    return describe(figure, _alt(weights, lines, measured))


def number_lines(weights: np.ndarray) -> dict[str, np.ndarray]:
    """Format -> every number of it between the smallest and the largest weight, in order."""
    largest = np.abs(weights).max()
    lines = {"int4": np.linspace(weights.min(), weights.max(), 16), "int8": np.arange(-127, 128) * largest / 127}
    for name, dtype in (("fp8 e4m3", torch.float8_e4m3fn), ("fp8 e5m2", torch.float8_e5m2)):
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()
        numbers = np.unique(numbers[np.isfinite(numbers)])
        lines[name] = numbers * largest / numbers.max()
    return lines


def rounded(weights: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Each weight as the nearest number of the line."""
    above = np.searchsorted(numbers, weights).clip(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    return np.where(weights - low <= high - weights, low, high)


def error(weights: np.ndarray, numbers: np.ndarray) -> float:
    """Root mean square of the rounding, as a share of that of the weights."""
    return float(np.sqrt(np.square(rounded(weights, numbers) - weights).mean() / np.square(weights).mean()))


def _histogram(axes: Axes, weights: np.ndarray) -> None:
    edges = np.linspace(*_reach(weights), BINS + 1)
    axes.hist(weights, bins=edges, color="#8fc1dd", edgecolor=PAPER, linewidth=0.5, label="weights")
    axes.set(xlim=_reach(weights), yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(bottom=False, labelbottom=False)
    axes.set_ylabel(f"{len(weights):,}\nweights", rotation=0, ha="right", va="center", fontsize=8.5)


def _lines(axes: Axes, weights: np.ndarray, lines: dict[str, np.ndarray]) -> None:
    axes.set(xlim=_reach(weights), ylim=(len(lines) - 0.45, -0.55), xlabel="weight")
    axes.spines["left"].set_visible(False)
    for place_, (name, numbers) in enumerate(lines.items()):
        axes.plot(numbers[[0, -1]], [place_, place_], color=FAINT, linewidth=0.8, zorder=1)
        axes.vlines(numbers, place_ - 0.32, place_ + 0.32, color=INK, linewidth=0.55, label=name)
        said = f"{len(numbers)} numbers,\noff by {error(weights, numbers):.1%}"
        axes.text(1.03, place_, said, transform=axes.get_yaxis_transform(), va="center", fontsize=8.8)
    axes.set_yticks(range(len(lines)), lines)
    axes.tick_params(left=False, labelcolor=INK)


def _times(axes: Axes, measured: Sequence[Precision]) -> None:
    """Both times as multiples of the first way's, one column per way, fewest bits first."""
    ways = sorted(measured, key=lambda way: way.bits)
    base = measured[0]
    for title, field, colour, marker, dash in SERIES:
        seconds = [getattr(way, field) for way in ways]
        points = [(x, s / getattr(base, field)) for x, s in enumerate(seconds) if s is not None]
        look = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 6.5, "markeredgecolor": PAPER}
        axes.plot(*zip(*points, strict=True), label=title, linewidth=1.4, zorder=4, **look)
    axes.axhline(1, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    axes.set_ylim(0, 1.12 * max(axes.get_ylim()[1], 1))
    axes.set_xlim(-0.5, len(ways) - 0.5)
    for x, way in enumerate(ways):
        if way.ttft_s is None:
            axes.text(x, 0.06, "emulated:\nno times", ha="center", va="bottom", fontsize=8.5, color=MUTED)
    labels = [f"{way.name}\n{way.bits:g} bits\nperplexity {way.perplexity:.2f}" for way in ways]
    axes.set_xticks(range(len(ways)), labels, color=INK)
    axes.set_ylabel(f"time, {base.name} = 1")
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.55))


def _reach(weights: np.ndarray) -> tuple[float, float]:
    largest = 1.03 * np.abs(weights).max()
    return -largest, largest


def _alt(weights: np.ndarray, lines: dict[str, np.ndarray], measured: Sequence[Precision]) -> str:
    formats = ", ".join(
        f"{name} {len(line)} numbers, off by {error(weights, line):.1%}" for name, line in lines.items()
    )
    told = (
        f"A histogram of {len(weights):,} weights between {weights.min():.2g} and {weights.max():.2g}, and below it "
        f"the numbers of each format as ticks: {formats}. Those of int4 and int8 are evenly spaced, those of fp8 "
        f"crowd at 0."
    )
    if not measured:
        return told
    return (
        f"{told} Below, times and perplexity: " + "; ".join(map(_way, sorted(measured, key=lambda way: way.bits))) + "."
    )


def _way(way: Precision) -> str:
    times = "no times, emulated"
    if way.ttft_s is not None:
        times = f"first token {1000 * way.ttft_s:,.0f} ms, each after it {1000 * way.tpot_s:,.1f} ms"
    return f"{way.name}, {way.bits:g} bits: {times}, perplexity {way.perplexity:.2f}"
