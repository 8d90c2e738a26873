"""Where attention='triton' runs and where it is refused, and what makes a kernel compile again."""

import json
import os
import subprocess
import sys

import pytest
import torch

from minillm.attention import choose_attention
from minillm.attention.triton import TritonAttention, why_not
from minillm.errors import ConfigError
from tests.unit.attention_cases import Ragged, check, random_sequence


def plain_python(code, **environment):
    """Run code in a process without the interpreter: its standard output."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_can_be_chosen_on_a_cpu_under_the_interpreter():
    attend, reason = choose_attention("cpu", torch.float32, "triton")
    check(attend, Ragged([random_sequence(n, 40) for n in (1, 20)]))
    assert reason.startswith("triton, as asked")


def test_a_cpu_keeps_its_own_body_under_the_interpreter():
    assert choose_attention("cpu", torch.float32)[1].startswith("cpu")


@pytest.mark.parametrize(
    "dtype, message", [(torch.bfloat16, "cannot interpret bfloat16"), (torch.float64, "not torch.float64")]
)
def test_what_the_interpreter_cannot_multiply_is_refused(dtype, message):
    with pytest.raises(ConfigError, match=message):
        choose_attention("cpu", dtype, "triton")


def test_without_the_interpreter_a_cpu_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="set TRITON_INTERPRET=1 before Python starts .* or use attention='cpu'"):
        choose_attention("cpu", torch.float32, "triton")


def test_the_interpreter_asked_for_too_late_is_refused():
    code = """
import os, torch, minillm.kernels.flash
os.environ["TRITON_INTERPRET"] = "1"
from minillm.attention.triton import why_not
print(why_not("cpu", torch.float32, (8, 9)))
"""
    assert "before Python starts" in plain_python(code)


def test_without_triton_everything_else_works_and_triton_is_refused():
    code = """
import importlib.util, sys, torch
import minillm
from minillm.attention import choose_attention
assert "triton" not in sys.modules
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
print(choose_attention("cuda", torch.float16)[1])
try:
    choose_attention("cpu", torch.float32, "triton")
except minillm.errors.ConfigError as error:
    print(error)
"""
    automatic, refused = plain_python(code).splitlines()
    assert automatic.startswith("sdpa") and "pip install triton" in automatic
    assert "pip install triton" in refused


@pytest.fixture
def gpu(monkeypatch):
    """torch.cuda as a machine with one GPU of this compute capability has it."""

    def pretend(*capability):
        properties = type("Properties", (), {"multi_processor_count": 108})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)

    return pretend


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_is_the_default_on_newer_gpus(gpu, capability, dtype):
    gpu(*capability)
    attend, reason = choose_attention("cuda", dtype)
    assert isinstance(attend, TritonAttention) and reason.startswith("triton")


def test_a_t4_gets_sdpa_and_the_reason(gpu):
    gpu(7, 5)
    _, reason = choose_attention("cuda", torch.float16)
    assert reason.startswith("sdpa") and "needs compute capability 8.0, this GPU has 7.5" in reason
    with pytest.raises(ConfigError, match="tl.dot has no Tensor Cores below it; use attention='sdpa'"):
        choose_attention("cuda", torch.float16, "triton")


def test_a_dtype_that_no_kernel_computes_gets_sdpa(gpu):
    gpu(9, 0)
    assert choose_attention("cuda", torch.float64)[1].startswith("sdpa")
    assert "not torch.float64" in why_not("cuda", torch.float64, (9, 0))


def test_the_interpreter_does_not_leak_into_other_processes():
    code = "import os, tests.kernels.conftest; print(os.environ.get('TRITON_INTERPRET'))"
    assert plain_python(code).strip() == "None"


KEYS = """
import json, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from minillm.batch import Batch
from minillm.kernels import flash, paged_attention, split_kv
from minillm.kernels.launch import find_row
from minillm.kernels.paged_attention import compile_spec

backend = make_backend(GPUTarget("cuda", 90, 32))
keys = {"flash": set(), "prefill": set(), "decode": set(), "split": set(), "merge": set()}

class Recorder:
    # Stands for a kernel: what would be compiled is noted, and nothing runs.
    def __init__(self, kernel):
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    def __getitem__(self, grid):
        return lambda *args, **options: keys[self.name].add(str(self.bind(*args, **options)[1:]))

def record(module, name):
    recorder = Recorder(getattr(module, name))
    setattr(module, name, recorder)
    return recorder

dense = record(flash, "flash_attention_kernel")
paged = record(paged_attention, "paged_attention_kernel")
merge = record(split_kv, "merge_splits_kernel")
dense.name, merge.name = "flash", "merge"
H, HKV, D = 8, 2, 64
row = lambda kernel, phase: find_row(kernel, (9, 0), D, "float16", phase)
pages = torch.empty(40, 16, HKV, D, dtype=torch.float16)
lengths = [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 255, 256]
for count, n in enumerate(lengths, start=1):
    q = torch.empty(1, n, H, D, dtype=torch.float16)
    k = torch.empty(1, n, HKV, D, dtype=torch.float16)
    flash.flash_attention(q, k, k, row("flash", "prefill"))
    requests = 1 + count % 3
    tables = [list(range(-(-n // 16)))] * requests
    for phase, tokens, splits in (("prefill", n, 1), ("decode", 1, 1), ("split", 1, 4)):
        batch = Batch.build([[0] * tokens] * requests, [n] * requests, tables, 16)
        q = torch.empty(batch.num_tokens, H, D, dtype=torch.float16)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        parts = torch.empty(splits, requests, 1, H, D), torch.empty(splits, requests, 1, H)
        paged.name = phase
        to = (out, lse) if splits == 1 else parts
        of = (batch.block_tables, batch.query_start_loc, batch.seq_lens, row("paged_attention", phase))
        paged_attention.paged_attention(*to, q, pages, pages, *of, num_splits=splits)
    split_kv.merge_splits(out, lse, *parts, batch.query_start_loc, row("merge_splits", "split"))
print(json.dumps({name: len(found) for name, found in keys.items()}))
"""


def test_twenty_prompt_lengths_compile_each_kernel_once():
    counts = json.loads(plain_python(KEYS))
    assert counts == {"flash": 1, "prefill": 1, "decode": 1, "split": 1, "merge": 1}
