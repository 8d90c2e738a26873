"""What the exercise on the prefix cache is checked against: a block's key, the order of waiting prompts, a block pool.

Each task has a file of its own; this one puts them together. Built in lesson 07.
"""

from __future__ import annotations

from minillm.course.checks.block_key import KEY_ITEMS, key_cases, key_drive, key_judge
from minillm.course.checks.prefix_pool import POOL_ITEMS, pool_cases, pool_drive, pool_judge
from minillm.course.checks.prompt_order import ORDER_ITEMS, order_cases, order_drive, order_judge
from minillm.course.grader.task import Task

HIDES = (
    *("minillm.block_pool", "minillm.scheduler", "minillm.engine"),
    "minillm.course.engine_so_far.waiting_prompts",
)

TASKS = (
    Task(
        "ex07.1",
        "hash_block",
        "a key for a block",
        len(KEY_ITEMS),
        KEY_ITEMS,
        key_cases,
        key_drive,
        key_judge,
        HIDES,
    ),
    Task(
        "ex07.2",
        "plan_prompts",
        "prompts that wait",
        len(ORDER_ITEMS),
        ORDER_ITEMS,
        order_cases,
        order_drive,
        order_judge,
        HIDES,
    ),
    Task(
        "ex07.3",
        "PrefixPool",
        "a pool that remembers, find the bugs",
        len(POOL_ITEMS),
        POOL_ITEMS,
        pool_cases,
        pool_drive,
        pool_judge,
        HIDES,
    ),
)
