"""A guess before each measurement: it costs a line, and turns a number you read into one that you remember."""

from __future__ import annotations

from minillm.course.timing import report, show_time

CLOSE = 1.25  # a guess within this factor counts as right


def compare(guess_s: float, measured_s: float, usual: dict[str, float] | None = None) -> None:
    """Print how far a guessed time was from the measured one.

    usual  what people often guess and why: {"twice the wait at 1,024": 1.7}
    """
    if isinstance(guess_s, bool) or not isinstance(guess_s, (int, float)) or not guess_s > 0:
        raise ValueError(f"a guess is a positive number of seconds, not {guess_s!r}")
    report(f"you guessed {show_time(guess_s)}, measured {show_time(measured_s)}: {verdict(guess_s, measured_s)}")
    for reason, seconds in (usual or {}).items():
        report(f"{reason} would be {show_time(seconds)}: {verdict(seconds, measured_s)}")


def verdict(guess_s: float, measured_s: float) -> str:
    """The distance as a factor, in words."""
    factor = guess_s / measured_s
    if 1 / CLOSE <= factor <= CLOSE:
        return "close"
    return f"{factor:.1f} times too long" if factor > 1 else f"{1 / factor:.1f} times too short"
