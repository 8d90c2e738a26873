"""Sliders over the recompute triangle: a prompt and an answer of any length, and what the cache saves. Lesson 05."""

from __future__ import annotations

from minillm.course.figures.recompute import recompute
from minillm.course.widgets import picture_box, slider

LONGEST = 24  # tokens of each; beyond, cells are too small to tell apart


def recompute_box(prompt: int = 6, answer: int = 8):
    """`figures.recompute` with two sliders, without the tokens' text."""

    def draw(prompt: int, answer: int):
        return recompute([""] * prompt, [""] * answer)

    return picture_box(
        draw,
        prompt=slider("prompt", 1, LONGEST, prompt),
        answer=slider("answer", 1, LONGEST, answer),
    )
