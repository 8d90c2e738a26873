"""A claim of the article beside the arithmetic and the measurement: claim, sum, measured, verdict.

The claim and the sum are the same on every machine. What was measured, and a verdict that hangs on it, are
printed through `report`; where counting settles a claim, nothing is measured and the verdict is the same everywhere.
"""

from __future__ import annotations

from minillm.course.timing import report

IDEAS = [f"A{number}" for number in range(1, 21)]


def check_claim(idea: str, claim: str, sum: str, measured: str | None = None, verdict: str = "") -> None:
    """Print the lines of one claim. `idea` is its number in the article: A1 to A20.

    measured  what was found on this machine; None where the sum alone decides
    """
    if idea not in IDEAS:
        raise ValueError(f"the article has no idea {idea!r}; its ideas are A1 to A20")
    if not verdict:
        raise ValueError(f"claim {idea} needs a verdict: holds, does not hold, or where it holds")
    print(f"claim {idea}: {claim}")
    print(f"sum: {sum}")
    if measured is None:
        print(f"verdict: {verdict}")
    else:
        report(f"measured here: {measured}", f"verdict: {verdict}")
