"""The load test itself, on random weights and for a second per load: counts only, no time is judged."""

import asyncio

import pytest

from benchmarks.serve_load import LOADS, measure, server


@pytest.fixture(scope="module")
def result(session_seed):
    options = ["--dtype", "float32", "--max-num-seqs", "8", "--max-queued-requests", "8", "--num-kv-blocks", "60"]
    with server("random:tiny", *options) as (process, url):
        yield asyncio.run(measure(url, process.pid, 1.0, session_seed, seats=8))


def test_no_answer_is_lost_or_mixed_up(result):
    assert [phase["load"] for phase in result["loads"]] == list(LOADS)
    for phase in result["loads"]:
        ended = phase["complete"] + phase["left"] + phase["refused"]
        assert (phase["failed"], phase["mixed_up"]) == (0, 0)
        assert ended == phase["sent"] > 0


def test_overload_is_refused_and_leaves_no_block_behind(result):
    assert result["loads"][-1]["refused"] > 0
    assert [phase["blocks_left"] for phase in result["loads"]] == [0, 0, 0]
