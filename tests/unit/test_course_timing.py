"""Timing on a clock that the test turns itself, and the mark that keeps measured lines out of comparisons."""

import configparser
import random
import re
from pathlib import Path

import pytest

from minillm.course import claims, guess, setup, timing
from minillm.course.fit import Growth, fit_growth
from minillm.course.timing import Timing

CFG = Path(timing.__file__).parent / "build" / "nbval_sanitize.cfg"


class Clock:
    """Seconds that pass only when `work` is called."""

    def __init__(self):
        self.now = random.uniform(0, 1000)
        self.events = []

    def __call__(self):
        self.events.append("read")
        return self.now

    def work(self, seconds):
        self.events.append("work")
        self.now += seconds


def test_clocked_returns_the_seconds_of_the_run_and_nothing_else():
    clock = Clock()
    seconds_of = timing.clocked(clock.work, clock=clock)
    for seconds in (0.5, 0.0, random.uniform(0, 9)):
        assert seconds_of(seconds) == pytest.approx(seconds)


def test_clocked_waits_for_the_device_before_each_look_at_the_clock():
    clock = Clock()
    timing.clocked(clock.work, lambda: clock.events.append("wait"), clock)(1.0)
    assert clock.events == ["wait", "read", "work", "wait", "read"]


def test_work_that_runs_behind_the_program_is_counted_to_its_end():
    clock, pending = Clock(), []

    def finish():
        while pending:
            clock.work(pending.pop())

    pending.append(100.0)  # left over from before: not ours
    assert timing.clocked(pending.append, finish, clock)(0.25) == pytest.approx(0.25)


def test_rounds_take_turns_and_throw_the_warm_up_away():
    calls = []

    def seconds_of(case):
        calls.append(case)
        return 100.0 if len(calls) <= 4 else float(len(calls))

    runs = timing.rounds(seconds_of, ["a", "b"], repeats=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert runs == {"a": Timing((5.0, 7.0, 9.0)), "b": Timing((6.0, 8.0, 10.0))}


@pytest.mark.parametrize("options", [{"repeats": 0}, {"warmup": -1}])
def test_nothing_to_measure_is_refused(options):
    with pytest.raises(ValueError, match="nothing to measure"):
        timing.rounds(float, [1], **options)
    with pytest.raises(ValueError, match="0 cases"):
        timing.rounds(float, [])


def test_the_median_of_a_timing_ignores_one_slow_run():
    slow = Timing((1.0, 1.1, 50.0, 0.9, 1.0))
    assert (slow.median, slow.low, slow.high) == (1.0, 0.9, 50.0)
    assert str(slow) == "1.00 s (900 ms to 50.0 s)"


def test_a_ratio_compares_runs_of_the_same_round():
    """The machine gets slower and slower; b always takes a third of a."""
    speed = [random.uniform(1, 1000) for _ in range(7)]
    a, b = Timing(tuple(3 * s for s in speed)), Timing(tuple(speed))
    assert timing.ratio(a, b) == pytest.approx(3)


@pytest.mark.parametrize(
    "seconds, text",
    [(12.34, "12.3 s"), (1.934, "1.93 s"), (0.0562, "56.2 ms"), (1.0, "1.00 s"), (0.00087, "870 us"), (0.4, "400 ms")],
)
def test_times_are_shown_with_three_digits(seconds, text):
    assert timing.show_time(seconds) == text


def test_a_time_too_small_for_the_last_unit_is_still_shown_in_it():
    assert timing.show_time(2e-8) == "0.02 us"


@pytest.mark.parametrize("gigabytes, model", [(15.8, "1b"), (23.7, "3b"), (42.4, "3b"), (79.6, "8b"), (150.0, "8b")])
def test_a_gpu_is_timed_with_a_model_of_its_size(gigabytes, model):
    assert timing.timing_model(gigabytes) == f"random:{model}"


# ---- what is printed -----------------------------------------------------------------------------


def sanitized(text):
    """`text` as nbval compares it."""
    rules = configparser.RawConfigParser()
    rules.read(CFG, encoding="utf-8")
    for section in rules.sections():
        text = re.sub(rules.get(section, "regex"), rules.get(section, "replace"), text)
    return text


def test_two_machines_print_the_same_after_sanitizing(capsys):
    """Everything that depends on a measurement differs between the runs; what is compared does not."""
    outputs = []
    for slowness in (1.0, random.uniform(2, 1e6)):
        timing.report(f"{slowness} s", f"first\nsecond {slowness}")
        guess.compare(3.0, 2.0 * slowness, {"twice": 2.5})
        claims.check_claim("A1", "claim", sum="1 + 1", measured=f"{slowness}", verdict=f"{slowness > 1}")
        setup.start("00", "the wait")
        outputs.append(capsys.readouterr().out)
    assert outputs[0] != outputs[1]
    assert sanitized(outputs[0]) == sanitized(outputs[1])
    strict = [line for line in sanitized(outputs[0]).splitlines() if line != "~ measured"]
    assert strict == ["claim A1: claim", "sum: 1 + 1", "lesson 00, the wait: ready"]


def test_starting_a_lesson_again_draws_the_same_numbers(capsys):
    drawn = []
    for _ in range(2):
        setup.start("00", "the wait")
        drawn.append(random.random())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "guessed, measured, words",
    [(2.0, 1.0, "2.0 times too long"), (1.0, 4.0, "4.0 times too short"), (1.2, 1.0, "close"), (0.9, 1.0, "close")],
)
def test_a_guess_is_judged_by_its_factor(guessed, measured, words):
    assert guess.verdict(guessed, measured) == words


@pytest.mark.parametrize("value", [0, -1.0, None, "2 s", True, float("nan")])
def test_a_guess_that_is_no_time_is_refused_by_value(value):
    with pytest.raises(ValueError, match=f"not {re.escape(repr(value))}"):
        guess.compare(value, 1.0)


# ---- the fit -------------------------------------------------------------------------------------


def test_the_fit_finds_the_three_terms_it_was_given():
    true = Growth(random.uniform(0.01, 0.1), random.uniform(1e-4, 1e-3), random.uniform(1e-8, 1e-6))
    found = fit_growth({n: true.seconds(n) for n in (32, 64, 128, 512, 1024, 2048)})
    assert (found.a, found.b, found.c) == pytest.approx((true.a, true.b, true.c), rel=1e-6)
    assert sum(found.shares(777)) == pytest.approx(1)
    assert found.shares(10**9)[2] > 0.99


def test_the_fit_never_takes_away_time():
    """A curve that flattens out would need a negative square."""
    found = fit_growth({n: n**0.5 for n in (10, 100, 1000, 10_000)})
    assert min(found.a, found.b, found.c) >= 0
    assert found.c == 0


def test_short_prompts_count_as_much_as_long_ones():
    """Times 10% off at random: each fitted point stays near its measured one, the short ones too."""
    true = Growth(0.05, 0.0007, 2e-7)
    noisy = {n: true.seconds(n) * random.uniform(0.95, 1.05) for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)}
    found = fit_growth(noisy)
    assert all(abs(found.seconds(n) / seconds - 1) < 0.15 for n, seconds in noisy.items())


def test_two_lengths_are_too_few_and_no_time_is_zero():
    with pytest.raises(ValueError, match="2 lengths"):
        fit_growth({1: 1.0, 2: 2.0})
    with pytest.raises(ValueError, match="positive"):
        fit_growth({1: 1.0, 2: 0.0, 3: 1.0})
