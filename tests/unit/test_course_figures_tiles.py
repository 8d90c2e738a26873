"""Figures of lesson 08: the strip keeps the books of a softmax, the walk visits what is seen, memory is counted."""

import math
import random
from itertools import product

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from minillm.course import figures, style, widgets
from minillm.course.figures.online_softmax import LOOKS, walk
from minillm.course.figures.tile_walk import visits
from minillm.course.online_softmax_widget import online_softmax_box
from minillm.course.peak_memory import PeakMemory


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def bars(axes, name):
    return [p for p in axes.patches if isinstance(p, Rectangle) and p.get_label() == name]


# ---- F7 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [2, math.e])
def test_the_walk_ends_at_the_softmax_for_any_tile(base):
    scores = [random.uniform(-300, 300) for _ in range(13)]
    values = [random.uniform(-5, 5) for _ in scores]
    weights = torch.tensor([score * math.log(base) for score in scores], dtype=torch.float64).softmax(0)
    right = float(weights @ torch.tensor(values, dtype=torch.float64))
    for tile in (1, 4, 13, 20):
        tiles = walk(scores, values, tile, base)
        assert len(tiles) == -(-13 // tile) and tiles[-1].highest == max(scores)
        assert tiles[-1].mix / tiles[-1].sum == pytest.approx(right, rel=1e-9)
        for before, after in zip(tiles, tiles[1:], strict=False):
            assert (after.sum_before, after.mix_before) == (before.sum, before.mix)
            assert (after.shrink < 1) == (after.highest > before.highest)


def test_the_strip_draws_its_books_and_says_where_the_maximum_jumps(capsys):
    scores, values = [1, 0, 3, 2, 0, 5], [2, 4, 8, 0, 1, 3]
    figure = figures.online_softmax(scores, values, tile=2, base=2)
    states = walk(scores, values, 2, 2)
    above, sums, mixes = figure.axes[:3] if len(bars(figure.axes[0], "score")) else figure.axes[1:4]
    assert [bar.get_height() for bar in bars(above, "score")] == scores
    lines = [line.get_ydata()[0] for line in above.lines if line.get_label() == "maximum"]
    assert lines == [1, 3, 5]
    before, kept, added = LOOKS
    for axes, name in ((sums, "sum"), (mixes, "mix")):
        assert [bar.get_height() for bar in bars(axes, before)] == [getattr(s, f"{name}_before") for s in states[1:]]
        assert [bar.get_height() for bar in bars(axes, added)] == [getattr(s, f"{name}_added") for s in states]
        shrunk = [getattr(s, f"{name}_before") * s.shrink for s in states[1:]]
        assert [bar.get_height() for bar in bars(axes, kept)] == shrunk
    assert texts(figure).count("× 1/4") == 4  # both jumps are by two, in both rows
    assert "the maximum jumps in tile 2 and tile 3" in capsys.readouterr().out
    assert "tile 3: maximum 5, what was there times 1/4" in figure.get_label()
    assert bars(sums, kept)[0].get_hatch() and not bars(sums, added)[0].get_hatch()
    style.to_png(figure)


def test_a_strip_that_is_read_in_part_shows_what_is_missing(capsys):
    figure = figures.online_softmax([1, 0, 3, 2], [2, 4, 8, 0], tile=2, base=2, read=1)
    out = capsys.readouterr().out
    assert out.startswith("online_softmax: 1 of 2 tiles read, the maximum jumps in none") and "equal: False" in out
    assert "Mix over sum is 2.67" in figure.get_label()
    for wrong in (0, 3):
        with pytest.raises(ValueError, match=f"{wrong} tiles read of 2"):
            figures.online_softmax([1, 0, 3, 2], [2, 4, 8, 0], tile=2, read=wrong)
    with pytest.raises(ValueError, match="2 scores and 1 values"):
        figures.online_softmax([1, 0], [2])


def test_wherever_the_largest_score_stands_the_box_comes_to_the_same_result():
    scores, values = [random.randint(0, 5) for _ in range(8)], [random.randint(0, 9) for _ in range(8)]
    scores[random.randrange(8)] = 7
    box = online_softmax_box(scores, values)
    read, place, picture = box.children
    assert place.value == 1 + scores.index(7) and read.value == 2
    shown = set()
    for place.value in (1, 8, 4):
        shown.add(picture.value)
        exact = walk(scores, values, 8, 2)[0]
        assert picture.value.count(f"{exact.mix / exact.sum:.3g}") == 2  # in the alt text: tile by tile, and at once
    read.value = 1
    shown.add(picture.value)
    assert len(shown) == 4 and picture.value.startswith("<img") and widgets.VIEW


# ---- F8 ------------------------------------------------------------------------------------------


def test_the_walk_visits_every_tile_with_a_visible_pair_and_no_other():
    for n, keys in ((8, 8), (5, 9), (1, 7), (random.randint(1, 12), random.randint(12, 20))):
        query_tile, key_tile = random.randint(1, 5), random.randint(1, 5)
        seen = np.arange(keys)[None] <= np.arange(keys - n, keys)[:, None]
        number = 0
        cells = list(product(range(0, n, query_tile), range(0, keys, key_tile)))
        found = visits(n, keys, query_tile, key_tile)
        assert [(tile.query, tile.key) for tile in found] == cells
        for tile in found:
            part = seen[tile.query : tile.query + tile.height, tile.key : tile.key + tile.width]
            kind = "all keys seen" if part.all() else "masked in part" if part.any() else "never visited"
            number += bool(part.any())
            assert (tile.kind, tile.number) == (kind, number if part.any() else 0), (n, keys, tile)


def test_the_picture_numbers_its_tiles_and_its_bars_are_the_bytes(capsys):
    sizes = [random.uniform(1e6, 1e8) for _ in range(4)]
    traffic = {"one": {"Q": sizes[0], "scores": sizes[1]}, "other": {"Q": sizes[2], "scores": 0}}
    figure = figures.tile_walk(4, 8, 2, 2, traffic)
    grid, chart = figure.axes[:2]
    assert [t.get_text() for t in grid.texts] == [str(number) for number in range(1, 8)]
    assert len(bars(grid, "never visited")) == 1 and all(box.get_hatch() for box in bars(grid, "never visited"))
    for way, bytes_of in traffic.items():
        for tensor, size in bytes_of.items():
            assert [bar.get_width() for bar in bars(chart, f"{way} {tensor}")] == [size]
    assert capsys.readouterr().out.startswith("tile_walk: 7 of 8 tiles visited, 1 skipped; one ")
    assert "1 never visited" in figure.get_label() and "none" in texts(figure)
    style.to_png(figure)
    with pytest.raises(ValueError, match="compares two"):
        figures.tile_walk(4, 4, 2, 2, {"one": {}})


# ---- tile sizes, and memory ------------------------------------------------------------------------


def test_tile_size_draws_what_was_measured_beside_the_whole_matrix_and_the_guess(capsys):
    costs = {tile: figures.Cost(random.uniform(0.01, 1), random.uniform(1e6, 1e8)) for tile in (16, 64)}
    naive, guess = figures.Cost(0.3, 2e8), (64, random.uniform(0.001, 3))
    figure = figures.tile_size(costs, naive, 1024, guess)
    for axes, field in zip(figure.axes, ("seconds", "bytes"), strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines["tiles"].get_ydata()) == [getattr(cost, field) for cost in costs.values()]
        assert set(lines["naive"].get_ydata()) == {getattr(naive, field)}
    assert set({line.get_label(): line for line in figure.axes[0].lines}["your guess"].get_ydata()) == {guess[1]}
    assert capsys.readouterr().out == "tile_size: 2 tiles from 16 to 64, beside the whole matrix\n"
    assert "200 MB" in figure.get_label()
    style.to_png(figure)
    with pytest.raises(ValueError, match="no tile"):
        figures.tile_size({}, naive, 1024, guess)


def test_peak_memory_counts_what_is_alive_at_once_and_no_view_twice():
    before = torch.zeros(1000)
    with PeakMemory() as memory:
        a = torch.ones(100)  # 400 bytes
        b = a.view(10, 10).T + before[:10]  # 400 more; the view and the input are none
        assert (memory.now, memory.peak) == (800, 800)
        del a
        assert (memory.now, memory.peak) == (400, 800)
        b.add_(1)
        c = torch.ones(25)  # 100
        assert (memory.now, memory.peak) == (500, 800)
    del b, c
    assert (memory.now, memory.peak) == (0, 800)
