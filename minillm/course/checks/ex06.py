"""What the exercise on pages is checked against: a pool that texts share, a step over pages, the runs of a chunk.

Each task has a file of its own; this one puts them together. Built in lesson 06.
"""

from __future__ import annotations

from minillm.course.checks.paged_step import STEP_ITEMS, step_cases, step_drive, step_judge
from minillm.course.checks.shared_pages import PAGES_ITEMS, pages_cases, pages_drive, pages_judge
from minillm.course.checks.slot_runs import RUN_ITEMS, run_cases, run_drive, run_judge
from minillm.course.grader.task import Task

HIDES = ("minillm.block_pool", "minillm.kv_cache", "minillm.batch", "minillm.course.engine_so_far.branches")

TASKS = (
    Task(
        "ex06.1",
        "SharedPages",
        "pages that texts share",
        len(PAGES_ITEMS),
        PAGES_ITEMS,
        pages_cases,
        pages_drive,
        pages_judge,
        HIDES,
    ),
    Task(
        "ex06.2",
        "decode_pages",
        "one step over pages",
        len(STEP_ITEMS),
        STEP_ITEMS,
        step_cases,
        step_drive,
        step_judge,
        (*HIDES, "minillm.attention", "torch.nn.functional.scaled_dot_product_attention"),
    ),
    Task(
        "ex06.3",
        "slot_runs",
        "the rows of a chunk, find the bugs",
        len(RUN_ITEMS),
        RUN_ITEMS,
        run_cases,
        run_drive,
        run_judge,
        HIDES,
    ),
)
