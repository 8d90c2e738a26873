"""Checks and marks: `check` gives feedback in a notebook, `minillm grade` gives marks from a process of its own."""

from minillm.course.grader.feedback import check

__all__ = ["check"]
