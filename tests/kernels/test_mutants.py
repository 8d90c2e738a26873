"""Wrong kernels: each is the real source with one slip, and the hard cases below have to notice it.

A slip that random square inputs do not show is the rule rather than the exception; these cases are the short list
that shows them all, and the same cases pass on the kernels as they are.
"""

import importlib.util
import sys

import pytest
import torch

from minillm.attention.triton import attention
from minillm.kernels import flash, paged_attention, split_kv
from tests.kernels.kernel_cases import (
    assert_close_to,
    masked_oracle,
    quantized,
    run_kernel,
    seen_with_sinks,
    small,
    small_body,
)
from tests.kernels.memory import MemoryGuard
from tests.unit.attention_cases import Ragged, check, deep, inside_nan, oracle, random_sequence, rising

FILES = {"flash": flash, "paged_attention": paged_attention, "split_kv": split_kv}  # in the order of their imports


def dense(guard):
    for n, num_keys in [(17, 50), (20, 20), (3, 17)]:  # the first query of the last one stands at position 14
        sequence = tuple(inside_nan(x) for x in rising(*random_sequence(n, num_keys, heads=6)))
        guard.watch(*sequence)
        assert_close_to(attention(*sequence, row=small(kernel="flash", block_n=16)), oracle(*sequence))


def paged(guard, kind=rising, window=None, num_splits=1, lengths=((17, 50), (20, 20), (1, 33), (6, 20)), block_n=16):
    rows = {phase: small(phase, block_n=block_n) for phase in ("prefill", "decode", "split")}
    problem = Ragged([kind(*random_sequence(n, context, heads=6)) for n, context in lengths], window)
    watch(guard, problem)
    check(small_body(num_splits, **rows), problem)


def wide_tiles(guard):
    paged(guard, lengths=((3, 33), (17, 20)), block_n=64)


def split(guard):
    for kind in (deep, rising):
        paged(guard, kind, num_splits=3, lengths=((1, 65), (2, 20)))


def windowed(guard):
    for window in (5, 20):
        paged(guard, lambda *sequence: sequence, window, lengths=((17, 50), (1, 60)))


def sinks(guard):
    sequence = random_sequence(17, 90)
    problem = Ragged([sequence], window=20)
    watch(guard, problem)
    expected = masked_oracle(*sequence, seen_with_sinks(17, 90, 20, 4)[:, None])
    assert_close_to(run_kernel(problem, small(block_n=16), sinks=4), expected)


def eight_bits(guard):
    problem = Ragged([random_sequence(17, 40)])
    options = quantized(problem, torch.int8)
    watch(guard, problem)
    guard.watch(*options.values())
    assert_close_to(run_kernel(problem, small(block_n=16), **options), problem.expected())


def watch(guard, problem):
    _, _, _, layer, batch = problem.inputs
    guard.watch(problem.q, layer.k, layer.v, batch.block_tables, batch.query_start_loc, batch.seq_lens)


CASES = [dense, paged, wide_tiles, split, windowed, sinks, eight_bits]

# slip, the case that must notice it, file, right text, wrong text
MUTANTS = [
    ("causal, one key too few", dense, "flash", "keys[None, :] <= positions", "keys[None, :] < positions"),
    ("causal, one key too many", dense, "flash", "keys[None, :] <= positions", "keys[None, :] - 1 <= positions"),
    ("a full tile too many", dense, "flash", "first_position + 1, 0)", "first_position + 2, 0)"),
    ("top-left mask", dense, "flash", "positions = rows + num_keys - num_queries", "positions = rows"),
    ("output not rescaled", dense, "flash", "v, o_i * shrink[:, None]", "v, o_i"),
    ("sum not rescaled", dense, "flash", "l_i = l_i * shrink", "l_i = l_i"),
    ("wrong K/V head", dense, "flash", "kv_head = head // (H // HKV)", "kv_head = head % HKV"),
    ("tail read without a mask", dense, "flash", ", mask=keys[:, None] < num_keys, other=0.0", ""),
    ("tail of the queries stored", dense, "flash", "o_i, mask=rows[:, None] < num_queries", "o_i"),
    ("output not rescaled, paged", paged, "flash", "v, o_i * shrink[:, None]", "v, o_i"),
    ("causal, one key too few, paged", paged, "paged_attention", "seen = distance >= 0", "seen = distance > 0"),
    ("causal, one key too many, paged", paged, "paged_attention", "seen = distance >= 0", "seen = distance >= -1"),
    ("a full tile too many, paged", paged, "paged_attention", "first_position + 1, 0)", "first_position + 2, 0)"),
    ("top-left mask, paged", paged, "paged_attention", "seq_len - num_queries + query\n", "query\n"),
    ("wrong K/V head, paged", paged, "paged_attention", "kv_head * G + rows % G", "rows % G * HKV + kv_head"),
    ("keys after the last one", wide_tiles, "paged_attention", "readable = keys < end", "readable = keys < end + 1"),
    ("block table past its end", wide_tiles, "paged_attention", "SIZE, readable, MASKED", "SIZE, readable, False"),
    ("padded rows stored", paged, "paged_attention", "exists = (rows < QUERIES * G) & (query", "exists = (query"),
    ("window of W + 1", windowed, "paged_attention", "distance < WINDOW", "distance <= WINDOW"),
    ("window begins a tile late", windowed, "paged_attention", "position - WINDOW + 1", "position - WINDOW + 17"),
    ("sinks forgotten in the mask", sinks, "paged_attention", "| (keys < SINKS)[None, :]", ""),
    ("one tile of sinks too few", sinks, "paged_attention", "tl.cdiv(SINKS, BLOCK_N)", "(SINKS // BLOCK_N)"),
    ("merge without the maximum", split, "split_kv", ", 0.0, highest)", ", 0.0, 0.0)"),
    ("splits that overlap", split, "paged_attention", "(first_step + share", "(first_step + share + 1"),
    ("part of another request", split, "split_kv", "splits * num_requests + request", "splits * num_requests"),
    ("scale of the keys for the values", eight_bits, "paged_attention", "load(v_scale_ptr", "load(k_scale_ptr"),
    ("scale of another head", eight_bits, "paged_attention", "* HKV + kv_head\n", "* HKV\n"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_kernels_pass_every_case(case, monkeypatch):
    guard = MemoryGuard(monkeypatch)
    case(guard)
    assert not guard.outside


@pytest.mark.parametrize("slip, case, file, right, wrong", MUTANTS, ids=[mutant[0] for mutant in MUTANTS])
def test_a_kernel_with_one_slip_is_noticed(slip, case, file, right, wrong, monkeypatch, tmp_path):
    for name, module in FILES.items():
        monkeypatch.setitem(
            sys.modules, module.__name__, mutated(module, tmp_path, *([right, wrong] if name == file else []))
        )
    guard = MemoryGuard(monkeypatch)
    try:
        case(guard)
    except AssertionError:
        return
    assert guard.outside, "nothing noticed it"


def mutated(module, folder, right="", wrong=""):
    """The module imported again from a copy of its source in which `right` is `wrong`."""
    with open(module.__file__, encoding="utf-8") as file:
        source = file.read()
    assert right in source, "the text that was to be replaced is gone from the kernel"
    path = folder / f"{module.__name__.rpartition('.')[2]}_copy.py"
    path.write_text(source.replace(right, wrong) if right else source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
