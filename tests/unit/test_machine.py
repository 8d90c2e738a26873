"""Peaks measured in place: what is timed, how it is counted, and that it is labelled as measured."""

import pytest
import torch

from minillm import machine
from minillm.devices import DEVICES


def test_an_unknown_device_is_measured_and_says_so():
    device = machine.measure("float32", kind="cpu", seconds=0.01)
    assert device.source == "measured here" and device.name.startswith("this CPU")
    assert device.flops.keys() == {"float32"} and device.num_sms == torch.get_num_threads()
    assert 1e8 < device.peak("float32") < 1e15 and 1e8 < device.bandwidth < 1e13


def test_rates_are_counted_work_over_the_shortest_time(monkeypatch):
    monkeypatch.setattr(machine, "best_time", lambda run, kind, seconds: (run(), 0.5)[1])
    assert machine.gemm_rate("float32", "cpu") == 2 * 1024**3 / 0.5
    assert machine.copy_rate("cpu") == 2 * 2**27 / 0.5  # read once, written once


def test_the_first_two_runs_are_not_counted(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    runs = []
    assert machine.best_time(lambda: runs.append(1), "cpu", seconds=0) == 1
    assert len(runs) == 5


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA Something New"])
def test_a_known_gpu_gets_its_datasheet_and_an_unknown_one_a_measurement(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    monkeypatch.setattr(machine, "measure", lambda dtype: f"measured in {dtype}")
    expected = DEVICES["H200"] if gpu == "NVIDIA H200" else "measured in float16"
    assert machine.this_device("float16") == expected
