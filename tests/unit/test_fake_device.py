"""The virtual device does each of the things that mislead a benchmark, when asked to and only then."""

import random
import statistics

import pytest

from minillm.course.fake_device import CACHED, CACHED_INPUTS, LAUNCH_S, FakeDevice


@pytest.fixture
def seed():
    return random.randrange(2**31)


@pytest.fixture
def true_s():
    return random.uniform(1e-4, 1e-2)


def timed(device, kernel, input=None, wait=True):
    device.synchronize()
    start = device.clock()
    kernel(device.fresh_input() if input is None else input)
    if wait:
        device.synchronize()
    return device.clock() - start


def test_the_clock_stands_still_until_something_happens(seed):
    device = FakeDevice(seed)
    kernel = device.kernel(0.1)
    device.fresh_input()
    device.synchronize()
    assert device.clock() == device.clock() == 0
    assert device.launches == 0
    kernel(device.fresh_input())
    assert device.launches == 1


def test_a_launch_returns_at_once_and_synchronize_waits(seed, true_s):
    device = FakeDevice(seed, jitter=0)
    kernel = device.kernel(true_s)
    assert timed(device, kernel, wait=False) == pytest.approx(LAUNCH_S)
    assert timed(device, kernel) == pytest.approx(LAUNCH_S + true_s)


def test_launches_queue_up_behind_each_other(seed, true_s):
    device = FakeDevice(seed, jitter=0)
    kernel = device.kernel(true_s)
    for _ in range(10):
        kernel(device.fresh_input())
    assert device.clock() == pytest.approx(10 * LAUNCH_S)
    device.synchronize()
    assert device.clock() == pytest.approx(LAUNCH_S + 10 * true_s)


def test_a_device_that_is_not_asynchronous_waits_by_itself(seed, true_s):
    device = FakeDevice(seed, asynchronous=False, jitter=0)
    assert timed(device, device.kernel(true_s), wait=False) == pytest.approx(LAUNCH_S + true_s)


def test_the_first_call_of_each_kernel_compiles(seed, true_s):
    device = FakeDevice(seed, compile_s=1.5, jitter=0)
    for kernel in (device.kernel(true_s), device.kernel(true_s)):
        assert timed(device, kernel) == pytest.approx(1.5 + LAUNCH_S + true_s)
        assert timed(device, kernel) == pytest.approx(LAUNCH_S + true_s)


def test_an_input_seen_a_moment_ago_is_faster_until_others_push_it_out(seed, true_s):
    device = FakeDevice(seed, caching=True, jitter=0)
    kernel, input = device.kernel(true_s), device.fresh_input()
    cold, warm = LAUNCH_S + true_s, LAUNCH_S + CACHED * true_s
    assert timed(device, kernel, input) == pytest.approx(cold)
    assert timed(device, kernel, input) == pytest.approx(warm)
    for _ in range(CACHED_INPUTS):
        assert timed(device, kernel) == pytest.approx(cold)
    assert timed(device, kernel, input) == pytest.approx(cold)


def test_without_caching_every_input_is_as_slow(seed, true_s):
    device = FakeDevice(seed, jitter=0)
    kernel, input = device.kernel(true_s), device.fresh_input()
    assert timed(device, kernel, input) == pytest.approx(timed(device, kernel, input))


def test_times_scatter_around_the_truth_and_outliers_lie_far_above(seed, true_s):
    device = FakeDevice(seed, jitter=0.1, outliers=0.2)
    kernel = device.kernel(true_s)
    runs = [timed(device, kernel) - LAUNCH_S for _ in range(2000)]
    ordinary = [run for run in runs if run < 2 * true_s]
    assert 0.15 < 1 - len(ordinary) / len(runs) < 0.25
    assert statistics.median(ordinary) == pytest.approx(true_s, rel=0.02)
    assert statistics.stdev(ordinary) == pytest.approx(0.1 * true_s, rel=0.1)


def test_a_seed_repeats_every_time(seed):
    def runs(seed):
        device = FakeDevice(seed, jitter=0.2, outliers=0.1)
        kernel = device.kernel(0.001)
        return [timed(device, kernel) for _ in range(20)]

    assert runs(seed) == runs(seed) != runs(seed + 1)


def test_a_fresh_input_may_still_be_in_the_making_when_a_run_is_launched(seed, true_s):
    for asynchronous in (True, False):
        device = FakeDevice(seed, asynchronous=asynchronous, jitter=0, input_s=true_s / 2)
        assert timed(device, device.kernel(true_s)) == pytest.approx(true_s * 3 / 2, rel=0.01)
        start = device.clock()
        device.fresh_input()
        assert device.clock() == start
        device.synchronize()
        assert device.clock() == pytest.approx(start + true_s / 2)
