"""Two prompts side by side, block by block: what the second one finds of the first, and why it finds no more."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minillm.course.figures.tiles import label, tile
from minillm.course.style import BLUE, GREEN, INK, MARGIN, MUTED, VERMILION, card, describe, place, styled

WIDTH, ROW = 8.6, 0.4  # inches
COLUMN, MIDDLE = 3.42, 0.34  # of a prompt, and between the two
LETTER, PADDING, FONT = 0.062, 0.09, 7.4
MAX_BLOCKS = 16
FOUND, DIFFERS, BEHIND, LAST, PARTIAL = "found", "differs", "behind a difference", "holds the last token", "not full"
FILLS = {FOUND: "#cfe8f7", DIFFERS: "#f6d9c9", BEHIND: "#f0eee7", LAST: "#f6e3b4", PARTIAL: "#fbfaf6"}
SIGNS = {FOUND: ("=", GREEN), DIFFERS: ("≠", VERMILION)}
NOTES = {
    DIFFERS: "the search ends here",
    LAST: "its last token is always computed",
    PARTIAL: "not full: not looked for",
}


def verdicts(first: Sequence, second: Sequence, size: int) -> list[str]:
    """For each block of the second prompt, the last one perhaps not full: what a prefix cache makes of it."""
    found = []
    for start in range(0, len(second), size):
        block = list(second[start : start + size])
        if len(block) < size:
            found.append(PARTIAL)
        elif found and found[-1] != FOUND:
            found.append(BEHIND)
        elif block != list(first[start : start + size]):
            found.append(DIFFERS)
        else:
            found.append(LAST if start + size == len(second) else FOUND)
    return found


@styled
def shared_blocks(first: Sequence[bytes], second: Sequence[bytes], size: int) -> Figure:
    """Left the prompt that was read, right the one that comes after it; each row is a block of `size` tokens.

    first, second  the tokens as bytes
    """
    longest = max(-(-len(tokens) // size) for tokens in (first, second))
    if not first or not second or longest > MAX_BLOCKS:
        raise ValueError(f"prompts of {len(first)} and {len(second)} tokens: a picture shows 1 to {MAX_BLOCKS * size}")
    judged = verdicts(first, second, size)
    found = judged.count(FOUND)
    figure = card(WIDTH, 1.1 + ROW * longest, f"{found * size} of {len(second)} tokens need not be read again")
    axes = place(figure, MARGIN + 0.04, 0.12, MARGIN, 0.9)
    axes.set(xlim=(0, WIDTH - 2 * MARGIN - 0.04), ylim=(ROW * longest + 0.08, 0))
    axes.axis("off")
    right = COLUMN + MIDDLE
    for x, words in ((0, f"read before: {len(first)} tokens"), (right, f"now: {len(second)} tokens")):
        axes.text(x, -0.09, words, fontsize=9, color=MUTED, va="bottom")
    known = {tuple(first[start : start + size]) for start in range(0, len(first) - size + 1, size)}
    for row in range(longest):
        piece = slice(row * size, (row + 1) * size)
        _block(axes, 0, row, first[piece], FILLS[BEHIND if len(first[piece]) == size else PARTIAL])
        if row >= len(judged):
            continue
        state = judged[row]
        end = _block(axes, right, row, second[piece], FILLS[state])
        middle = row * ROW + 0.18
        if state in SIGNS:
            sign, color = SIGNS[state]
            style = {"fontsize": 13, "fontweight": "bold", "color": color}
            axes.text(COLUMN + MIDDLE / 2 - 0.04, middle, sign, ha="center", va="center", label=state, **style)
        note = NOTES.get(state, "")
        if state == BEHIND and tuple(second[piece]) in known:
            note = "same tokens, other beginning"
        if note:
            axes.text(end + 0.06, middle, note, fontsize=7.6, va="center", color=INK, style="italic")
    axes.plot([right - 0.1] * 2, [0, ROW * found - 0.04], color=BLUE, linewidth=2.2) if found else None

    print(f"shared_blocks: {len(first)} and {len(second)} tokens in blocks of {size}, {found} found")
    told = ", ".join(f"{number} {state}" for number, state in enumerate(judged, 1))
    return describe(
        figure,
        f"Two columns of blocks of {size} tokens: a prompt of {len(first)} tokens that was read, and one of "
        f"{len(second)} that comes now. Its blocks: {told}. {found * size} tokens need not be read again.",
    )


def _block(axes: Axes, left: float, row: int, tokens: Sequence[bytes], fill: str) -> float:
    """The tokens of one block as tiles, smaller where they would not fit; returns where they end."""
    names = [label(token) for token in tokens]
    widths = [LETTER * len(name) + PADDING for name in names]
    shrink = min(1.0, COLUMN / max(sum(widths), 0.01))
    for name, width in zip(names, widths, strict=True):
        tile(axes, left, row * ROW + 0.03, width * shrink, 0.3, name, fill, fontsize=FONT * shrink)
        left += width * shrink
    return left
