"""Checks and marks: `check` gives feedback in a notebook, `minillm grade` gives marks from a process of its own."""

__all__ = ["check"]


def __getattr__(name: str):
    """`check`, loaded when it is first used: a learner's process cuts itself off before PyTorch is loaded."""
    if name == "check":
        from minillm.course.grader.feedback import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
