"""Random attention problems for the tests, and the float64 oracle that they are compared with.

The oracle follows the definition row by row and shares no code with the bodies: the row at position p of a
context sees the keys max(0, p - window + 1) .. p. Pages, unused blocks and the rows past a context are NaN.
Also here: values and memory layouts on which wrong kernels have been seen to pass or fail.
"""

from dataclasses import dataclass, field

import torch

from minillm.batch import Batch
from minillm.kv_cache import KVLayer
from tests.tolerances import ATTENTION

NAN = float("nan")


def oracle(q, k, v, window=None):
    """(out [n, H, D], lse [n, H]) in float64 for queries that end the keys [S, Hkv, D]."""
    q, k, v = q.double(), k.double(), v.double()
    n, num_heads, head_size = q.shape
    group = num_heads // k.shape[1]
    kv_head = [h // group for h in range(num_heads)]
    out, lse = torch.zeros_like(q), torch.full((n, num_heads), -torch.inf, dtype=torch.float64)
    for row in range(n):
        position = k.shape[0] - n + row
        first = 0 if window is None else max(0, position - window + 1)
        if position < 0:
            continue
        keys, values = (x[first : position + 1][:, kv_head] for x in (k, v))  # [seen, H, D]
        scores = (q[row] * keys).sum(-1) / head_size**0.5  # [seen, H]
        weights = (scores - scores.max(0).values).exp()
        out[row] = (weights[..., None] * values).sum(0) / weights.sum(0)[:, None]
        lse[row] = scores.max(0).values + weights.sum(0).log()
    assert out.isfinite().all(), "the reference itself must be finite"
    return out, lse


def random_sequence(n, num_keys, heads=4, kv_heads=2, head_size=16, dtype=torch.float32):
    """q [n, H, D], k and v [S, Hkv, D]."""
    q = torch.randn(n, heads, head_size, dtype=torch.float64).to(dtype)
    k, v = (torch.randn(num_keys, kv_heads, head_size, dtype=torch.float64).to(dtype) for _ in range(2))
    return q, k, v


def rising(q, k, v):
    """Scores grow with the position, by about 60 in all: the running maximum changes in every tile."""
    steps = torch.linspace(0, 60, len(k))[:, None, None]
    direction = torch.ones(q.shape[-1])
    q = direction + 0.05 * q
    return q, steps * direction / q.shape[-1] ** 0.5 + 0.05 * k, v


def deep(q, k, v):
    """All scores near -200: exp of any of them is 0 in float32.

    float32 rounds such a score by up to 1.5e-5 and the probabilities with it; small values keep the output's
    error within the tolerance for scores of ordinary size.
    """
    direction = torch.ones(q.shape[-1])
    return direction + 0.01 * q, -200 / q.shape[-1] ** 0.5 * direction + 0.01 * k, 0.1 * v


def equal(q, k, v):
    """All keys equal: the output is the mean of the visible values."""
    return q, k[:1].expand_as(k).clone(), v


def inside_nan(x):
    """The same values as an interior slice of a larger buffer of NaN."""
    buffer = torch.full([size + 3 for size in x.shape], NAN, dtype=x.dtype)
    inner = buffer[tuple(slice(1, size + 1) for size in x.shape)]
    return inner.copy_(x)


def transposed(x):
    """The same values with the rows as the fastest axis in memory."""
    return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)


@dataclass
class Ragged:
    """Sequences as one step: the flat inputs of the contract, and the sequences to compare with."""

    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # q [n, H, D], k, v [S, Hkv, D]
    window: int | None = None
    block_size: int = 16
    kv_layer: KVLayer = field(init=False)
    batch: Batch = field(init=False)

    def __post_init__(self):
        _, k, _ = self.sequences[0]
        needed = [-(-len(keys) // self.block_size) for _, keys, _ in self.sequences]
        num_blocks = sum(needed) + 3  # three more than are used
        free = torch.randperm(num_blocks).tolist()
        self.tables = [[free.pop() for _ in range(count)] for count in needed]
        pages = torch.full((2, num_blocks, self.block_size, *k.shape[1:]), NAN, dtype=k.dtype)
        self.kv_layer = KVLayer(pages[0], pages[1], self.window)
        tokens = [[0] * len(q) for q, _, _ in self.sequences]
        contexts = [len(keys) for _, keys, _ in self.sequences]
        self.batch = Batch.build(tokens, contexts, self.tables, self.block_size)
        for (_, keys, values), table in zip(self.sequences, self.tables, strict=True):
            position = torch.arange(len(keys))
            slots = torch.tensor(table)[position // self.block_size] * self.block_size + position % self.block_size
            self.kv_layer.write(keys, values, slots)
        self.q = torch.cat([q for q, _, _ in self.sequences])
        self.k = torch.cat([keys[len(keys) - len(q) :] for q, keys, _ in self.sequences])
        self.v = torch.cat([values[len(values) - len(q) :] for q, _, values in self.sequences])

    @property
    def inputs(self):
        return self.q, self.k, self.v, self.kv_layer, self.batch

    def expected(self):
        results = [oracle(q, k, v, self.window) for q, k, v in self.sequences]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def assert_close(actual, expected, dtype):
    rtol, atol = ATTENTION[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


def check(attend, problem, dtype=torch.float32):
    """The body's output and log-sum-exp equal the oracle's, and its two entrances agree."""
    out, lse = attend.attend_with_lse(*problem.inputs)
    expected, expected_lse = problem.expected()
    assert out.dtype == dtype
    assert_close(out, expected, dtype)
    assert_close(lse, expected_lse, dtype)
    torch.testing.assert_close(attend(*problem.inputs), out, rtol=0, atol=0)
