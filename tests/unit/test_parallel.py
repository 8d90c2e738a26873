"""LLM(tensor_parallel_size=2): the answers of one process, from two that start, fail and end together."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.doctor import report
from minillm.errors import ConfigError, EngineClosedError, RankError
from minillm.parallel import processes, start
from tests.unit.engines import sure_prompts
from tests.unit.two_ranks import GREEDY, OPTIONS, WAIT_S, child_of, ended, is_alive, open_two, tokens

MODELS = {"tied": "random:tiny", "untied": "random:tiny-qwen2"}


@pytest.fixture(scope="module", autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1, "an LLM that is closed gives back the threads that its ranks took"
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=MODELS)
def both(request):
    """The same model on one process and on two."""
    with LLM(MODELS[request.param], **OPTIONS) as one, open_two(MODELS[request.param]) as two:
        yield one, two


@pytest.fixture
def prompts(tiny):
    """Three prompts of 3 to 45 tokens, computed in chunks of at most 16; fresh in each test."""
    return sure_prompts(tiny, [45, 3, 20], int(torch.randint(2**31, ())), 12)[0]


# ---- the same answers ------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_one_process_alone_and_in_a_batch_and_from_the_prefix_cache(both, prompts):
    one, two = both
    expected = tokens(one, prompts)
    assert tokens(two, prompts[:1]) == expected[:1]
    assert tokens(two, prompts) == expected
    (again,) = two.generate(prompts[:1], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 32 and [again.outputs[0].token_ids] == expected[0]


def test_siblings_that_copy_blocks_and_draw_from_one_seed_get_the_same_tokens(both, prompts):
    params = SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=8, ignore_eos=True)
    one, two = both
    assert tokens(two, prompts, params) == tokens(one, prompts, params)


def test_scores_are_those_of_one_process(both, prompts):
    one, two = both
    for prompt in prompts:
        assert two.score(prompt) == pytest.approx(one.score(prompt), abs=1e-4)


def test_a_step_moves_two_sums_per_layer_the_logits_and_a_plan(both, prompts):
    _, two = both
    two.reset_prefix_cache()
    tokens(two, [prompts[0][:11]], SamplingParams(temperature=0.0, max_tokens=1))
    traffic = two.engine.model.ranks.traffic
    assert traffic.calls == {"all_reduce": 2 * 2, "gather": 1, "plan": 2}
    layers, rows, hidden, vocabulary, plan = 2, 11, 64, 320, 5 + 3 * 11 + 2 + 1 + 1
    assert traffic.bytes == {
        "all_reduce": 2 * layers * rows * hidden * 4,
        "gather": vocabulary * 4,
        "plan": plan * 8,
    }


def test_ctrl_c_waits_for_the_end_of_the_step_and_both_ranks_go_on(both, prompts, monkeypatch):
    one, two = both
    attend, calls = two.engine.attend, []

    def interrupted(*args):
        calls.append(os.kill(os.getpid(), signal.SIGINT) if not calls else None)
        return attend(*args)

    monkeypatch.setattr(two.engine, "attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens(two, prompts)
    assert len(calls) == 2, "both layers of the step were computed"
    pool = two.engine.scheduler.block_pool
    assert pool.num_free == pool.num_blocks
    assert tokens(two, prompts) == tokens(one, prompts)


def test_doctor_says_how_many_ranks_there_are(both):
    one, two = (report(llm) for llm in both)
    assert one["ranks"] == "1: this process alone"
    assert two["ranks"].startswith("2 over gloo") and two["warnings"] == []
    assert two["kv_cache_bytes"] == one["kv_cache_bytes"] // 2
    assert sum(two["weight_bytes"].values()) < sum(one["weight_bytes"].values())


@pytest.mark.slow
def test_the_embedded_model_has_three_kv_heads_and_gives_on_three_ranks_the_tokens_of_one():
    prompts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]
    options = dict(dtype="float32", num_kv_blocks=64)
    with LLM(**options) as one:
        expected = tokens(one, prompts), one.score(prompts[0])
        whole = one.engine.model.num_weight_bytes["plain float32"]
    with LLM(tensor_parallel_size=3, **options) as three:
        assert tokens(three, prompts) == expected[0]
        assert three.score(prompts[0]) == pytest.approx(expected[1], abs=1e-3)
        assert three.engine.model.num_weight_bytes["plain float32"] == whole // 3


# ---- the end ---------------------------------------------------------------------------------------


def test_llms_that_are_closed_or_forgotten_leave_no_process(prompts):
    llm = open_two()
    child, folder, expected = child_of(llm), llm.engine.model.others.folder, tokens(llm, prompts)
    llm.close()
    llm.close()
    assert child.returncode == 0 and not os.path.exists(folder)
    with pytest.raises(EngineClosedError):
        llm.generate(prompts[0])

    child = child_of(llm := open_two())
    assert tokens(llm, prompts) == expected
    del llm
    gc.collect()
    assert ended(child)


SCRIPT = f"""
import time
from minillm import LLM
llm = LLM("random:tiny", tensor_parallel_size=2, **{OPTIONS!r})
print(llm.engine.model.others.processes[1].pid, llm.engine.model.others.folder, flush=True)
while True:
    llm.generate([1, 2, 3], use_tqdm=False)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_the_process_that_started_it(how):
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=pipe, stderr=pipe, process_group=0)
    child, folder = parent.stdout.readline().decode().split()
    os.killpg(parent.pid, how)  # as a terminal sends Ctrl-C, to all of a group
    _, errors = parent.communicate(timeout=WAIT_S)
    assert parent.returncode == -how, errors.decode()
    deadline = time.monotonic() + WAIT_S
    while is_alive(int(child)) or os.path.exists(folder):
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.02)


# ---- what is refused -------------------------------------------------------------------------------


@pytest.fixture
def starts_nothing(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.parametrize(
    "size, says", [(0, "at least 1"), (3, "does not divide 4 heads, 2 K/V heads"), (4, "split over 1, 2$")]
)
def test_a_size_that_does_not_fit_the_model_is_refused_before_anything_starts(starts_nothing, size, says):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} .*{says}"):
        LLM("random:tiny", tensor_parallel_size=size)


def test_another_number_of_processes_than_torchrun_started_is_refused(starts_nothing, monkeypatch):
    world = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun started 3 processes and tensor_parallel_size=2"):
        open_two()


def test_nothing_is_left_when_a_process_cannot_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    made = []
    mkdtemp = processes.tempfile.mkdtemp
    monkeypatch.setattr(processes.tempfile, "mkdtemp", lambda **how: made.append(mkdtemp(**how)) or made[-1])
    with pytest.raises(FileNotFoundError):
        open_two()
    assert len(made) == 1 and not os.path.exists(made[0])


def test_each_rank_needs_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    start.check_device(torch.device("cuda"), 2)
    with pytest.raises(ConfigError, match="3 ranks on this machine need 3 GPUs and it has 2"):
        start.check_device(torch.device("cuda"), 3)
    with pytest.raises(ConfigError, match="'cuda:1' is one GPU"):
        start.check_device(torch.device("cuda:1"), 2)


def test_ranks_with_different_seeds_refuse_to_work_together(monkeypatch):
    asdict = processes.asdict
    monkeypatch.setattr(processes, "asdict", lambda config: asdict(config) | {"seed": 1})
    with pytest.raises(ConfigError, match="different options"):
        open_two()


def test_a_rank_that_cannot_start_tells_why(monkeypatch):
    asdict = processes.asdict
    monkeypatch.setattr(processes, "asdict", lambda config: asdict(config) | {"model": "random:tinny"})
    with pytest.raises(RankError, match="rank 1 of 2 failed: .*tinny.*create a new LLM"):
        open_two()
