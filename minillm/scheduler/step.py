"""A step: what one forward pass computes, as the scheduler decided and the batch is built from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.request import Request


@dataclass
class Step:
    """What one forward pass computes. A step without `scheduled` is legal: there is nothing to compute.

    block_copies  (src, dst) pairs, to be copied before the forward. No block is the target of two copies,
                  and a source keeps its content until the forward, even if it was freed meanwhile.
    preempted     went back to the queue and lost their blocks
    ended         finished by the scheduler itself, because the whole pool could not hold one token more
    padding       rows of nobody, computed for the sake of a rectangle and thrown away: their numbers, one for
                  each sequence that was filled up
    """

    time: float = 0.0  # the reading of the clock that `schedule` was given
    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to someone."""
        return sum(n for _, n in self.scheduled)

    @property
    def num_rows(self) -> int:
        """Rows that the model computes, padding included."""
        return self.num_tokens + sum(self.padding)
