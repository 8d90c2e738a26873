"""Where the time of a step goes, by kind of work. Opt-in: without it the model runs through `NO_PARTS`,
which hands out one shared do-nothing context.

    with parts("attention"):
        ...

Parts never nest. On a GPU the clock must wait for the device first, so profiled steps are slower than
unprofiled ones; the remainder `other` shows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext

PART_NAMES = ("linear", "attention", "kv_write", "lm_head", "sample")
"""What the engine measures. `linear` holds every projection with its norm, RoPE and activation."""

_NOTHING = nullcontext()


def NO_PARTS(name: str) -> AbstractContextManager:
    """The profiler that is off."""
    return _NOTHING


class Parts:
    """Adds up the time spent in each part.

    clock  returns a number that grows; seconds in the engine, counted operations in tests
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str):
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[name] += self.clock() - start
