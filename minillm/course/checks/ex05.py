"""What the exercise on the KV cache is checked against: a cache of one sequence, attention against it, a conversation.

Each task has a file of its own; this one puts them together. Built in lesson 05.
"""

from __future__ import annotations

from minillm.course.checks.conversation_calls import TALK_ITEMS, talk_cases, talk_drive, talk_judge
from minillm.course.checks.look_back import LOOK_ITEMS, look_cases, look_drive, look_judge
from minillm.course.checks.sequence_cache import CACHE_ITEMS, cache_cases, cache_drive, cache_judge
from minillm.course.grader.task import Task

HIDES = ("minillm.kv_cache", "minillm.attention", "minillm.course.engine_so_far.conversation")

TASKS = (
    Task(
        "ex05.1",
        "SequenceCache",
        "a cache of one sequence",
        len(CACHE_ITEMS),
        CACHE_ITEMS,
        cache_cases,
        cache_drive,
        cache_judge,
        HIDES,
    ),
    Task(
        "ex05.2",
        "look_back",
        "new tokens against the cache",
        len(LOOK_ITEMS),
        LOOK_ITEMS,
        look_cases,
        look_drive,
        look_judge,
        (*HIDES, "torch.nn.functional.scaled_dot_product_attention"),
    ),
    Task(
        "ex05.3",
        "converse",
        "a conversation, find the bugs",
        len(TALK_ITEMS),
        TALK_ITEMS,
        talk_cases,
        talk_drive,
        talk_judge,
        (*HIDES, "minillm.engine", "minillm.scheduler"),
    ),
)
