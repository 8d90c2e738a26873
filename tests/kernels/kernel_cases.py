"""Small launch rows, so that short inputs cover several tiles, and an oracle for any mask, in float64."""

import torch

from minillm.attention.triton import TritonAttention
from minillm.kernels.launch import LaunchRow
from tests.tolerances import ATTENTION


def small(phase="prefill", block_m=16, block_n=32, kernel="paged_attention", dtype="float32"):
    return LaunchRow(kernel, (8, 0), 256, dtype, phase, block_m, block_n, 4, 2, "small, for tests")


SMALL = {"prefill": small(block_m=32), "decode": small("decode"), "split": small("split")}


def small_body(num_splits=1, dtype=torch.float32, **rows):
    """The engine's body with small tiles."""
    return TritonAttention(dtype, "cpu", SMALL | rows, num_splits)


def run_kernel(problem, row, **options):
    """The paged kernel alone on a Ragged problem: (out, lse), NaN where this launch serves nobody."""
    from minillm.kernels.paged_attention import paged_attention

    q, _, _, layer, batch = problem.inputs
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])  # poisoned by conftest.py
    tables = (batch.block_tables, batch.query_start_loc, batch.seq_lens)
    options = {"window": layer.window} | options
    paged_attention(out, lse, q, layer.k, layer.v, *tables, row, **options)
    return out, lse


def masked_oracle(q, k, v, seen):
    """(out [n, H, D], lse [n, H]) in float64 where query i of head h sees the keys seen [n, H, S]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,shd->nhs", q, k) / q.shape[2] ** 0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("nhs,shd->nhd", weights, v), lse


def seen_with_sinks(n, num_keys, window, sinks):
    positions = torch.arange(num_keys - n, num_keys)[:, None]
    keys = torch.arange(num_keys)
    recent = positions - keys < window if window else torch.ones(n, num_keys, dtype=torch.bool)
    return (keys <= positions) & (recent | (keys < sinks))


def quantized(problem, dtype):
    """The problem's pages in 8 bits with a scale per token and head, and what they stand for put in their place."""
    layer = problem.kv_layer
    largest = 448.0 if dtype == torch.float8_e4m3fn else 127.0
    options, restored = {}, []
    for name, pages in (("k", layer.k), ("v", layer.v)):
        pages = pages.nan_to_num(0.0)
        scale = pages.abs().amax(-1).clamp(min=1e-6) / largest * (0.5 + torch.rand(pages.shape[:3]))
        codes = (pages / scale[..., None]).clamp(-largest, largest)
        codes = (codes if dtype.is_floating_point else codes.round()).to(dtype)
        restored.append(codes.float() * scale[..., None])
        options[f"{name}_scale"] = scale
        setattr(layer, name, codes)
    sequences = []
    for (q, k, _), table in zip(problem.sequences, problem.tables, strict=True):
        kv = [pages[table].flatten(0, 1)[: len(k)] for pages in restored]
        sequences.append((q, *kv))
    problem.sequences = sequences
    return options


def assert_close_to(actual, expected, dtype=torch.float32):
    """Output and LSE of one launch equal the float64 pair."""
    rtol, atol = ATTENTION[dtype]
    for ours, oracle in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), oracle, rtol=rtol, atol=atol)


class Stretched:
    """A kernel that is told other strides than its tensors have; for addresses that no test could allocate."""

    def __init__(self, kernel, **strides):
        self.kernel, self.strides = kernel, strides

    def __getitem__(self, grid):
        def launch(*args, **options):
            names = self.kernel.arg_names[: len(args)]
            self.kernel[grid](*map(self.strides.get, names, args), **options)

        return launch
