"""F15 draws each stage where it belongs: outline the reference, solid yours, dashes what is not reached yet."""

import random
import re

import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from minillm import LLM
from minillm.course import figures, gauges, style
from minillm.course.engine_so_far import STAGES
from minillm.course.figures.engine_so_far import PANELS, Reading
from minillm.course.gauges import requests_that_fit

KEYS = [stage.key for stage in STAGES]


def reading():
    return Reading(random.uniform(0.1, 2), random.uniform(0.01, 1), random.randint(1, 60))


def bars(axes, label):
    """{stage: height} of the bars with this label."""
    return {KEYS[round(p.get_x() + p.get_width() / 2)]: p.get_height() for p in axes.patches if p.get_label() == label}


def test_bars_have_the_heights_of_their_readings_and_tell_who_they_belong_to():
    reference = {key: reading() for key in KEYS[:5]}
    yours = {key: reading() for key in ("v1", "v4")}
    figure = figures.engine_so_far(reference, yours)
    for axes, (field, _, scale) in zip(figure.axes, PANELS, strict=True):
        for label, readings in (("reference", reference), ("yours", yours)):
            wanted = {key: scale * getattr(r, field) for key, r in readings.items()}
            assert bars(axes, label) == pytest.approx(wanted)
        assert max(p.get_height() for p in axes.patches) <= axes.get_ylim()[1]
    (outline, *_) = [p for p in figure.axes[0].patches if p.get_label() == "reference"]
    (solid, *_) = [p for p in figure.axes[0].patches if p.get_label() == "yours"]
    assert not outline.get_fill() and solid.get_fill() and solid.get_facecolor() == to_rgba(style.BLUE)


@pytest.mark.parametrize("reached", [0, 1, 8])
def test_stages_that_are_not_reached_are_drawn_empty(reached, capsys):
    figure = figures.engine_so_far({key: reading() for key in KEYS[:reached]})
    for axes in figure.axes:
        dashed = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_linestyle() not in ("-", "solid")]
        assert len(dashed) == 8 - reached
    assert capsys.readouterr().out == f"engine_so_far: {reached} of 8 stages, 0 with parts of yours\n"
    assert ("not reached yet" in figure.get_label()) == (reached < 8)
    style.to_png(figure)


def test_the_alt_text_reads_every_number():
    r, mine = reading(), reading()
    alt = figures.engine_so_far({"v3": r}, {"v3": mine}).get_label()
    for whose, each in (("reference", r), ("yours", mine)):
        assert f"v3 pages ({whose}): TTFT {1000 * each.ttft_s:,.0f} ms" in alt
        assert f"{each.requests_that_fit} requests fit" in alt
    assert re.search(r"7 stages are not reached yet\.$", alt)


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no stage v9"):
        figures.engine_so_far({"v9": reading()})


def test_readings_measure_every_stage_until_the_lesson_and_yours_where_there_is_a_part_of_yours():
    with LLM("random:tiny", dtype="float32") as llm:
        slots = lambda table, positions, size: table[positions // size] * size + positions % size  # noqa: E731
        reference, yours = gauges.readings(llm, "v4", own={"slot_mapping": slots})
    assert list(reference) == KEYS[:4] and list(yours) == ["v3", "v4"]
    for stage in STAGES[:4]:
        r = reference[stage.key]
        assert r.ttft_s > 0 and r.tpot_s > 0 and r.requests_that_fit == requests_that_fit(stage)
