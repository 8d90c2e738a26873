"""A claim of the article beside the arithmetic and the measurement: claim, sum, measured, verdict.

The claim and the sum are the same on every machine. What was measured, and a verdict that hangs on it, are
printed through `report`.
"""

from __future__ import annotations

from minillm.course.timing import report


def check_claim(idea: str, claim: str, sum: str, measured: str, verdict: str) -> None:
    """Print the four lines of one claim. `idea` is its number in the article: A1 to A20."""
    print(f"claim {idea}: {claim}")
    print(f"sum: {sum}")
    report(f"measured here: {measured}", f"verdict: {verdict}")
