"""Characters, bytes and tokens over each other, and what may be shown when each token has arrived."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from minillm.course.figures.tiles import FILLS, label, tile
from minillm.course.style import MARGIN, MUTED, card, describe, place, styled

BYTE, LINE, HEIGHT = 0.66, 0.46, 0.3  # inches: of one byte, from line to line, of a tile
GLYPH, WAITS = "#e3b0cc", "#f1efe8"


@styled
def byte_stream(text: str, tokens: Sequence[bytes], shown: Sequence[str], title: str = "") -> Figure:
    """Four lines over one axis of bytes.

    tokens  the bytes of each token; together those of `text`
    shown   for each token the text that its arrival completes, "" where it has to wait
    """
    data = text.encode()
    if b"".join(tokens) != data or len(shown) != len(tokens):
        raise ValueError(f"the tokens do not join to the {len(data)} bytes of the text, one shown text each")
    left = 1.05
    figure = card(left + BYTE * len(data) + MARGIN, 0.62 + 4 * LINE + 0.1, title)
    axes = place(figure, left, 0.1, MARGIN, 0.62)
    axes.set(xlim=(0, BYTE * len(data)), ylim=(4 * LINE - 0.05, -0.05))
    axes.axis("off")
    rows = {
        "characters": [(char.encode(), _named(char), GLYPH if len(char.encode()) > 1 else "#ffffff") for char in text],
        "bytes": [(bytes([b]), f"{b:02X}", "#ffffff") for b in data],
        "tokens": [(token, label(token), FILLS[i % len(FILLS)]) for i, token in enumerate(tokens)],
        "shown": [
            (t, _shown(s), FILLS[i % len(FILLS)] if s else WAITS)
            for i, (t, s) in enumerate(zip(tokens, shown, strict=True))
        ],
    }
    for row, (name, tiles) in enumerate(rows.items()):
        x = 0.0
        for piece, words, fill in tiles:
            style = {"fontsize": 8 if len(words) * 0.08 > len(piece) * BYTE else 9}
            tile(axes, x, row * LINE, BYTE * len(piece), HEIGHT, words, fill, **style)
            x += BYTE * len(piece)
        axes.text(-0.14, row * LINE + HEIGHT / 2, name, ha="right", va="center_baseline", fontsize=9, color=MUTED)

    print(f"byte_stream: {len(text)} characters, {len(data)} bytes, {len(tokens)} tokens")
    told = "; ".join(f"token {label(t)} shows {_shown(s)}" for t, s in zip(tokens, shown, strict=True))
    return describe(figure, f"{len(text)} characters over their {len(data)} bytes and {len(tokens)} tokens. {told}.")


def _named(char: str) -> str:
    """A character, or its number where the font lacks it."""
    text = label(char.encode())
    return text if len(text) == 1 else f"U+{ord(char):X}"


def _shown(text: str) -> str:
    return "".join(map(_named, text)) or "waits"
