"""Right answers to the example exercise, and notebooks made of whatever cells a test wants."""

import json

PACKAGE = "tests.grader.checks"

MASK = """\
# task: ex90.1
def causal_mask(queries, keys):
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    return columns <= rows + keys - queries
"""
COUNTER = """\
# task: ex90.2
class Counter:
    def __init__(self):
        self.words = []

    def add(self, word):
        self.words.append(word)

    def count(self, word):
        return self.words.count(word)
"""
MERGE = """\
# task: ex90.3
def merge_two(out_a, lse_a, out_b, lse_b):
    share = torch.sigmoid(lse_a - lse_b)[..., None]
    return share * out_a + (1 - share) * out_b
"""
IMPORTS = "import torch\nfrom minillm.course.grader import check"
SOLVED = (IMPORTS, MASK, 'check("ex90.1", causal_mask)', COUNTER, MERGE)


def write_notebook(path, *sources):
    """A notebook file of code cells with these sources."""
    cells = [
        {"cell_type": "code", "metadata": {}, "source": source, "execution_count": None, "outputs": []}
        for source in sources
    ]
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}), encoding="utf-8")
    return path
