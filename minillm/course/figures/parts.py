"""The eight parts of a TTFT: what they are called, and how every figure draws them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.style import BLUE, GREEN, INK, ORANGE, PAPER, PURPLE, VERMILION, YELLOW


@dataclass(frozen=True)
class Look:
    label: str
    color: str
    hatch: str
    ink: str  # colour of the hatching and of text on the part


LOOKS = {
    "tokenize": Look("tokenize", YELLOW, "...", "#8a7f00"),
    "queue": Look("queue", "#ffffff", "xxx", "#8b9097"),
    "linear": Look("linear layers", BLUE, "", "#ffffff"),
    "attention": Look("attention", ORANGE, "///", "#7a5200"),
    "kv_write": Look("KV write", GREEN, "---", "#00523c"),
    "lm_head": Look("LM head", PURPLE, "\\\\\\", "#7a3d60"),
    "sample": Look("sample", VERMILION, "++", "#6e3000"),
    "other": Look("other", "#cfd3d6", "", "#4a5058"),
}
"""In the order in which a request meets them. `other` is what no part covers: launches, scheduling, Python."""

FIRST_TOKEN = VERMILION


def in_order(parts: dict[str, float]) -> dict[str, float]:
    """The given parts in street order, negative remainders (clock noise) as zero. Unknown names are refused."""
    unknown = set(parts) - set(LOOKS)
    if unknown:
        raise ValueError(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(LOOKS)}")
    return {name: max(0.0, parts[name]) for name in LOOKS if name in parts}


def patch(name: str, left: float, bottom: float, width: float, height: float) -> Rectangle:
    """The rectangle that stands for a part, its name as its label."""
    look = LOOKS[name]
    style = {"facecolor": look.color, "edgecolor": look.ink, "hatch": look.hatch, "linewidth": 0}
    return Rectangle((left, bottom), width, height, label=name, **style)


def name_on(axes: Axes, name: str, x: float, y: float) -> None:
    """Write a part's name on its rectangle, on a strip of paper where hatching would run through the letters."""
    look = LOOKS[name]
    strip = {"boxstyle": "round,pad=0.25", "facecolor": PAPER, "edgecolor": "none"} if look.hatch else None
    ink = INK if look.hatch else look.ink
    axes.text(x, y, look.label, fontsize=8.5, color=ink, ha="center", va="center_baseline", bbox=strip)


def legend(figure: Figure, names: Collection[str]) -> None:
    """One row along the lower edge of a card, in street order."""
    handles = []
    for name, look in LOOKS.items():
        if name in names:
            handles.append(patch(name, 0, 0, 1, 1))
            handles[-1].set(label=look.label, linewidth=0.4)
    figure.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.012),
        ncols=len(handles),
        handlelength=1.5,
        handleheight=1.0,
        columnspacing=1.3,
        handletextpad=0.5,
    )
