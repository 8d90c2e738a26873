"""A text cut into its tokens, each with its id."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from minillm.course.figures.tiles import FILLS, label, tile
from minillm.course.style import MARGIN, MUTED, card, describe, place, styled

WIDTH, LINE = 8.6, 0.62  # inches of the card and of a line of tiles
LETTER, PADDING = 0.086, 0.12  # inches
MAX_TOKENS = 300


@styled
def token_tiles(tokens: Sequence[bytes], ids: Sequence[int], title: str = "") -> Figure:
    """One tile for each token, in reading order; its id stands below. Blanks are drawn as ␣, line ends as ↵."""
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise ValueError(f"{len(tokens)} tokens: a picture shows 1 to {MAX_TOKENS}")
    room, lines, x = WIDTH - 2 * MARGIN, [[]], 0.0
    for token, id in zip(tokens, ids, strict=True):
        text = label(token)
        width = max(LETTER * len(text), 0.066 * len(str(id))) + PADDING
        if x + width > room and lines[-1]:
            lines.append([])
            x = 0.0
        lines[-1].append((x, min(width, room), text, id))
        x += width
    count = sum(map(len, tokens))
    title = title or f"{len(ids)} tokens, {count} bytes"
    figure = card(WIDTH, 0.78 + LINE * len(lines), title)
    axes = place(figure, MARGIN, 0.14, MARGIN, 0.58)
    axes.set(xlim=(0, room), ylim=(LINE * len(lines) + 0.06, 0))
    axes.axis("off")
    number = 0
    for row, line in enumerate(lines):
        for x, width, text, id in line:
            y = row * LINE + 0.06
            tile(axes, x, y, width, 0.32, text, FILLS[number % len(FILLS)])
            axes.text(x + width / 2, y + 0.43, str(id), ha="center", va="center", fontsize=7, color=MUTED)
            number += 1

    print(f"token_tiles: {len(ids)} tokens of {count} bytes")
    told = ", ".join(f"{label(token)} ({id})" for token, id in zip(tokens[:40], ids[:40], strict=True))
    more = f", and {len(ids) - 40} more" if len(ids) > 40 else ""
    return describe(figure, f"A text as {len(ids)} tiles, one for each token with its id: {told}{more}.")
