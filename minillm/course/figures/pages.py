"""F6, pages: what each request sees, its block table, where its pages lie, and the same rows reserved in one piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from minillm.course.style import INK, MARGIN, MUTED, PAPER, card, describe, place, styled

WIDTH = 8.6
COLUMNS = 8  # rows of the cache that stand side by side in the map
CELL = 0.35  # inches, in the map
STRIPS, TABLES, MAP = (0.52, 2.58), (3.36, 1.66), WIDTH - MARGIN - COLUMNS * CELL  # (left, widest), ..., left
ABOVE, BELOW, PITCH, HIGH = 0.86, 0.56, 0.47, 0.2  # above the strips, below all, from strip to strip, a strip
RESERVED = 0.78  # inches for the reservation in one piece
MOST_ARROWS = 5  # of a table; more could not be told apart
TINTS = ("#f3c9a5", "#9fd3f2", "#8fd0b8", "#f2e58a", "#e3b0cc", "#8fbfe0", "#c9bfe8", "#e9d8a6")
FREE, GREY = "#ffffff", "#c3c7cb"
HATCH = "/////"
INSET = 0.035  # inches between the two lines of a double border


class Pages(NamedTuple):
    """One request: the numbers of its pages in order, and how many of their rows hold a token."""

    table: Sequence[int]
    tokens: int


@styled
def pages(
    requests: Mapping[str, Pages], block_size: int = 4, num_rows: int = 64, longest: int | None = 16, waiting: str = ""
) -> Figure:
    """A cache of `num_rows` rows, cut into pages of `block_size`. Arrows leave the table of the last request,
    if it is short enough.

    requests  by a letter each; a page that stands in two tables gets a double border
    longest   rows that each request would reserve in one piece, drawn below; None: not drawn
    waiting   letters of requests for which too few pages were free

    Raises ValueError for a table that does not hold its tokens, or names a page that is not there.
    """
    _check(requests, block_size, num_rows)
    lines = max(len(requests) + bool(waiting), num_rows / COLUMNS * CELL / PITCH)
    height = ABOVE + lines * PITCH + (RESERVED if longest else 0) + BELOW
    count = f"pages of {block_size}" if block_size > 1 else "pages of a single row"
    figure = card(WIDTH, height, f"{num_rows} rows of K and V, in {count}")
    axes = place(figure, 0, 0, 0, 0)
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.axis("off")
    top = height - ABOVE
    tints = {name: TINTS[(ord(name) - ord("a")) % len(TINTS)] for name in requests}  # the same in every picture
    boxes = _strips(axes, requests, block_size, tints, top)
    corners = _map(axes, requests, block_size, num_rows, tints, top)
    followed = list(requests.values())[-1].table if requests else []
    arrows = 0 < len(followed) <= MOST_ARROWS
    if arrows:
        _arrows(axes, boxes[-1], [corners[page] for page in followed])
    if waiting:
        y = top - len(requests) * PITCH - 0.06 - HIGH
        axes.text(STRIPS[0], y, f"{', '.join(waiting)} waiting: too few pages are free", fontsize=9, color=MUTED)
    if longest:
        _one_piece(axes, requests, waiting, num_rows, longest, BELOW)
    _legend(axes, any(uses > 1 for uses in _uses(requests).values()), arrows)

    tokens, held, total = _tokens(requests, block_size), len(_uses(requests)), num_rows // block_size
    fit = f"; in one piece {min(num_rows // longest, len(requests) + len(waiting))} would fit" if longest else ""
    line = f"{len(requests)} requests, {tokens} rows filled in {held} of {total} pages of {block_size}"
    print(f"pages: {line}, {held * block_size - tokens} unused{fit}")
    return describe(figure, f"{_alt(requests, block_size, line)}{_alt_rest(requests, waiting, longest, num_rows)}")


def _check(requests: Mapping[str, Pages], block_size: int, num_rows: int) -> None:
    if num_rows % COLUMNS or num_rows % block_size or (COLUMNS % block_size and block_size % COLUMNS):
        raise ValueError(f"{num_rows} rows in pages of {block_size} do not fill lines of {COLUMNS}")
    for name, (table, tokens) in requests.items():
        if not len(table) * block_size - block_size < tokens <= len(table) * block_size:
            raise ValueError(f"{name} has {tokens} tokens and {len(table)} pages of {block_size}")
        if outside := [page for page in table if not 0 <= page < num_rows // block_size]:
            raise ValueError(f"page {outside[0]} of {name} is not one of the {num_rows // block_size}")


def _uses(requests: Mapping[str, Pages]) -> Counter:
    """Page -> the tables that it stands in."""
    return Counter(chain.from_iterable(table for table, _ in requests.values()))


def filled(requests: Mapping[str, Pages], block_size: int) -> dict[int, tuple[str, int]]:
    """Page -> (letters of its users, rows of it that hold a token)."""
    found: dict[int, tuple[str, int]] = {}
    for name, (table, tokens) in requests.items():
        for index, page in enumerate(table):
            letters, rows = found.get(page, ("", 0))
            found[page] = (letters + name, max(rows, min(block_size, tokens - index * block_size)))
    return found


def _tokens(requests: Mapping[str, Pages], block_size: int) -> int:
    return sum(rows for _, rows in filled(requests, block_size).values())


# ---- the parts -----------------------------------------------------------------------------------


def _strips(axes: Axes, requests: Mapping[str, Pages], size: int, tints: Mapping[str, str], top: float) -> list:
    """Left: a strip of rows for each request, and its block table; returns the boxes of each table."""
    _heading(axes, STRIPS[0] - 0.3, top, "each request sees")
    _heading(axes, TABLES[0], top, "block table")
    most = max((len(table) for table, _ in requests.values()), default=1)
    cell = min(HIGH, (STRIPS[1] - 0.05 * (most - 1)) / (most * size))
    gap = 0.05 if size > 1 else 0.02
    wide = min(0.28, TABLES[1] / most)
    all_boxes = []
    for line, (name, (table, tokens)) in enumerate(requests.items()):
        y = top - HIGH - line * PITCH - 0.06
        axes.text(STRIPS[0] - 0.16, y + HIGH / 2, name, ha="center", va="center", fontsize=11, fontweight="bold")
        boxes = []
        for index, page in enumerate(table):
            left = STRIPS[0] + index * (size * cell + gap)
            for row in range(size):
                used = index * size + row < tokens
                _cell(axes, left + row * cell, y, cell, HIGH, tints[name] if used else PAPER, not used, line=0.5)
            _frame(axes, left, y, size * cell, HIGH)
            boxes.append((TABLES[0] + index * wide, y, wide))
            axes.add_patch(Rectangle(boxes[-1][:2], wide, HIGH, facecolor=PAPER, edgecolor=INK, linewidth=0.7))
            if wide > 0.11:
                middle = boxes[-1][0] + wide / 2
                axes.text(middle, y + HIGH / 2, page, ha="center", va="center", fontsize=min(7.5, 46 * wide))
        all_boxes.append(boxes)
    return all_boxes


def _map(axes: Axes, requests: Mapping[str, Pages], size: int, num_rows: int, tints: Mapping, top: float) -> list:
    """Right: all rows of the cache in their order; returns the place of each page's first row."""
    _heading(axes, MAP, top, "the cache")
    content = filled(requests, size)
    corners = []
    for row in range(num_rows):
        page, offset = divmod(row, size)
        letters, used = content.get(page, ("", 0))
        x, y = MAP + row % COLUMNS * CELL, top - (row // COLUMNS + 1) * CELL - 0.06
        tint = tints[letters[0]] if offset < used else PAPER if letters else FREE
        _cell(axes, x, y, CELL, CELL, tint, bool(letters) and offset >= used, line=0.4)
        if offset < used:
            axes.text(x + 0.54 * CELL, y + 0.42 * CELL, letters, ha="center", va="center", fontsize=8.5)
        if not offset:
            corners.append((x, y))
            axes.text(x + 0.05, y + CELL - 0.045, page, ha="left", va="top", fontsize=5.6, color=MUTED)
    shape = (min(size, COLUMNS) * CELL, -(-size // COLUMNS) * CELL)
    for x, y in corners:
        _frame(axes, x, y + CELL - shape[1], *shape)
    for page in [page for page, uses in _uses(requests).items() if uses > 1]:
        x, y = corners[page]
        _frame(axes, x + INSET, y + CELL - shape[1] + INSET, shape[0] - 2 * INSET, shape[1] - 2 * INSET)
    return corners


def _arrows(axes: Axes, boxes: Sequence[tuple], corners: Sequence[tuple]) -> None:
    """From each entry to its page, under the letters."""
    look = {"arrowstyle": "-|>", "mutation_scale": 8, "linewidth": 0.9, "color": INK, "zorder": 2, "alpha": 0.8}
    for (x, y, wide), (to_x, to_y) in zip(boxes, corners, strict=True):
        start, end = (x + wide / 2, y), (to_x + 0.02, to_y + 0.22 * CELL)
        axes.add_patch(FancyArrowPatch(start, end, connectionstyle="arc3,rad=0.1", shrinkA=0, shrinkB=0, **look))


def _one_piece(axes: Axes, requests: Mapping, waiting: str, num_rows: int, longest: int, y: float) -> None:
    """Below: the same rows, where each request gets `longest` of them at once."""
    slots, names = num_rows // longest, [*requests, *waiting]
    inside = [(name, requests[name].tokens) for name in names[:slots] if name in requests]
    left, cell = STRIPS[0], (WIDTH - MARGIN - STRIPS[0]) / num_rows
    out = f"; {', '.join(names[slots:])} would wait" if names[slots:] else ""
    unused = longest * len(inside) - sum(tokens for _, tokens in inside)
    _heading(axes, left - 0.3, y + 0.3, f"in one piece, {longest} rows for each: {unused} of them unused{out}")
    for slot in range(slots):
        name, tokens = inside[slot] if slot < len(inside) else ("", 0)
        x = left + slot * longest * cell
        _cell(axes, x, y, tokens * cell, HIGH, GREY, line=0)
        _cell(axes, x + tokens * cell, y, (longest - tokens) * cell, HIGH, PAPER if name else FREE, bool(name), line=0)
        axes.text(x + tokens * cell / 2, y + HIGH / 2, name, ha="center", va="center", fontsize=8.5)
        _frame(axes, x, y, longest * cell, HIGH)


def _legend(axes: Axes, shared: bool, arrows: bool) -> None:
    """Bottom line: what hatch, white, a double border, small numbers and arrows mean."""
    entries = [(PAPER, True, "reserved, holds no token"), (FREE, False, "free")]
    x, y = STRIPS[0], 0.17
    for color, hatched, words in entries:
        _cell(axes, x, y, 0.17, 0.17, color, hatched, line=0.6)
        axes.text(x + 0.25, y + 0.085, words, va="center", fontsize=8.5)
        x += 0.45 + 0.075 * len(words)
    if shared:
        _frame(axes, x, y, 0.17, 0.17)
        _frame(axes, x + INSET, y + INSET, 0.17 - 2 * INSET, 0.17 - 2 * INSET)
        axes.text(x + 0.25, y + 0.085, "in two tables", va="center", fontsize=8.5)
    words = "small numbers: pages" + "; arrows: the last table's" * arrows
    axes.text(WIDTH - MARGIN, y + 0.085, words, va="center", ha="right", fontsize=8.5, color=MUTED)


def _heading(axes: Axes, x: float, y: float, words: str) -> None:
    axes.text(x, y + 0.1, words, va="bottom", fontsize=9, color=MUTED)


def _cell(axes: Axes, x, y, width, height, color: str, hatched: bool = False, line: float = 0.5) -> None:
    look = {"facecolor": color, "edgecolor": "#9aa1a8", "linewidth": line, "hatch": HATCH if hatched else None}
    axes.add_patch(Rectangle((x, y), width, height, **look))


def _frame(axes: Axes, x, y, width, height) -> None:
    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=INK, linewidth=1.1, zorder=4))


# ---- in words ------------------------------------------------------------------------------------


def _alt(requests: Mapping[str, Pages], size: int, line: str) -> str:
    tables = "; ".join(f"{n}: {t} tokens, pages {', '.join(map(str, table))}" for n, (table, t) in requests.items())
    return f"Strips of rows, block tables and a map of the cache: {line}. {tables or 'Nobody is there'}."


def _alt_rest(requests: Mapping[str, Pages], waiting: str, longest: int | None, num_rows: int) -> str:
    shared = sorted(page for page, uses in _uses(requests).items() if uses > 1)
    said = f" Shared, with a double border: pages {', '.join(map(str, shared))}." if shared else ""
    said += f" Too few pages were free for {', '.join(waiting)}." if waiting else ""
    if longest:
        said += f" Below, in grey: {num_rows // longest} reservations of {longest} rows in one piece."
    return said
