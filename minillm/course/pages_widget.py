"""Requests that come, grow and end in a cache of 64 rows, moment by moment, in pages of any size. Lesson 06."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.course.figures.pages import Pages, pages
from minillm.course.widgets import choice, picture_box, slider

NUM_ROWS, LONGEST = 64, 16
SIZES = (1, 2, 4, 8, 16)


def replay(story: Sequence[tuple[str, int]], block_size: int, num_rows: int = NUM_ROWS) -> tuple[dict[str, Pages], str]:
    """(what each request has at the end of the story, letters of those that wait for pages).

    story  (letter, tokens that come), or (letter, 0) when the request ends; one that waits stays outside

    Raises ValueError when a request that has pages cannot grow.
    """
    free = list(range(num_rows // block_size))
    requests: dict[str, Pages] = {}
    waiting = ""
    for name, tokens in story:
        if name in waiting:
            continue
        table, before = requests.get(name, Pages([], 0))
        if not tokens:
            free += requests.pop(name).table
            continue
        more = -(-(before + tokens) // block_size) - len(table)
        if more > len(free):
            if table:
                raise ValueError(f"{name} cannot grow to {before + tokens} tokens: no page is free")
            waiting += name
            continue
        requests[name] = Pages([*table, *free[:more]], before + tokens)
        del free[:more]
    return requests, waiting


def pages_box(story: Sequence[tuple[str, int]], block_size: int = 4):
    """`figures.pages` after each moment of the story, in pages of the size that is chosen."""

    def draw(moment: int, size: str):
        requests, waiting = replay(story[:moment], int(size))
        return pages(requests, int(size), NUM_ROWS, LONGEST, waiting)

    return picture_box(
        draw,
        moment=slider("moment", 1, len(story), len(story)),
        size=choice("page size", [str(size) for size in SIZES], str(block_size)),
    )
