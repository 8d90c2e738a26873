"""Figures of lesson 05: the recompute triangle counts what it draws, later tokens lie where they were measured."""

import random

import numpy as np
import pytest
from matplotlib.patches import Circle, Rectangle
from matplotlib.text import Text

from minillm.course import figures, style, widgets
from minillm.course.figures.recompute import AGAIN, FIRST, NAMES, NOTHING, READ, states
from minillm.course.recompute_widget import recompute_box


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def played(n, m, cached):
    """The same table by playing the engine: one list of kept tokens, one step after the other."""
    table, kept, text = [], [], list(range(n))
    for _ in range(m):
        row = [NOTHING] * (n + m - 1)
        for token in text:
            row[token] = FIRST if token not in kept else READ if cached else AGAIN
        kept = list(text)
        table.append(row)
        text.append(len(text))
    return np.array(table)


@pytest.mark.parametrize("cached", [False, True])
def test_the_states_are_those_of_an_engine_that_is_played_by_hand(cached):
    for n, m in [(1, 1), (1, 5), (6, 1), (random.randint(2, 9), random.randint(2, 9))]:
        assert (states(n, m, cached) == played(n, m, cached)).all(), (n, m)


def test_both_panels_draw_their_states_and_the_sums_below_count_them(capsys):
    n, m = random.randint(2, 7), random.randint(2, 7)
    figure = figures.recompute(["a"] * n, [f"b{i}" for i in range(m)])
    columns = n + m - 1
    for axes, cached in zip(figure.axes, (False, True), strict=False):
        drawn = np.full((m, columns), -1)
        codes = {"": NOTHING, **{name: state for state, name in NAMES.items()}}
        for box in axes.patches:
            if isinstance(box, Rectangle):
                drawn[round(box.get_y()), round(box.get_x())] = codes[box.get_label()]
        assert (drawn == played(n, m, cached)).all()
        assert sum(isinstance(p, Circle) for p in axes.patches) == (drawn == READ).sum()
    rows = sum(n + i for i in range(m))
    again = rows - columns
    assert f"{rows} rows computed, {again} of them again" in texts(figure)
    assert f"{columns} rows computed, K and V of {again} read" in texts(figure)
    assert [f"→ b{i}" for i in range(m)] == [t for t in texts(figure) if t.startswith("→")]
    line = f"recompute: {n} + {m} tokens, {rows} rows without a cache, {columns} with, {again} were computed again\n"
    assert capsys.readouterr().out == line
    for number in (rows, again, columns):
        assert f"{number}" in figure.get_label()
    style.to_png(figure)


def test_rows_of_all_kinds_differ_in_more_than_their_colour():
    figure = figures.recompute(["a", "b"], ["c", "d"])
    boxes = {p.get_label(): p for p in (*figure.axes[0].patches, *figure.axes[1].patches) if p.get_label()}
    assert boxes["computed again"].get_hatch() and not boxes["computed"].get_hatch()
    assert sum(isinstance(p, Circle) for p in figure.axes[1].patches) == 2  # one per row that is read


def test_small_rows_are_named_in_part_and_a_text_needs_a_token_on_each_side():
    figure = figures.recompute([""] * 20, [""] * 30)
    named = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert named[:2] == ["step 1", "step 4"] and len(named) == 10
    for prompt, answer in (([], ["a"]), (["a"], [])):
        with pytest.raises(ValueError, match="one of each is the least"):
            figures.recompute(prompt, answer)


def test_later_tokens_lie_where_they_were_measured_beside_the_guess(capsys):
    lengths = [32, 128, 512]
    seconds = {name: {n: random.uniform(0.01, 2) for n in lengths} for name in ("one", "two")}
    guess = (512, random.uniform(1e-4, 3))
    figure = figures.later_tokens(seconds, guess)
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    for name, times in seconds.items():
        assert dict(zip(*lines[name].get_data(), strict=True)) == times
    assert [float(v[0]) for v in lines["your guess"].get_data()] == list(guess)
    bottom, top = axes.get_ylim()
    assert bottom < min(guess[1], *seconds["one"].values()) and top > max(guess[1], *seconds["two"].values())
    assert lines["one"].get_marker() != lines["two"].get_marker()
    assert capsys.readouterr().out == "later_tokens: one at 3 lengths, two at 3 lengths\n"
    assert "behind 512 tokens" in figure.get_label() and {"one", "two"} <= set(texts(figure))
    style.to_png(figure)


@pytest.mark.parametrize("count", [0, 4])
def test_later_tokens_refuses_more_versions_than_it_has_marks(count):
    with pytest.raises(ValueError, match=f"{count} versions"):
        figures.later_tokens({f"{i}": {1: 1.0} for i in range(count)}, (1, 1.0))


def test_the_sliders_draw_the_triangle_of_their_lengths(capsys):
    box = recompute_box(prompt=5, answer=4)
    prompt, answer, picture = box.children
    assert picture.value == widgets.image_tag(figures.recompute([""] * 5, [""] * 4))
    prompt.value, answer.value = 9, 2
    assert picture.value == widgets.image_tag(figures.recompute([""] * 9, [""] * 2))
