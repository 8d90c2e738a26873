"""Sliders over the online softmax strip: read tile after tile, and put the largest score elsewhere. Lesson 08."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.course.figures.online_softmax import online_softmax
from minillm.course.widgets import picture_box, slider


def online_softmax_box(scores: Sequence[float], values: Sequence[float], tile: int = 4, base: float = 2):
    """`figures.online_softmax` with two sliders: tiles read so far, and the place of the key with the largest score.

    That key, with its value, changes places with the one that stands there: the result stays what it was.
    """
    highest = max(range(len(scores)), key=scores.__getitem__)

    def draw(read: int, place: int):
        order = list(range(len(scores)))
        order[highest], order[place - 1] = order[place - 1], order[highest]
        return online_softmax([scores[i] for i in order], [values[i] for i in order], tile, base, read)

    tiles = -(-len(scores) // tile)
    return picture_box(
        draw,
        read=slider("tiles read", 1, tiles, tiles),
        place=slider("largest at", 1, len(scores), highest + 1),
    )
