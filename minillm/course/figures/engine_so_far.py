"""F15, the engine so far: TTFT, TPOT and requests that fit, stage by stage; outline the reference, solid yours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.engine_so_far.stages import STAGES
from minillm.course.style import BLUE, INK, MARGIN, MUTED, card, describe, place, styled, write

WIDTH, HEIGHT = 8.6, 3.2
PANEL, GAP = 2.46, 0.3  # inches
OUTER, INNER = 0.72, 0.42  # widths of the reference's bar and of yours


class Reading(NamedTuple):
    """What one stage measured."""

    ttft_s: float
    tpot_s: float
    requests_that_fit: int


PANELS = (
    ("ttft_s", "TTFT of one request, ms", 1000),
    ("tpot_s", "time per later token, ms", 1000),
    ("requests_that_fit", "requests that fit", 1),
)


@styled
def engine_so_far(reference: Mapping[str, Reading], yours: Mapping[str, Reading] | None = None) -> Figure:
    """Readings by stage, "v1" to "v8"; a stage without any is drawn empty.

    reference  of the engine's own parts
    yours      of stages with at least one part of yours
    """
    yours = yours or {}
    keys = [stage.key for stage in STAGES]
    if unknown := sorted({*reference, *yours} - set(keys)):
        raise ValueError(f"no stage {', '.join(unknown)}; there are {', '.join(keys)}")
    figure = card(WIDTH, HEIGHT, "The engine so far")
    for index, (field, label, scale) in enumerate(PANELS):
        left = MARGIN + 0.14 + index * (PANEL + GAP)
        axes = place(figure, left, 0.8, WIDTH - left - PANEL, 0.84)
        _panel(axes, label, [_bars(readings, field, scale) for readings in (reference, yours)])
    _key(figure)
    reached = [stage for stage in STAGES if stage.key in reference or stage.key in yours]
    names = "   ".join(str(stage) for stage in STAGES)
    write(figure, WIDTH / 2, 0.25, names, fontsize=7.6, color=MUTED, ha="center")

    print(f"engine_so_far: {len(reached)} of {len(STAGES)} stages, {len(yours)} with parts of yours")
    return describe(figure, _alt(reference, yours))


def _bars(readings: Mapping[str, Reading], field: str, scale: float) -> dict[int, float]:
    return {x: scale * getattr(readings[s.key], field) for x, s in enumerate(STAGES) if s.key in readings}


def _panel(axes: Axes, label: str, bars: list[dict[int, float]]) -> None:
    reference, yours = bars
    highest = max([*reference.values(), *yours.values()], default=0) or 1
    axes.set(xlim=(-0.6, len(STAGES) - 0.4), ylim=(0, 1.16 * highest))
    for x in range(len(STAGES)):
        if x not in reference and x not in yours:
            empty = {"fill": False, "edgecolor": MUTED, "linewidth": 0.7, "linestyle": (0, (2, 2))}
            axes.add_patch(Rectangle((x - OUTER / 2, 0), OUTER, 0.12 * highest, **empty))
        if x in yours:
            axes.add_patch(Rectangle((x - INNER / 2, 0), INNER, yours[x], facecolor=BLUE, label="yours"))
        if x in reference:
            outline = {"fill": False, "edgecolor": INK, "linewidth": 1.1, "label": "reference"}
            axes.add_patch(Rectangle((x - OUTER / 2, 0), OUTER, reference[x], **outline))
        values = [group[x] for group in bars if x in group]
        if values:
            axes.text(x, max(values) + 0.03 * highest, f"{values[-1]:,.0f}", ha="center", fontsize=7.6)
    axes.set_title(label, loc="left", fontsize=9.5, color=INK)
    axes.set_xticks(range(len(STAGES)), [stage.key for stage in STAGES])
    for x, tick in enumerate(axes.get_xticklabels()):
        tick.set_color(INK if x in reference or x in yours else MUTED)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)


def _key(figure: Figure) -> None:
    """Top right: what outline, solid and dashes mean."""
    looks = {
        "reference": {"fill": False, "edgecolor": INK, "linewidth": 1.1},
        "yours": {"facecolor": BLUE, "linewidth": 0},
        "not reached yet": {"fill": False, "edgecolor": MUTED, "linewidth": 1.0, "linestyle": (0, (2, 2))},
    }
    handles = [Rectangle((0, 0), 1, 1, **look) for look in looks.values()]
    place_at = {"loc": "upper right", "bbox_to_anchor": (1 - 0.12 / WIDTH, 1 - 0.1 / HEIGHT)}
    figure.legend(handles, list(looks), ncols=3, handlelength=1.1, handleheight=1.0, columnspacing=1.4, **place_at)


def _alt(reference: Mapping[str, Reading], yours: Mapping[str, Reading]) -> str:
    said = []
    for stage in STAGES:
        for whose, readings in (("reference", reference), ("yours", yours)):
            if stage.key in readings:
                r = readings[stage.key]
                times = f"TTFT {1000 * r.ttft_s:,.0f} ms, {1000 * r.tpot_s:,.0f} ms per later token"
                said.append(f"{stage} ({whose}): {times}, {r.requests_that_fit} requests fit")
    empty = len(STAGES) - len({*reference, *yours})
    rest = f" {empty} stages are not reached yet." if empty else ""
    return f"Three rows of bars over the stages v1 to v8 of the engine. {'; '.join(said) or 'Nothing yet'}.{rest}"
