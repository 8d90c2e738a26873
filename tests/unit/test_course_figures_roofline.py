"""F9: points and roofs stand where the numbers say, and the picture without sliders is the one with them."""

import random

import matplotlib
import pytest

from minillm import costs, roofline
from minillm.course import figures, roofline_widget, style, widgets
from minillm.course.figures.roofline import KINDS, Roof, Work
from minillm.devices import DEVICES, find_device
from minillm.estimate import shape_of

CPU = Roof("this CPU", 2e11, 2.5e10, measured=True)
A100 = Roof("A100-80GB", 312e12, 2.039e12, measured=False)


def some_work():
    intensities = sorted(random.uniform(0.5, 2000) for _ in range(4))
    return [Work(f"point {i}", x, random.uniform(1e9, 1e11)) for i, x in enumerate(intensities)]


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def test_a_roof_is_the_lower_of_its_two_limits():
    assert CPU.ridge == 8
    assert CPU.at(8) == 2e11
    assert CPU.at([2, 80]) == pytest.approx([5e10, 2e11])


def test_points_stand_at_their_intensity_and_speed():
    work = {kind: some_work() for kind in KINDS}
    axes = figures.roofline([CPU, A100], work).axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    for kind, series in work.items():
        (points,) = [line for line in axes.lines if line.get_label() == kind]
        assert [tuple(xy) for xy in points.get_xydata()] == [(p.intensity, p.flops) for p in series]
        (left, right), (floor, top) = axes.get_xlim(), axes.get_ylim()
        assert all(left < p.intensity < right and floor < p.flops < top for p in series)


@pytest.mark.parametrize("roofs", [[CPU], [CPU, A100], [A100, CPU], [A100]])
def test_each_roof_bends_at_its_ridge_and_only_measured_ones_are_solid(roofs):
    axes = figures.roofline(roofs, {}).axes[0]
    bends = {line.get_xdata()[1]: line for line in axes.lines if len(line.get_xdata()) == 3}
    assert set(bends) == {roof.ridge for roof in roofs}
    for roof in roofs:
        line = bends[roof.ridge]
        assert line.get_ydata() == pytest.approx(roof.at(line.get_xdata()))
        assert (line.get_linestyle() == "-") is roof.measured
        words = "measured" if roof.measured else "datasheet"
        assert any(text.startswith(f"{roof.name}, {words}: ") for text in texts(axes.figure))


def test_the_points_belong_to_the_first_roof():
    axes = figures.roofline([CPU, A100], {"prefill": some_work()}).axes[0]
    (memory, arithmetic) = [c.get_paths()[0].vertices for c in axes.collections]
    assert memory[:, 0].max() == arithmetic[:, 0].min() == CPU.ridge
    assert memory[:, 1].max() == arithmetic[:, 1].max() == CPU.flops


def test_points_of_one_column_share_a_name():
    column = [Work(f"batch {b}", 3.0, b * 1e9) for b in (1, 4, 16)]
    found = texts(figures.roofline([CPU], {"decode attention": column}))
    assert "batch 1 to batch 16" in found and "batch 1" not in found


def test_kinds_are_told_apart_without_colour():
    assert len({marker for marker, *_ in KINDS.values()}) == len(KINDS)


def test_the_picture_reads_its_numbers_aloud(capsys):
    alt = figures.roofline([CPU, A100], {"decode": [Work("batch 1", 1.0, 7.45e9)]}).get_label()
    assert "this CPU (measured): 200 GFLOP/s and 25 GB/s, ridge at 8 FLOPs per byte" in alt
    assert "A100-80GB (datasheet): 312 TFLOP/s and 2.04 TB/s" in alt
    assert "decode: batch 1 at 1 FLOPs per byte 7.45 GFLOP/s" in alt
    assert capsys.readouterr().out == "roofline: 2 roofs, 1 of decode\n"


def test_a_guess_is_drawn_and_told_only_when_there_is_one():
    guess = Work("batch 64", 57.0, 3.1e10)
    without, figure = figures.roofline([CPU], {}), figures.roofline([CPU], {}, guess=guess)
    (mark,) = [line for line in figure.axes[0].lines if line.get_label() == "your guess"]
    assert (*mark.get_xdata(), *mark.get_ydata()) == (57.0, 3.1e10)
    assert figure.get_label().endswith("The guess for batch 64 was 31 GFLOP/s.")
    assert "guess" not in without.get_label() + "".join(texts(without))


def test_unknown_work_is_refused():
    with pytest.raises(ValueError, match="unknown work training; known: prefill"):
        figures.roofline([CPU], {"training": []})


@pytest.mark.parametrize("lower", [0.45, 0.75, 0.95])
def test_the_names_of_two_near_roofs_do_not_run_into_each_other(lower):
    near = Roof("H200", 989e12 * lower, 4.8e12 * 0.9, True), Roof("H200", 989e12, 4.8e12, False)
    figure = figures.roofline(near, {})
    style.to_png(figure)
    boxes = [t.get_window_extent() for t in figure.axes[0].texts if t.get_text().startswith("H200")]
    assert len(boxes) == 2
    assert all(not a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


# ---- the sliders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICES)
def test_predicted_points_stand_on_the_roof_at_their_counted_intensity(name):
    config, device = shape_of("8b"), find_device(name)
    prompt, batch = random.randrange(16, 8192), random.randrange(1, 256)
    axes = roofline_widget.predicted(config, "8B", device, prompt, batch).axes[0]
    marks = {line.get_label(): line.get_xydata()[0] for line in axes.lines if line.get_label() in KINDS}
    steps = {"prefill": [(prompt, prompt)], "decode": [(1, prompt)] * batch}
    for phase, step in steps.items():
        x, y = marks[phase]
        assert x == pytest.approx(costs.intensity(config, step))
        assert y == pytest.approx(min(device.peak(), device.bandwidth * x))
    # Of K and V each byte serves the 4 query heads of its group, once; the row that is written is hardly any.
    assert marks["decode attention"][0] == pytest.approx(4 * prompt / (prompt + 1))


def test_the_sliders_draw_what_the_plain_call_draws(monkeypatch):
    monkeypatch.setattr(widgets, "display", lambda *args, **kwargs: None)
    config = shape_of("8b")
    box = roofline_widget.roofline_box(config, "8B", "H100", prompt=1000, batch=4)
    *controls, picture = box.children
    assert picture.value == widgets.image_tag(roofline_widget.predicted(config, "8B", find_device("H100"), 1000, 4))
    controls[0].value, controls[1].value, controls[2].value = 64, 200, "T4"
    assert picture.value == widgets.image_tag(roofline_widget.predicted(config, "8B", find_device("T4"), 64, 200))


def test_the_title_says_the_two_times():
    config, h100 = shape_of("8b"), find_device("H100")
    title = texts(roofline_widget.predicted(config, "8B", h100, 2048, 8))
    seconds = roofline.step_seconds(config, [(2048, 2048)], h100)
    assert any(f"first token after {seconds * 1e3:.1f} ms or more" in text for text in title)
