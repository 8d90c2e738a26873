"""The fit: prices that were put in come out again, none is negative, and a real engine can be measured."""

import random

import pytest

from minillm import LLM
from minillm.cli import main
from minillm.simulator import FittedStepTime
from minillm.simulator import calibrate as calibration
from minillm.simulator.calibrate import KNOTS, calibrate, fit, measure


def shapes(rng):
    """Steps of every kind: one prompt for each knot, then prompts, chunks behind a context, decodes, and mixtures."""
    for n in KNOTS:
        yield [(n, n)], 1
    for _ in range(80):
        prompt = [(n, n + rng.choice([0, 512])) for n in [rng.randint(1, 900)] * rng.randint(0, 1)]
        decodes = [(1, rng.randint(10, 900)) for _ in range(rng.randint(0 if prompt else 1, 30))]
        yield prompt + decodes, len(decodes) + rng.randint(0, len(prompt))


def test_the_prices_that_made_the_times_are_found_again(session_seed):
    rng = random.Random(session_seed)
    heights = sorted(rng.uniform(0.001, 0.2) for _ in KNOTS)
    true = FittedStepTime(tuple(zip(KNOTS, heights, strict=True)), 2e-8, 3e-7, 4e-4)
    found = fit([(shape, true(*shape)) for shape in shapes(rng)])
    assert [height for _, height in found.knots] == pytest.approx(heights, rel=1e-4)
    assert (found.pair_s, found.row_s, found.sampled_s) == pytest.approx((2e-8, 3e-7, 4e-4), rel=1e-4)


def test_noise_never_makes_a_price_negative(session_seed):
    rng = random.Random(session_seed)
    true = FittedStepTime(tuple((knot, 0.001 * knot) for knot in KNOTS), 0.0, 0.0, 0.0)
    noisy = [(shape, true(*shape) * rng.uniform(0.7, 1.4)) for shape in shapes(rng)]
    found = fit(noisy)
    assert min(found.pair_s, found.row_s, found.sampled_s, *(height for _, height in found.knots)) >= 0


def test_a_running_engine_is_measured_and_left_as_it_was():
    with LLM("random:tiny", dtype="float32", num_kv_blocks=400) as llm:
        scheduler = llm.engine.scheduler
        measured = measure(llm, seconds=0.0)
        kinds = [shape for shape, _ in measured]
        assert ([(8, 8)], 1) in kinds and ([(32, 544)], 1) in kinds
        assert any(len(sequences) == 8 and {n for n, _ in sequences} == {1} for sequences, _ in kinds)
        assert any({n for n, _ in sequences} == {1, 57} for sequences, _ in kinds)
        assert all(seconds > 0 for _, times in measured for seconds in times)
        assert not scheduler.has_work and "schedule" not in vars(scheduler)
        scheduler.block_pool.check([])
        time = calibrate(llm, seconds=0.0)
        assert time([(64, 64)], 1) > 0 and time.assumptions["device"] == "this machine, calibrated"


def test_the_command_simulates_this_machine(monkeypatch, capsys):
    fitted = FittedStepTime(((1, 0.5), (2, 0.5)), 0.0, 0.0, 0.0)
    monkeypatch.setattr(calibration, "calibrate", lambda llm: fitted)
    here = ["simulate", "--model", "random:tiny", "--device", "here", "--num-requests", "3", "--request-rate", "0.01"]
    here += ["--input-median", "8", "--output-median", "3"]
    assert main(here) == 0
    out = capsys.readouterr().out
    assert "this machine, calibrated" in out and "500.0" in out  # TTFT of a prompt alone is one step
    assert main([*here, "--tensor-parallel-size", "2"]) == 2
    assert "drop --tensor-parallel-size" in capsys.readouterr().err
