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

TRITON = "import torch\nimport triton\nimport triton.language as tl"
SOFTMAX = """\
# task: ex91.1
@triton.jit
def softmax_kernel(x_ptr, y_ptr, n, x_stride, y_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    x = tl.load(x_ptr + row * x_stride + columns, inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * y_stride + columns, (e / tl.sum(e, 0)).to(y_ptr.dtype.element_ty), inside)


def softmax(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    softmax_kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
"""
PRODUCT = """\
# task: ex91.2
@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    c = tl.dot(a, b)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c.to(c_ptr.dtype.element_ty))


def multiply(a, b):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    product_kernel[(1,)](a, b, c, a.shape[0], b.shape[1], a.shape[1], num_warps=4)
    return c
"""


def write_notebook(path, *sources):
    """A notebook file of code cells with these sources."""
    cells = [
        {"cell_type": "code", "metadata": {}, "source": source, "execution_count": None, "outputs": []}
        for source in sources
    ]
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}), encoding="utf-8")
    return path
