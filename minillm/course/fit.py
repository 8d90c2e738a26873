"""Three terms under a curve: seconds = a + b n + c n^2, none of them negative.

a is what every request pays, b n the work that each token brings alone, c n^2 the work between pairs of
tokens. The fit makes relative errors small, so that 50 ms at a short prompt count as much as 2 s at a long one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class Growth:
    """seconds(n) = a + b n + c n^2."""

    a: float
    b: float
    c: float

    def terms(self, n):
        """(a, b n, c n^2), for a number or an array."""
        return self.a + 0 * n, self.b * n, self.c * n * n

    def seconds(self, n):
        return sum(self.terms(n))

    def shares(self, n: float) -> tuple[float, float, float]:
        """The three terms at n as shares of their sum."""
        return tuple(term / self.seconds(n) for term in self.terms(n))


def fit_growth(seconds: Mapping[int, float]) -> Growth:
    """The Growth with the least squared relative error to {n: seconds}; three lengths are the least.

    Non-negative least squares by trying each choice of terms: with three terms there are seven.
    """
    n, t = np.array(list(seconds), float), np.array(list(seconds.values()), float)
    if len(n) < 3:
        raise ValueError(f"three terms cannot be told apart from {len(n)} lengths; measure three or more")
    if (n <= 0).any() or (t <= 0).any():
        raise ValueError("lengths and seconds must be positive")
    columns = np.stack([np.ones_like(n), n, n * n], axis=1) / t[:, None]
    best, least = np.zeros(3), np.inf
    for used in (list(c) for size in (1, 2, 3) for c in combinations(range(3), size)):
        solution = np.linalg.lstsq(columns[:, used], np.ones_like(n), rcond=None)[0]
        error = np.square(columns[:, used] @ solution - 1).sum()
        if (solution >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[used] = solution
    return Growth(*best.tolist())
