"""What the exercise on the online softmax is checked against: a vocabulary in tiles, attention in tiles, merged parts.

Each task has a file of its own; this one puts them together. Built in lesson 08.
"""

from __future__ import annotations

from minillm.course.checks.merged_parts import MERGE_ITEMS, merge_cases, merge_drive, merge_judge
from minillm.course.checks.tiled_window import TILED_ITEMS, tiled_cases, tiled_drive, tiled_judge
from minillm.course.checks.vocabulary_tiles import LOGPROB_ITEMS, logprob_cases, logprob_drive, logprob_judge
from minillm.course.grader.task import Task

READY_MADE = (
    "torch.logsumexp",
    "torch.Tensor.logsumexp",
    "torch.logaddexp",
    "torch.Tensor.logaddexp",
    "torch.log_softmax",
    "torch.Tensor.log_softmax",
    "torch.nn.functional.log_softmax",
    "torch.nn.functional.cross_entropy",
)

TASKS = (
    Task(
        "ex08.1",
        "token_logprobs",
        "a vocabulary in tiles",
        len(LOGPROB_ITEMS),
        LOGPROB_ITEMS,
        logprob_cases,
        logprob_drive,
        logprob_judge,
        READY_MADE,
    ),
    Task(
        "ex08.2",
        "flash_attention",
        "attention in tiles, window and sinks",
        len(TILED_ITEMS),
        TILED_ITEMS,
        tiled_cases,
        tiled_drive,
        tiled_judge,
        ("minillm.attention", "torch.nn.functional.scaled_dot_product_attention"),
    ),
    Task(
        "ex08.3",
        "merge",
        "merging parts, find the bugs",
        len(MERGE_ITEMS),
        MERGE_ITEMS,
        merge_cases,
        merge_drive,
        merge_judge,
        ("minillm.attention",),
    ),
)
