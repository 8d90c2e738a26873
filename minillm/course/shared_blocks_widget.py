"""Type two prompts and see which blocks of the second one a prefix cache finds. Lesson 07."""

from __future__ import annotations

from minillm.course.figures.shared_blocks import shared_blocks
from minillm.course.widgets import choice, picture_box, text_line

SIZES = ("2", "4", "8")


def shared_blocks_box(tokenizer, first: str, second: str, size: int = 8):
    """`figures.shared_blocks` with two lines of text and a choice of block sizes.

    tokenizer  encode(text) -> ids, token_bytes(id) -> bytes
    """

    def draw(first: str, second: str, size: str):
        cut = ([tokenizer.token_bytes(i) for i in tokenizer.encode(text)] for text in (first, second))
        return shared_blocks(*cut, int(size))

    return picture_box(
        draw,
        first=text_line("read before", first),
        second=text_line("now", second),
        size=choice("block size", list(SIZES), str(size)),
    )
