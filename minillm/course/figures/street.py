"""The street: the engine's parts as houses along one road, and a pin where the lesson stands.

The same drawing opens every lesson. A request walks from the left end to the right end; the lane that leads
back behind the houses is the way of every token after the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Polygon, Rectangle

from minillm.course.style import INK, MUTED, PAPER, VERMILION, card, describe, place, styled


@dataclass(frozen=True)
class House:
    name: str
    file: str
    color: str
    leaves: str  # what a request is when it leaves this house
    shed: str = ""  # key of the small building beside it


HOUSES = {
    "llm": House("LLM", "llm.py", "#f3c9a5", "text"),
    "tokenizer": House("Tokenizer", "tokenizer/", "#f2e58a", "ids"),
    "scheduler": House("Scheduler", "scheduler/", "#9fd3f2", "step", shed="block_pool"),
    "batch": House("Batch", "batch.py", "#8fd0b8", "tensors"),
    "model": House("Model", "model.py", "#8fbfe0", "q, k, v"),
    "attention": House("Attention", "attention/", "#f3c262", "logits", shed="kv_cache"),
    "sampler": House("Sampler", "sampler.py", "#e3b0cc", "token"),
}
SHEDS = {"block_pool": "Block\npool", "kv_cache": "KV\ncache"}

WIDTH = 8.6  # inches of the card
STEP = 1.17  # inches from door to door
ROAD = (0.62, 0.80)  # lower and upper edge, inches above the axes' zero
WALL, EAVES, ROOF = 0.66, 0.48, 0.30  # a house's width, its height, and its roof's height on top
SHED = (0.36, 0.30)  # width and height
STONE, PLASTER, WOOD, LIGHT = "#e4e1d8", "#f0eee7", "#cdb88f", "#fff3b8"


@styled
def street(*here: str) -> Figure:
    """Pins on the houses and sheds called `here`; see HOUSES and SHEDS for their keys."""
    known = [*HOUSES, *SHEDS]
    if not here or not set(here) <= set(known):
        raise ValueError(f"pins stand on {', '.join(known)}, not on {', '.join(map(repr, here)) or 'nothing'}")
    figure = card(WIDTH, 2.66)
    axes = place(figure, 0.1, 0.1, 0.1, 0.1)
    axes.set(xlim=(0, WIDTH - 0.2), ylim=(-0.22, 2.24))
    axes.set_aspect("equal")
    axes.axis("off")

    axes.add_patch(Rectangle((0.13, ROAD[0]), WIDTH - 0.46, ROAD[1] - ROAD[0], facecolor=STONE, linewidth=0))
    doors = {key: 0.6 + STEP * index for index, key in enumerate(HOUSES)}
    tips = {}
    for key, house in HOUSES.items():
        tips[key] = _house(axes, house, doors[key], key in here)
        if house.shed:
            tips[house.shed] = _shed(axes, SHEDS[house.shed], doors[key] + 0.575, house.shed in here)
        _walks(axes, house.leaves, doors[key] + (0.455 if key == "sampler" else STEP / 2))
    _way_back(axes, doors["sampler"], doors["scheduler"])
    highest = max(here, key=lambda key: tips[key][1])
    for key in here:
        _pin(axes, *tips[key], words="you are here" if key == highest else "")

    print(f"street: {len(HOUSES)} houses, you are here: {', '.join(here)}")
    return describe(figure, _alt(here))


def _house(axes: Axes, house: House, x: float, lit: bool) -> tuple[float, float]:
    """Draw one house with its door at x; returns the tip of its roof."""
    half, ground, eaves = WALL / 2, ROAD[1], ROAD[1] + EAVES
    line = _line(lit)
    axes.add_patch(Rectangle((x - half, ground), WALL, EAVES, facecolor=house.color if lit else PLASTER, **line))
    roof = [(x - half - 0.07, eaves), (x, eaves + ROOF), (x + half + 0.07, eaves)]
    axes.add_patch(Polygon(roof, facecolor=house.color, **line))
    axes.add_patch(Rectangle((x - 0.075, ground), 0.15, 0.24, facecolor=PAPER, **line))
    for window in (x - 0.265, x + 0.155):
        axes.add_patch(Rectangle((window, ground + 0.22), 0.11, 0.12, facecolor=LIGHT if lit else PAPER, **line))
    axes.text(x, 0.5, house.name, ha="center", va="top", fontsize=9, fontweight="bold" if lit else "normal")
    axes.text(x, 0.27, house.file, ha="center", va="top", fontsize=7.5, color=MUTED, family="DejaVu Sans Mono")
    return x, eaves + ROOF


def _shed(axes: Axes, name: str, x: float, lit: bool) -> tuple[float, float]:
    """Draw one shed with its middle at x; returns a point on its roof."""
    (width, height), ground = SHED, ROAD[1]
    left, right, eaves = x - width / 2, x + width / 2, ground + height
    line = _line(lit)
    axes.add_patch(Rectangle((left, ground), width, height, facecolor=WOOD if lit else PLASTER, **line))
    roof = [(left - 0.04, eaves), (left, eaves + 0.1), (right + 0.04, eaves)]
    axes.add_patch(Polygon(roof, facecolor=WOOD, **line))
    axes.text(x, ground + height / 2, name, ha="center", va="center", fontsize=6.3, linespacing=1.0)
    return x, eaves + 0.1


def _line(lit: bool) -> dict:
    return {"edgecolor": INK if lit else "#8d949b", "linewidth": 1.1 if lit else 0.8, "joinstyle": "round"}


def _walks(axes: Axes, what: str, x: float) -> None:
    """The traveller on the road behind a house."""
    axes.text(x, sum(ROAD) / 2, f"{what} →", ha="center", va="center_baseline", fontsize=7.6, color=MUTED)


def _way_back(axes: Axes, start: float, end: float) -> None:
    """The lane behind the houses, from the sampler's garden to the scheduler's."""
    y = -0.06
    axes.plot([start, start, end], [0.1, y, y], color=MUTED, linewidth=1, linestyle=(0, (4, 2)))
    arrow = {"arrowstyle": "-|>", "mutation_scale": 9, "color": MUTED, "linewidth": 1}
    axes.add_patch(FancyArrowPatch((end, y - 0.02), (end, 0.13), **arrow))
    note = {"ha": "center", "va": "center", "fontsize": 8, "color": MUTED}
    gap = {"facecolor": PAPER, "edgecolor": "none", "pad": 3}
    axes.text((start + end) / 2, y, "every later token goes round again", bbox=gap, **note)


def _pin(axes: Axes, x: float, y: float, words: str) -> None:
    """A map pin whose point stands just above (x, y)."""
    radius, tip, centre = 0.115, y + 0.03, y + 0.3
    cheek = 0.86 * radius
    point = [(x, tip), (x - cheek, centre - 0.06), (x + cheek, centre - 0.06)]
    axes.add_patch(Polygon(point, facecolor=VERMILION, linewidth=0))
    axes.add_patch(Circle((x, centre), radius, facecolor=VERMILION, linewidth=0))
    axes.add_patch(Circle((x, centre), 0.42 * radius, facecolor=PAPER, linewidth=0))
    top = centre + radius + 0.06
    axes.text(x, top, words, ha="center", va="bottom", fontsize=9, fontweight="bold", color="#a34700")


def _alt(here: tuple[str, ...]) -> str:
    names = ", ".join(f"{house.name} ({house.file})" for house in HOUSES.values())
    pinned = ", ".join((HOUSES[key].name if key in HOUSES else SHEDS[key].replace("\n", " ")) for key in here)
    return (
        f"A street of houses, from left to right: {names}. The block pool stands beside the scheduler, the KV cache "
        f"beside attention. An arrow leads from the sampler back to the scheduler. You are here: {pinned}."
    )
