"""What the exercise on the block is checked against: RMSNorm, the rotation of pairs, one layer's forward pass.

Each task has a file of its own; this one puts them together. Built in lesson 03.
"""

from __future__ import annotations

from minillm.course.checks.layer import BLOCK_ITEMS, block_cases, block_drive, block_judge
from minillm.course.checks.root_mean_square import NORM_ITEMS, norm_cases, norm_drive, norm_judge
from minillm.course.checks.rotation import ROTATE_ITEMS, rotate_cases, rotate_drive, rotate_judge
from minillm.course.grader.task import Task

HIDES = (
    "minillm.norm",
    "minillm.rope",
    "minillm.model",
    "minillm.ops",
    "minillm.course.engine_so_far.textbook",
    "torch.nn.functional.rms_norm",
    "torch.rms_norm",
)

TASKS = (
    Task("ex03.1", "rms_norm", "RMSNorm", len(NORM_ITEMS), NORM_ITEMS, norm_cases, norm_drive, norm_judge, HIDES),
    Task(
        "ex03.2",
        "rotate",
        "RoPE, find the bugs",
        len(ROTATE_ITEMS),
        ROTATE_ITEMS,
        rotate_cases,
        rotate_drive,
        rotate_judge,
        HIDES,
    ),
    Task("ex03.3", "block", "one layer", len(BLOCK_ITEMS), BLOCK_ITEMS, block_cases, block_drive, block_judge, HIDES),
)
