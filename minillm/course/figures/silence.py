"""F1, silence: each request as one lane on a common time axis. A bar for the wait, then a tick for every token."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.figures.parts import FIRST_TOKEN, in_order, legend, name_on, patch
from minillm.course.style import INK, MARGIN, MUTED, card, describe, place, styled
from minillm.request import RequestMetrics

LANE = 0.8  # inches per request
BAR, TICK = 0.36, 0.30  # heights in lanes
ROOM = 0.11  # a part this wide, as a share of the axis, has its name written on it


@styled
def silence(waits: Mapping[str, RequestMetrics]) -> Figure:
    """One lane for each of `waits` (its label -> the metrics of a profiled request)."""
    longest = max(metrics.e2e_s for metrics in waits.values()) * 1000
    figure = card(8.6, 1.66 + LANE * len(waits), "First a silence, then a steady beat")
    axes = place(figure, MARGIN + 0.02, 0.88, MARGIN + 0.02, 0.66)
    axes.set(xlim=(0, longest * 1.03), ylim=(len(waits) - 0.42, -0.62))
    for lane, (label, metrics) in enumerate(waits.items()):
        _lane(axes, lane, label, metrics)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("milliseconds since the prompt was sent", fontsize=9)
    axes.xaxis.set_major_formatter(lambda ms, _: f"{ms:,.0f}")
    legend(figure, {name for metrics in waits.values() for name in metrics.ttft_parts})

    gaps = [len(metrics.itl_s) for metrics in waits.values()]
    print(f"silence: {len(waits)} lane{'s' * (len(waits) > 1)}, tokens after the first: {', '.join(map(str, gaps))}")
    return describe(figure, _alt(waits))


def _lane(axes: Axes, lane: int, label: str, metrics: RequestMetrics) -> None:
    right = axes.get_xlim()[1]
    ttft = metrics.ttft_s * 1000
    start = 0.0
    for name, seconds in in_order(metrics.ttft_parts).items():
        width = seconds * 1000
        axes.add_patch(patch(name, start, lane - BAR / 2, width, BAR))
        if width > ROOM * right:
            name_on(axes, name, start + width / 2, lane)
        start += width
    axes.add_patch(Rectangle((0, lane - BAR / 2), ttft, BAR, fill=False, edgecolor=INK, linewidth=0.8))

    later = list(accumulate(metrics.itl_s, initial=metrics.ttft_s))[1:]
    axes.vlines([1000 * t for t in later], lane - TICK / 2, lane + TICK / 2, colors=INK, linewidth=1.1)
    axes.plot([ttft] * 2, [lane - 0.25, lane + 0.25], color=FIRST_TOKEN, linewidth=2.4, solid_capstyle="round")
    axes.plot([ttft], [lane - 0.25], marker="v", markersize=5.5, color=FIRST_TOKEN, clip_on=False)

    axes.text(0, lane - 0.36, label, fontsize=9.5, fontweight="bold", va="bottom")
    beat = f", then one every {metrics.tpot_s * 1000:,.0f} ms" if metrics.tpot_s else ""
    note = f"first token after {ttft:,.0f} ms{beat}"
    axes.text(right, lane - 0.36, note, fontsize=9, color=MUTED, ha="right", va="bottom")


def _alt(waits: Mapping[str, RequestMetrics]) -> str:
    lanes = [
        f"{label}: first token after {m.ttft_s * 1000:,.0f} ms"
        + (f", then {len(m.itl_s)} more, one every {m.tpot_s * 1000:,.0f} ms" if m.tpot_s else "")
        for label, m in waits.items()
    ]
    return f"{len(waits)} timeline{'s' * (len(waits) > 1)} on one axis in milliseconds. " + ". ".join(lanes) + "."
