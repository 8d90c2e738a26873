"""Points of the roofline: counted work over measured seconds, and an engine's attention run on its own."""

import random

import pytest

from minillm import costs
from minillm.course import roofline_points, timing
from minillm.devices import DEVICES, Device
from tests.unit.engines import make_engine


def test_a_step_stands_at_its_counted_intensity(tiny):
    config, step = tiny[0].config, [(1, random.randrange(1, 90)) for _ in range(5)]
    point = roofline_points.step_point("batch 5", config, step, 0.25, 4)
    assert point.intensity == costs.intensity(config, step, 4)
    assert point.flops == 4 * costs.step_flops(config, step)


def test_attention_alone_runs_every_layer_over_the_whole_context(tiny, monkeypatch):
    engine, calls = make_engine(tiny), []
    attend = engine.attend
    engine.attend = lambda q, k, v, layer, batch: (calls.append(batch), attend(q, k, v, layer, batch))[1]
    monkeypatch.setattr(
        roofline_points, "rounds", lambda run, cases, repeats: (run(3), {3: timing.Timing((0.5, 0.2))})[1]
    )
    point = roofline_points.attention_point(engine, batch=3, context=50)
    assert len(calls) == 2 and calls[0].context_lens == [50] * 3
    tables = calls[0].block_tables.flatten().tolist()
    assert len(set(tables)) == 3 * 4, "each request reads pages of its own, so no cache helps"
    assert point.flops == 2 * 4 * 4 * 16 * 50 * 3 / 0.2  # layers, 4 FLOPs, H x D, context, batch
    assert point.intensity == pytest.approx(4 * 4 * 16 * 50 / (2 * 2 * 16 * 51 * 4))


@pytest.mark.parametrize(("name", "second"), [("NVIDIA H200", "H200"), ("this CPU", "A100-80GB")])
def test_the_second_roof_is_the_datasheet_of_this_gpu_or_one_to_compare_with(name, second):
    here = Device(name, (9, 0), {"bfloat16": 7e14}, 4e12, 1e11, 132, 0, "measured here")
    measured, sheet = roofline_points.roofs(here, "bfloat16")
    assert measured.measured and measured.flops == 7e14 and measured.bandwidth == 4e12
    assert not sheet.measured and sheet.name == second and sheet.flops == DEVICES[second].peak()
