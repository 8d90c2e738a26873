"""Checks and marks: `check` gives feedback in a notebook, `minillm grade` gives marks from a process of its own."""
