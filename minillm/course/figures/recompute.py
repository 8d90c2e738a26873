"""F5, the recompute triangle: which token's row is computed in which step, without a cache and with one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from minillm.course.figures.attention_map import readable
from minillm.course.style import BLUE, INK, MARGIN, MUTED, PAPER, card, describe, place, styled, write

WIDTH = 8.6
LEFT, BETWEEN, RIGHT = 0.74, 0.56, 1.06  # inches beside the two panels: names of steps, sums, tokens that come out
ABOVE, BELOW = 0.62, 0.92
LARGEST_CELL = 0.25
LINE = 0.15  # inches that a line of text needs: of smaller rows only some are named
NOTHING, FIRST, AGAIN, READ = range(4)
LOOKS = {
    NOTHING: {"facecolor": "#f0eee7"},
    FIRST: {"facecolor": BLUE},
    AGAIN: {"facecolor": "#f2b892", "hatch": "////"},
    READ: {"facecolor": "#cfe8f7"},
}
NAMES = {FIRST: "computed", AGAIN: "computed again", READ: "K and V read from the cache"}


@styled
def recompute(prompt: Sequence[str], answer: Sequence[str]) -> Figure:
    """Two panels of steps (down) and tokens (across): the first step reads the prompt, each gives one token.

    prompt, answer  the tokens as text; an empty one is not written
    """
    n, m = len(prompt), len(answer)
    if not n or not m:
        raise ValueError(f"{n} prompt tokens, {m} new ones: one of each is the least")
    panels = {"without a cache": states(n, m, cached=False), "with a cache": states(n, m, cached=True)}
    side = (WIDTH - LEFT - BETWEEN - RIGHT) / 2
    cell = min(LARGEST_CELL, side / (n + m - 1))
    names = [readable(token) if token else "" for token in [*prompt, *answer]]
    labels = 0.12 + 0.075 * max(map(len, names))
    figure = card(WIDTH, ABOVE + 0.26 + labels + m * cell + BELOW, "Which rows are computed, step by step")
    for number, (title, state) in enumerate(panels.items()):
        left = LEFT + number * (side + BETWEEN)
        top = ABOVE + 0.26 + labels
        axes = place(figure, left, BELOW, WIDTH - left - cell * (n + m - 1), top)
        named = range(0, m, math.ceil(LINE / cell))
        _panel(axes, state, names[:-1], named if not number else [])
        _sums(axes, state, named)
        if number:
            _outputs(axes, names[n:])
        height = figure.get_size_inches()[1]
        write(figure, left, height - ABOVE, title, fontsize=10, fontweight="bold", va="top")
        write(figure, left, BELOW - 0.1, _total(state), fontsize=9, va="top")
    _legend(figure)

    without, cached = panels.values()
    computed, again, once, read = _count(without), int((without == AGAIN).sum()), _count(cached), (cached == READ).sum()
    print(f"recompute: {n} + {m} tokens, {computed} rows without a cache, {once} with, {again} were computed again")
    return describe(
        figure,
        f"Two grids of {m} steps (rows) and {n + m - 1} tokens (columns). Without a cache step 1 computes the {n} "
        f"prompt tokens and each later step all tokens so far: a triangle of {again} rows computed again, {computed} "
        f"in all. With a cache each step after the first computes one row and reads K and V of the others: {once} "
        f"rows computed, {read} read.",
    )


def states(n: int, m: int, cached: bool) -> np.ndarray:
    """What happens to each token in each step: [m, n + m - 1] of NOTHING, FIRST, AGAIN, READ."""
    step, token = np.ogrid[:m, : n + m - 1]
    last = n - 1 + step  # the newest token that a step is given
    first = (token == last) | ((step == 0) & (token < n))
    return np.where(first, FIRST, np.where(token < last, READ if cached else AGAIN, NOTHING))


def _count(state: np.ndarray) -> int:
    return int(np.isin(state, (FIRST, AGAIN)).sum())


def _total(state: np.ndarray) -> str:
    read, again = (int((state == kind).sum()) for kind in (READ, AGAIN))
    computed = f"{_count(state):,} rows computed"
    return f"{computed}, {again:,} of them again" if again or not read else f"{computed}, K and V of {read:,} read"


def _panel(axes: Axes, state: np.ndarray, tokens: list[str], steps: Sequence[int]) -> None:
    rows, columns = state.shape
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
    for row, column in np.ndindex(rows, columns):
        _cell(axes, column, row, state[row, column])
    axes.set_xticks(np.arange(columns) + 0.5, tokens, rotation=90, fontsize=8)
    axes.set_yticks([step + 0.5 for step in steps], [f"step {step + 1}" for step in steps], fontsize=8.5)
    axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0, pad=2, labelcolor=INK)
    axes.spines[:].set_visible(False)


def _cell(axes: Axes, x: float, y: float, state: int) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, edgecolor=PAPER, linewidth=1.2, label=NAMES.get(state, ""), **LOOKS[state]))
    if state == READ:
        axes.add_patch(Circle((x + 0.5, y + 0.5), 0.17, facecolor="none", edgecolor=BLUE, linewidth=1.1))


def _sums(axes: Axes, state: np.ndarray, steps: Sequence[int]) -> None:
    """Right of each row, how many tokens it computes."""
    for step in steps:
        axes.text(state.shape[1] + 0.5, step + 0.55, f"{_count(state[step])}", va="center", fontsize=8.5, color=MUTED)


def _outputs(axes: Axes, tokens: Sequence[str]) -> None:
    """Further right, the token that each step gives."""
    for step, token in enumerate(tokens):
        if token:
            axes.text(axes.get_xlim()[1] + 1.7, step + 0.5, f"→ {token}", va="center", fontsize=8.5, color=INK)


def _legend(figure: Figure) -> None:
    width, height = figure.get_size_inches()
    axes = place(figure, LEFT, 0.22, MARGIN, height - 0.22 - 0.22)
    axes.set(xlim=(0, (width - LEFT - MARGIN) / 0.22), ylim=(1, 0))
    axes.axis("off")
    x = 0.0
    for state, words in NAMES.items():
        _cell(axes, x, 0, state)
        axes.text(x + 1.4, 0.5, words, va="center", fontsize=8.5)
        x += 3.2 + 0.31 * len(words)
    axes.text(axes.get_xlim()[1], 0.5, "numbers: rows computed", va="center", ha="right", fontsize=8.5, color=MUTED)
