"""What is particular to the CPU body: who reads which keys, the numba kernel, its threads and its absence."""

import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.attention import CPUAttention, cpu_plan
from minillm.attention.cpu_plan import REQUEST, START, STOP, Read, cut, split_batch
from minillm.batch import Batch
from minillm.errors import ShapeError
from tests.unit.attention_cases import NAN, Ragged, assert_close, check, oracle, random_sequence

cpu_decode = pytest.importorskip("minillm.attention.cpu_decode", reason="numba is not installed")

B = 16  # block size
ONE_LONG = [1100] + [200] * 9
TEN_EQUAL = [256] * 10


@pytest.fixture(params=["numba", "without numba"])
def attend(request):
    return CPUAttention(torch.float32, use_numba=request.param == "numba")


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def decodes(contexts, **shape):
    return Ragged([random_sequence(1, context, **shape) for context in contexts])


# -- what is read


class GatheredRows(TorchDispatchMode):
    """Counts the K and V rows that are copied out of the pages [P, block_size, Hkv, D]."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor) and result.dim() == 4:
            self.rows += result.shape[0] * result.shape[1]
        return result


def rows_gathered(contexts):
    problem = decodes(contexts)
    attend = CPUAttention(torch.float32, use_numba=False)
    with GatheredRows() as counted:
        check(attend, problem)
    return counted.rows // 2  # `check` calls the body twice


def test_one_long_context_reads_at_most_twice_the_rows_of_equal_ones_without_numba():
    """Padding to the longest would read 10 x 1,100 rows instead of 2,900."""
    equal, ragged = rows_gathered(TEN_EQUAL), rows_gathered(ONE_LONG)
    assert 2 * sum(TEN_EQUAL) <= equal <= 2 * 2 * sum(TEN_EQUAL)  # both K and V
    assert 2 * sum(ONE_LONG) <= ragged <= 2 * equal


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_the_kernel_s_shares_hold_every_visible_row_once(workers):
    for contexts in (TEN_EQUAL, ONE_LONG):
        reads, _ = split_batch(decodes(contexts).batch, None, cpu_plan.FEW_ROWS)
        assert cut(reads, workers).keys_read.sum() == sum(contexts)


def test_the_kernel_reads_no_row_outside_its_pieces(attend):
    """Everything that the plan does not name is NaN, in a window's case also the oldest part of the context."""
    problem = Ragged([random_sequence(1, context) for context in ONE_LONG[:3]], window=40)
    expected, _ = problem.expected()
    for (_, keys, _), table in zip(problem.sequences, problem.tables, strict=True):
        unseen = torch.arange(len(keys) - 40)
        slots = torch.tensor(table)[unseen // B] * B + unseen % B
        nan = torch.full((len(unseen), *keys.shape[1:]), NAN)
        problem.kv_layer.write(nan, nan, slots)
    assert_close(attend(*problem.inputs), expected, torch.float32)


def test_a_fresh_prompt_needs_no_pages(attend):
    problem = Ragged([random_sequence(n, n) for n in (40, 5, 17)])
    expected, _ = problem.expected()
    problem.kv_layer.k.fill_(NAN)
    problem.kv_layer.v.fill_(NAN)
    assert_close(attend(*problem.inputs), expected, torch.float32)


# -- the plan


def random_reads():
    contexts = [random.choice([1, 2, 15, 16, 17, random.randint(1, 900)]) for _ in range(random.randint(1, 20))]
    return [Read(row, row, random.choice([0, stop // 2]), stop) for row, stop in enumerate(contexts)]


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_pieces_cover_every_read_once_and_shares_are_equal(workers):
    for _ in range(30):
        reads = random_reads()
        plan = cut(reads, workers)
        covered = [[] for _ in reads]
        for number, request, start, stop, slot in plan.pieces.tolist():
            assert request == reads[number].request and start < stop
            covered[number].append((start, stop, slot))
        for number, (read, parts) in enumerate(zip(reads, covered, strict=True)):
            assert (parts[0][0], parts[-1][1]) == (read.start, read.stop)
            assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
            slots = [slot for _, _, slot in parts]
            if len(parts) == 1:
                assert slots == [-1]
            else:
                assert [number, slots[0], slots[-1] + 1] in plan.splits.tolist()
                assert slots == list(range(slots[0], slots[-1] + 1))
        used = [slot for slot in plan.pieces[:, -1] if slot >= 0]
        assert used == list(range(plan.num_slots))
        assert 1 <= plan.num_workers <= workers
        assert plan.keys_read.sum() == sum(read.stop - read.start for read in reads)
        assert len(set(plan.keys_read[:-1].tolist())) <= 1  # the last worker takes what is left
        assert plan.keys_read[-1] <= plan.keys_read[0] <= plan.keys_read.sum() / workers + cpu_plan.SHARE_MULTIPLE


def test_few_rows_are_read_one_by_one_and_more_as_a_chunk():
    batch = Ragged([random_sequence(n, 30) for n in (3, 9, 1)]).batch
    reads, chunks = split_batch(batch, window=10, few_rows=4)
    assert reads == [Read(0, 0, 18, 28), Read(1, 0, 19, 29), Read(2, 0, 20, 30), Read(12, 2, 20, 30)]
    assert chunks == [(1, 3, 12, 30)]


def test_an_empty_step_has_an_empty_plan():
    plan = cut([], 4)
    assert plan.num_workers == 0 and plan.num_slots == 0 and plan.keys_read.sum() == 0


def test_more_rows_than_context_is_refused(attend):
    q, k, v, layer, batch = Ragged([random_sequence(2, 9)]).inputs
    batch.context_lens = [1]
    with pytest.raises(ShapeError, match="has 2 rows but a context of 1"):
        attend(q, k, v, layer, batch)


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_id_outside_the_pages_is_refused(attend, block):
    problem = decodes([20])
    assert problem.kv_layer.k.shape[0] == 5
    problem.batch.block_tables[0, 1] = block if block < 0 else 5
    with pytest.raises(ShapeError, match=r"the pages are 0 \.\. 4"):
        attend(*problem.inputs)


# -- layers and steps


def test_one_body_serves_layers_of_different_windows_and_step_after_step(attend):
    for contexts in ([40, 1, 100], [41, 2, 101], [7]):
        problem = Ragged([random_sequence(1, context) for context in contexts] + [random_sequence(20, 60)])
        for window in (None, 10, None, 3):
            problem.window = problem.kv_layer.window = window
            check(attend, problem)


def test_pages_that_are_not_contiguous_are_read_all_the_same(attend):
    problem = decodes([20, 50])
    wide = torch.full((*problem.kv_layer.k.shape[:3], 24), NAN)
    wide[..., :16] = problem.kv_layer.k
    problem.kv_layer.k = wide[..., :16]
    check(attend, problem)


# -- threads


def test_any_number_of_threads_gives_the_same_attention(attend, threads):
    """Enough keys that every thread gets some, and rows that are cut between threads."""
    problem = decodes([900, 1, 700, 64, 1500], heads=8, kv_heads=4, head_size=64)
    reads, _ = split_batch(problem.batch, None, cpu_plan.FEW_ROWS)
    assert len(cut(reads, threads).splits) == (0 if threads == 1 else min(threads - 1, 3))
    check(attend, problem)


def test_one_long_request_is_shared_by_all_threads(attend, threads):
    check(attend, decodes([2000], heads=8, kv_heads=2, head_size=64))


def test_two_threads_may_decode_at_once(attend):
    """Two engines in one process: numba's thread pool must not be entered twice at the same time."""
    problems = [decodes([500, 400, 300], heads=8, head_size=64) for _ in range(2)]
    bodies = [attend, CPUAttention(torch.float32, use_numba=attend._kernels is not None)]
    failures = []

    def work(body, problem):
        try:
            expected, _ = problem.expected()
            for _ in range(30):
                assert_close(body(*problem.inputs), expected, torch.float32)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=pair) for pair in zip(bodies, problems, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


# -- the kernel's arithmetic


def test_exp2_is_accurate_where_softmax_uses_it():
    x = np.concatenate([-np.random.rand(500) * 20, -np.random.rand(500) * 120, [0.0, -0.5, -1.0, -126.0]])
    x = x.astype(np.float32)
    ours = np.array([cpu_decode._exp2(value) for value in x], np.float64)
    np.testing.assert_allclose(ours, np.exp2(x.astype(np.float64)), rtol=3e-7)


def test_exp2_far_below_is_almost_zero_and_keeps_nan():
    for x in (-127.0, -1e4, -3e38, -np.inf):
        assert 0 <= cpu_decode._exp2(np.float32(x)) < 2e-38
    assert np.isnan(cpu_decode._exp2(np.float32(NAN)))


def test_bfloat16_is_rounded_as_torch_rounds():
    """Random bit patterns, ties in both directions, both zeros, the largest numbers, infinity, NaN."""
    bits = np.random.randint(0, 2**32, 5000, dtype=np.uint32)
    edges = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0, 0x80000000, 0x7F7FFFFF, 0xFF7FFFFF]
    edges += [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF]
    values = np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32)
    stored = np.full((1, len(values)), 7, np.uint16)
    cpu_decode._store(values[None], stored)
    ours = torch.from_numpy(stored[0]).view(torch.bfloat16)
    torch.testing.assert_close(ours, torch.from_numpy(values).to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_one_visible_key_returns_its_value_exactly():
    for dtype in (torch.float32, torch.bfloat16):
        problem = Ragged([random_sequence(1, 70, heads=2, kv_heads=2, dtype=dtype) for _ in range(5)], window=1)
        assert torch.equal(CPUAttention(dtype)(*problem.inputs), problem.v)


def test_bfloat16_decode_is_as_good_as_its_output_rounding():
    """Sums are kept in float32: the error is that of rounding the result once."""
    problem = decodes([300, 1000, 17], heads=6, head_size=64, dtype=torch.bfloat16)
    out = CPUAttention(torch.bfloat16)(*problem.inputs)
    expected, _ = problem.expected()
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)


# -- without numba, or with a part of it


def in_a_new_process(program):
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=root)


def test_numba_is_imported_only_when_the_cpu_body_is_made_and_leaves_torch_its_threads():
    """numba starts its pool, which torch shares, only once in a process."""
    program = """
import sys, torch
from minillm.attention import choose_attention
torch.set_num_threads(3)
choose_attention("cpu", torch.float32, "sdpa")
choose_attention("cpu", torch.float32, "naive")
assert "numba" not in sys.modules
choose_attention("cpu", torch.float32)
assert "numba" in sys.modules and torch.get_num_threads() == 3
"""
    result = in_a_new_process(program)
    assert result.returncode == 0, result.stderr


def test_without_numba_the_reason_says_so_and_the_answer_is_right():
    program = """
import sys
sys.modules["numba"] = None  # as if it were not installed
import torch
from minillm.attention import choose_attention
from tests.unit.attention_cases import Ragged, check, random_sequence
attend, reason = choose_attention("cpu", torch.float32)
check(attend, Ragged([random_sequence(1, 100), random_sequence(20, 30), random_sequence(3, 9)]))
print(reason)
"""
    result = in_a_new_process(program)
    assert result.returncode == 0, result.stderr
    assert "decode in plain PyTorch" in result.stdout and "pip install numba" in result.stdout


def test_a_compiler_that_fails_leaves_the_plain_decode(monkeypatch, caplog):
    def refuse(*dtypes):
        raise RuntimeError("unknown processor")

    monkeypatch.setattr(cpu_decode, "warm_up", refuse)
    attend = CPUAttention(torch.float32)
    assert "numba failed with RuntimeError" in attend.reason
    assert "cannot compile" in caplog.text
    check(attend, decodes([5, 70]))


def test_dtypes_without_a_kernel_say_which_decode_runs():
    assert "not torch.float16" in CPUAttention(torch.float16).reason
    assert "as asked" in CPUAttention(torch.float32, use_numba=False).reason


def test_a_kernel_that_cannot_be_cached_is_compiled_all_the_same():
    """A function without a file has no cache folder; so has one in a folder that cannot be written."""
    namespace = {}
    exec("def double(x):\n    return 2 * x", namespace)
    assert cpu_decode._jit()(namespace["double"])(21) == 42


def test_the_block_tables_may_be_a_strided_view(attend):
    problem = decodes([40, 20])
    wide = torch.full((2, 6), -1, dtype=torch.int32)
    wide[:, ::2] = problem.batch.block_tables
    problem.batch.block_tables = wide[:, ::2]
    check(attend, problem)


def test_reads_of_a_batch_follow_its_requests_not_their_order():
    batch = Batch.build([[0], [0] * 9, [0]], [5, 9, 30], [[0], [1], [2, 3]], B)
    plan = cut(split_batch(batch, None, 4)[0], 1)
    assert plan.pieces[:, [REQUEST, START, STOP]].tolist() == [[0, 0, 5], [2, 0, 30]]


def test_the_oracle_agrees_with_arithmetic_by_hand():
    q, k, v = torch.ones(1, 1, 1), torch.tensor([0.0, 1.0])[:, None, None], torch.tensor([3.0, 5.0])[:, None, None]
    e = np.e
    out, lse = oracle(q, k, v)
    assert out.item() == pytest.approx((3 + 5 * e) / (1 + e)) and lse.item() == pytest.approx(np.log(1 + e))
