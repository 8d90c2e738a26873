"""A small exercise that proves the grader; the real ones are in minillm/course/checks."""
