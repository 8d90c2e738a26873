"""F14: the number lines are those of the formats, what stands beside them is their error, times stand at their way."""

import random
import re

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle

from minillm.course import figures
from minillm.course.figures.precision import error, number_lines, rounded
from minillm.eight_bit import quantize_rows

NAMES = ["int4", "int8", "fp8 e4m3", "fp8 e5m2"]


def ways():
    """bf16 first, which the others are compared with, then a few in any order, one of them emulated."""
    made = [figures.Precision("bf16", 16, random.uniform(0.1, 1), random.uniform(0.01, 0.1), random.uniform(20, 40))]
    others = [("int4", 4.5), ("int8", 8), ("fp32", 32)]
    random.shuffle(others)
    for name, bits in others:
        made.append(figures.Precision(name, bits, random.uniform(0.1, 1), random.uniform(0.01, 0.1), 30))
    return [*made, figures.Precision("fp8", 8, None, None, 31)]


def test_each_tick_is_a_number_of_its_format_at_the_scale_of_the_row():
    row = torch.randn(300) * random.uniform(0.01, 3)
    axes = figures.precision(row).axes[1]
    ticks = {
        c.get_label(): [s[0][0] for s in c.get_segments()] for c in axes.collections if isinstance(c, LineCollection)
    }
    largest = float(row.abs().max())
    assert list(ticks) == NAMES
    assert np.diff(ticks["int4"]) == pytest.approx(float(row.max() - row.min()) / 15) and len(ticks["int4"]) == 16
    assert ticks["int8"] == pytest.approx([largest * code / 127 for code in range(-127, 128)])
    for name, dtype in (("fp8 e4m3", torch.float8_e4m3fn), ("fp8 e5m2", torch.float8_e5m2)):
        top = torch.finfo(dtype).max
        numbers = torch.tensor(ticks[name], dtype=torch.float64) / largest * top
        torch.testing.assert_close(numbers.to(dtype).double(), numbers, rtol=1e-6, atol=0)  # they are codes already
        assert numbers.max() == pytest.approx(top) and numbers.min() == pytest.approx(-top)
        every = [s * m * 2.0**e for s in (-1, 1) for e in range(-30, 17) for m in (1, 1.125, 1.25, 1.5, 1.75)]
        near = torch.tensor(every, dtype=torch.float64).clamp(-top, top).to(dtype).double().unique()
        assert all((numbers - x).abs().min() < 1e-6 * max(1e-3, abs(x)) for x in near.tolist())


@pytest.mark.parametrize("name, dtype", [("int8", torch.int8), ("fp8 e4m3", torch.float8_e4m3fn)])
def test_rounding_is_that_of_the_engine(name, dtype):
    row = torch.randn(500)
    codes, scale = quantize_rows(row[None], dtype)
    ours = rounded(row.double().numpy(), number_lines(row.double().numpy())[name])
    assert ours == pytest.approx((codes.double() * scale.double()).numpy()[0], abs=1e-5)


def test_what_is_written_beside_a_line_is_its_error():
    row = torch.randn(400)
    weights = row.double().numpy()
    figure = figures.precision(row)
    said = [t.get_text() for t in figure.axes[1].texts]
    for text, (name, numbers) in zip(said, number_lines(weights).items(), strict=True):
        nearest = [min(numbers, key=lambda number: abs(number - weight)) for weight in weights]
        off = (np.square(nearest - weights).sum() / np.square(weights).sum()) ** 0.5
        assert error(weights, numbers) == pytest.approx(off)
        assert text == f"{len(numbers)} numbers,\noff by {off:.1%}"
        assert f"{name} {len(numbers)} numbers, off by {off:.1%}" in figure.get_label()
    assert error(numbers, numbers) == 0


def test_the_histogram_holds_every_weight():
    row = torch.randn(777)
    bars = [p for p in figures.precision(row).axes[0].patches if isinstance(p, Rectangle)]
    assert sum(bar.get_height() for bar in bars) == 777


def test_times_are_multiples_of_the_first_way_s_and_emulated_ones_have_none():
    measured = ways()
    figure = figures.precision(torch.randn(64), measured)
    axes = figure.axes[2]
    in_order = sorted(measured, key=lambda way: way.bits)
    for field, title in (("ttft_s", "first token"), ("tpot_s", "each one after it")):
        (line,) = [line for line in axes.lines if line.get_label() == title]
        expected = [(x, getattr(w, field) / getattr(measured[0], field)) for x, w in enumerate(in_order) if w.ttft_s]
        np.testing.assert_allclose(line.get_xydata(), expected)
    labels = [t.get_text() for t in axes.get_xticklabels()]
    assert labels == [f"{w.name}\n{w.bits:g} bits\nperplexity {w.perplexity:.2f}" for w in in_order]
    (note,) = axes.texts
    assert in_order[round(note.get_position()[0])].name == "fp8" and "emulated" in note.get_text()
    assert "fp8, 8 bits: no times, emulated, perplexity 31.00" in figure.get_label()


@pytest.mark.parametrize("row", [torch.zeros(5), torch.zeros(0), torch.ones(2, 2)])
def test_a_row_without_weights_is_refused(row):
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.precision(row)


@pytest.mark.parametrize("measured", [[], ways()])
def test_the_card_prints_one_line_and_holds_all_that_is_written(measured, capsys):
    before = dict(matplotlib.rcParams)
    figure = figures.precision(torch.randn(576), measured)
    assert re.fullmatch(r"precision: 576 weights, int4, int8, fp8 e4m3, fp8 e5m2, \d ways\n", capsys.readouterr().out)
    assert dict(matplotlib.rcParams) == before
    FigureCanvasAgg(figure).draw()
    on_axes = [(*axes.texts, axes.xaxis.label, axes.yaxis.label) for axes in figure.axes]
    on_axes += [axes.get_yticklabels() for axes in figure.axes[1:2]] + [
        axes.get_xticklabels() for axes in figure.axes[2:]
    ]
    for text in [*figure.texts, *(text for texts in on_axes for text in texts)]:
        if text.get_text().strip():
            box = text.get_window_extent()
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text.get_text()
            assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text.get_text()
