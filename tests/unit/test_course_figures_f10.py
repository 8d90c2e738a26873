"""F10: points, line and steps stand where the numbers say, and tiles show the rows that nobody asked for."""

import random

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from minillm.course import figures, style
from minillm.staircase import LENGTHS, PUBLISHED_MS, filled


def on_stairs(tile, a=None, b=None):
    a, b = a or random.uniform(1, 5), b or random.uniform(0.01, 0.1)
    return {n: a + b * filled(n, tile) for n in LENGTHS}, a, b


def test_the_steps_go_through_the_points_of_a_true_staircase_and_the_line_does_not():
    ms, a, b = on_stairs(64)
    axes = figures.staircase(ms, tile=64).axes[0]
    points, steps, line = (
        next(drawn for drawn in axes.lines if drawn.get_label().startswith(label))
        for label in ("measured", "pays by the tile", "pays by the row")
    )
    assert [tuple(xy) for xy in points.get_xydata()] == [(n, ms[n]) for n in LENGTHS]
    assert dict(steps.get_xydata()) == pytest.approx({n: a + b * filled(n, 64) for n in range(96, 289)})
    assert steps.get_label().endswith(" 0.0%") and not line.get_label().endswith(" 0.0% unexplained")
    rows = np.array(sorted(ms))
    assert np.polyfit(rows, [ms[n] for n in rows], 1) == pytest.approx(
        np.polyfit(line.get_xdata(), line.get_ydata(), 1)
    )
    assert max(ms.values()) < axes.get_ylim()[1] and axes.get_ylim()[0] == 0


def test_each_drawn_step_has_its_tiles_and_its_rows():
    axes = figures.staircase(on_stairs(128)[0]).axes[1]
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    hatched = [patch for patch in patches if patch.get_hatch()]
    solid = [patch for patch in patches if patch.get_facecolor() == to_rgba(style.BLUE)]
    assert len(hatched) == len(solid) == 1 + 2 + 3
    by_step = {n: [p for p in solid if int(p.get_x()) == place] for place, n in enumerate((128, 256, 257))}
    full = hatched[0].get_height()
    assert [round(p.get_height() / full, 2) for p in by_step[256]] == [1.0, 1.0]
    *_, last = by_step[257]
    assert 0 < last.get_height() < 0.06 * full
    assert [text.get_text() for text in axes.texts] == ["128 tokens", "256 tokens", "257 tokens"]


def test_the_line_of_text_is_the_same_everywhere_and_the_alt_text_reads_the_numbers(capsys):
    figure = figures.staircase(PUBLISHED_MS)
    out = capsys.readouterr().out
    assert out == (
        "staircase: 3 lengths from 128 to 257; of tiles of 128 rows 128 leave 0, 256 leave 0, 257 leave 127 empty\n"
    )
    alt = figure.get_label()
    assert "55 ms at 128, 69.8 ms at 256, 92.3 ms at 257" in alt
    assert "257 tokens fill 3 tiles and leave 127 rows empty" in alt
    style.to_png(figure)


def test_two_lengths_tell_no_line_from_a_staircase():
    with pytest.raises(ValueError, match="2 lengths"):
        figures.staircase({128: 1.0, 256: 2.0})
