"""What the exercise on counting is checked against: the cost of a layer, what a device can serve, a benchmark.

Each task has a file of its own; this one puts them together. Built in lesson 04.
"""

from __future__ import annotations

from minillm.course.checks.benchmarking import BENCHMARK_ITEMS, benchmark_cases, benchmark_drive, benchmark_judge
from minillm.course.checks.layer_cost import COST_ITEMS, cost_cases, cost_drive, cost_judge
from minillm.course.checks.serving_limits import LIMIT_ITEMS, limits_cases, limits_drive, limits_judge
from minillm.course.grader.task import Task

COUNTING = ("minillm.costs", "minillm.memory", "minillm.roofline", "minillm.estimate")
TIMING = ("minillm.course.timing.rounds", "minillm.course.timing.clocked", "minillm.machine")

TASKS = (
    Task(
        "ex04.1",
        "layer_cost",
        "the cost of a layer",
        11,
        COST_ITEMS,
        cost_cases,
        cost_drive,
        cost_judge,
        (*COUNTING, "minillm.course.checks.layer_cost"),
    ),
    Task(
        "ex04.2",
        "serving_limits",
        "what a device can serve",
        10,
        LIMIT_ITEMS,
        limits_cases,
        limits_drive,
        limits_judge,
        (*COUNTING, "minillm.course.checks.serving_limits"),
    ),
    Task(
        "ex04.3",
        "benchmark",
        "a benchmark that does not mislead",
        6,
        BENCHMARK_ITEMS,
        benchmark_cases,
        benchmark_drive,
        benchmark_judge,
        (*TIMING, "minillm.course.checks.benchmarking"),
    ),
)
