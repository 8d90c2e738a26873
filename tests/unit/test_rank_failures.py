"""A rank that dies, hangs or fails is an error of the LLM, and ends the others, however the model is cut."""

import signal
from functools import partialmethod

import pytest
import torch

from minillm import LLM
from minillm.errors import RankError
from minillm.parallel import start
from tests.unit.engines import sure_prompts
from tests.unit.two_ranks import OPTIONS, child_of, ended, tokens

CUTS = {"heads": {"tensor_parallel_size": 2}, "layers": {"pipeline_parallel_size": 2, "pipeline_chunk_size": 5}}
TIMEOUT_S = 3  # of a step; starts and steps take a hundredth of it on an idle machine


@pytest.fixture(params=CUTS)
def options(request):
    return OPTIONS | CUTS[request.param]


@pytest.fixture
def prompts(tiny):
    return sure_prompts(tiny, [45, 3, 20], int(torch.randint(2**31, ())), 12)[0]


def assert_broken(llm, prompts, says):
    """Once in the step that fails, and again in the next one; no block is lost."""
    for _ in range(2):
        with pytest.raises(RankError, match=says):
            tokens(llm, prompts)
    pool = llm.engine.scheduler.block_pool
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("when", ["between steps", "in the middle of one"])
def test_a_rank_that_dies_is_named_long_before_the_timeout(options, prompts, monkeypatch, when):
    with LLM("random:tiny", **options) as llm:
        child, attend = child_of(llm), llm.engine.attend

        def deadly(*args):
            child.kill()
            return attend(*args)

        if when == "between steps":
            child.kill()
            child.wait()
        else:
            monkeypatch.setattr(llm.engine, "attend", deadly)
        assert_broken(llm, prompts, "rank 1 of 2 was ended by SIGKILL; create a new LLM")


def test_a_rank_that_hangs_is_an_error_when_the_time_of_a_step_is_over(options, prompts, monkeypatch):
    monkeypatch.setattr(start.Ranks, "connect", partialmethod(start.Ranks.connect, timeout_s=TIMEOUT_S))
    with LLM("random:tiny", **options) as llm:
        child = child_of(llm)
        child.send_signal(signal.SIGSTOP)
        assert_broken(llm, prompts, "[Tt]imed out")
        assert child.returncode == -signal.SIGKILL


def test_an_error_of_rank_0_in_the_middle_of_a_step_ends_the_others(options, prompts, monkeypatch):
    with LLM("random:tiny", **options) as llm:
        child = child_of(llm)
        monkeypatch.setattr(llm.engine, "attend", lambda *args: 1 / 0)
        assert_broken(llm, prompts, "ZeroDivisionError")
        assert ended(child)
