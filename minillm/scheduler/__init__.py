"""Which request computes how many tokens in the next step.

`books.py` keeps the books that every policy shares, `base.py` has the moves of which a policy makes its `plan`,
`align.py` lets a step fill whole tiles. From the foot of the ladder up: `static`, `iteration`, `prefill_first`,
`chunked` (the default), and three strategies for prefill: `similar_length`, `interleaved`, `speculative_prefill`. A
scheduler sees token counts and block numbers, never tensors, and knows no clock but the time it is given, so the
simulator and the tests drive the very same objects as the engine. Built in lessons 12 and 13.
"""

from __future__ import annotations

from minillm.block_pool import BlockPool
from minillm.config import EngineConfig
from minillm.scheduler.base import Scheduler
from minillm.scheduler.chunked import ChunkedScheduler
from minillm.scheduler.interleaved import InterleavedScheduler
from minillm.scheduler.iteration import IterationScheduler
from minillm.scheduler.predictors import Conversations, FrequentPrefixes, Predictor
from minillm.scheduler.prefill_first import PrefillFirstScheduler
from minillm.scheduler.similar_length import SimilarLengthScheduler
from minillm.scheduler.speculative_prefill import SpeculativePrefillScheduler
from minillm.scheduler.static import StaticScheduler
from minillm.scheduler.step import Step

__all__ = [
    "POLICIES",
    "ChunkedScheduler",
    "Conversations",
    "FrequentPrefixes",
    "InterleavedScheduler",
    "IterationScheduler",
    "Predictor",
    "PrefillFirstScheduler",
    "Scheduler",
    "SimilarLengthScheduler",
    "SpeculativePrefillScheduler",
    "StaticScheduler",
    "Step",
    "make_scheduler",
]


POLICIES: dict[str, type[Scheduler]] = {
    "static": StaticScheduler,
    "iteration": IterationScheduler,
    "prefill_first": PrefillFirstScheduler,
    "chunked": ChunkedScheduler,
    "similar_length": SimilarLengthScheduler,
    "interleaved": InterleavedScheduler,
    "speculative_prefill": SpeculativePrefillScheduler,
}


def make_scheduler(config: EngineConfig, block_pool: BlockPool, max_model_len: int) -> Scheduler:
    """The scheduler that `config.scheduling_policy` names."""
    return POLICIES[config.scheduling_policy](config, block_pool, max_model_len)
