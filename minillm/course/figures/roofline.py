"""F9, the roofline: work per second over work per byte, below a slope (memory) and a ceiling (arithmetic)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minillm.course.style import BLUE, INK, MARGIN, MUTED, PAPER, PURPLE, VERMILION, card, describe, place, styled


@dataclass(frozen=True)
class Roof:
    """A device's two limits, FLOP/s and bytes/s. `measured`: found on this machine, not read from a datasheet."""

    name: str
    flops: float
    bandwidth: float
    measured: bool

    @property
    def ridge(self) -> float:
        return self.flops / self.bandwidth

    def at(self, intensity):
        """FLOP/s that the roof allows at FLOPs per byte, a number or an array."""
        return np.minimum(self.flops, self.bandwidth * np.asarray(intensity, float))


@dataclass(frozen=True)
class Work:
    """What one operation or step did: its counted FLOPs per byte and its reached FLOP/s."""

    label: str  # "n = 512", "batch 8"
    intensity: float
    flops: float


KINDS = {  # marker, colour, joined by a line
    "prefill": ("s", BLUE, False),
    "decode": ("o", VERMILION, True),
    "decode attention": ("^", PURPLE, False),
}
GUESS = "your guess"


@styled
def roofline(
    roofs: Sequence[Roof],
    work: dict[str, Sequence[Work]],
    title: str = "Two limits, and what runs below them",
    guess: Work | None = None,
) -> Figure:
    """Roofs with the points of each kind of work: "prefill", "decode", "decode attention"; some may be missing.

    The first roof is the one that the points were measured under; each further one is drawn thinner.
    `guess` is where a point would stand if the guess had been right.
    """
    unknown = set(work) - set(KINDS)
    if unknown:
        raise ValueError(f"unknown work {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}")
    points = [point for series in work.values() for point in series] + ([guess] if guess else [])
    figure = card(8.6, 5.3, title, "speed over the work that is done with each byte, both axes logarithmic")
    axes = place(figure, 0.98, 0.62, MARGIN + 0.1, 0.8)
    reach = [roof.ridge for roof in roofs] + [point.intensity for point in points]
    left, right = 0.5 * min(1.0, *reach), max(2.5 * max(reach), 12 * roofs[0].ridge)
    lowest = min([float(roofs[0].at(left)), *(point.flops for point in points)])
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.set_ylim(0.13 * lowest, 4 * max(roof.flops for roof in roofs))
    for roof in reversed(roofs):
        _roof(axes, roof, main=roof is roofs[0], above=_just_above(roof, roofs))
    for kind, series in work.items():
        _series(axes, kind, series)
    if guess:
        _guess(axes, guess)
    _dress(axes)

    numbers = ", ".join(f"{len(series)} of {kind}" for kind, series in work.items())
    print(f"roofline: {len(roofs)} roof{'s' * (len(roofs) != 1)}, {numbers or 'no points'}")
    return describe(figure, _alt(roofs, work, guess))


def _just_above(roof: Roof, roofs: Sequence[Roof]) -> Roof | None:
    """Another ceiling so near above this one that words between the two would not fit."""
    return next((other for other in roofs if other is not roof and 1 <= other.flops / roof.flops < 2.5), None)


def _roof(axes: Axes, roof: Roof, main: bool, above: Roof | None) -> None:
    """The slope, the ceiling and the ridge between them, with their names above the line or beneath it."""
    (left, right), floor = axes.get_xlim(), axes.get_ylim()[0]
    x = np.array([left, roof.ridge, right])
    if main:
        for ends, color, words in ((x[:2], "#f3c55f", "memory decides"), (x[1:], "#8fc1dd", "arithmetic decides")):
            axes.fill_between(ends, roof.at(ends), floor, color=color, alpha=0.18, linewidth=0)
            axes.text(ends[1] / 1.06, floor * 1.15, words, ha="right", fontsize=8.8, color=MUTED, style="italic")
    color, width = (INK, 2.0) if main else (MUTED, 1.2)
    axes.plot(x, roof.at(x), color=color, linewidth=width, linestyle="-" if roof.measured else (0, (5, 2.5)), zorder=3)
    axes.plot([roof.ridge] * 2, [floor, roof.flops], color=color, linewidth=0.8, linestyle=(0, (1, 2)), zorder=2)

    note = {"color": color, "fontsize": 8.8, "zorder": 6}
    name = f"{roof.name}, {'measured' if roof.measured else 'datasheet'}: {rate(roof.flops)}FLOP/s"
    height = above.flops * 2 if above else roof.flops * 1.12  # in a second line, over the other one's name
    axes.text(right / 1.06, height, name, ha="right", va="bottom", **note)
    (x0, y0), (x1, y1) = (axes.transData.transform((u, float(roof.at(u)))) for u in (left, 2 * left))
    slope = {"rotation": np.degrees(np.arctan2(y1 - y0, x1 - x0)), "rotation_mode": "anchor"}
    start, shift, side = (left * 1.5, 1 / 1.12, "top") if above else (left * 1.1, 1.12, "bottom")
    axes.text(start, float(roof.at(start)) * shift, f"{rate(roof.bandwidth)}B/s", va=side, **slope, **note)
    x, side = (roof.ridge / 1.06, "right") if above else (roof.ridge * 1.06, "left")
    axes.text(x, floor * 2.0, f"ridge {roof.ridge:,.0f}", ha=side, **note)


def _series(axes: Axes, kind: str, series: Sequence[Work]) -> None:
    """Points of one kind; the first and the last one are named, or all at once where they stand in one column."""
    marker, color, joined = KINDS[kind]
    x, y = [point.intensity for point in series], [point.flops for point in series]
    if joined:
        axes.plot(x, y, color=color, linewidth=1.2, zorder=4)
    axes.plot(x, y, marker, color=color, markersize=7.5, markeredgecolor=PAPER, zorder=5, label=kind)
    named = {(p.intensity, p.flops): p.label for p in (series[0], series[-1])} if series else {}
    if len(series) > 1 and max(x) < 1.1 * min(x):
        named = {(x[0], min(y)): f"{series[0].label} to {series[-1].label}"}
    for place_of, label in named.items():
        style = {"textcoords": "offset points", "xytext": (7, -12), "va": "center", "fontsize": 8.5, "zorder": 6}
        axes.annotate(label, place_of, **style)


def _guess(axes: Axes, guess: Work) -> None:
    floor = axes.get_ylim()[0]
    axes.plot([guess.intensity] * 2, [floor, guess.flops], color=INK, linewidth=1.2, linestyle=(0, (2, 2)), zorder=4)
    diamond = {"markersize": 7, "markerfacecolor": PAPER, "markeredgecolor": INK, "zorder": 6}
    axes.plot([guess.intensity], [guess.flops], "D", label=GUESS, **diamond)


def _dress(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if x < 1000 else f"{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{rate(y)}FLOP/s")
    axes.minorticks_off()
    axes.set(xlabel="FLOPs per byte that has to move (counted)")
    handles, labels = axes.get_legend_handles_labels()
    kept = [(h, name) for h, name in zip(handles, labels, strict=True) if name in (*KINDS, GUESS)]
    if kept:
        key = axes.legend(*zip(*kept, strict=True), loc="upper left", frameon=True, facecolor=PAPER, edgecolor="none")
        key.set_zorder(7)


def rate(value: float) -> str:
    """Three digits and a prefix: "312 T", "26.4 G"."""
    scale, unit = next(((s, u) for s, u in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")) if value >= s), (1, ""))
    return f"{value / scale:.3g} {unit}"


def _alt(roofs: Sequence[Roof], work: dict[str, Sequence[Work]], guess: Work | None) -> str:
    limits = "; ".join(
        f"{roof.name} ({'measured' if roof.measured else 'datasheet'}): {rate(roof.flops)}FLOP/s and "
        f"{rate(roof.bandwidth)}B/s, ridge at {roof.ridge:,.0f} FLOPs per byte"
        for roof in roofs
    )
    reached = "; ".join(
        f"{kind}: " + ", ".join(f"{p.label} at {p.intensity:,.3g} FLOPs per byte {rate(p.flops)}FLOP/s" for p in series)
        for kind, series in work.items()
    )
    said = f" The guess for {guess.label} was {rate(guess.flops)}FLOP/s." if guess else ""
    return f"Roofline, work per second over work per byte, both axes logarithmic. Roofs: {limits}. {reached}.{said}"
