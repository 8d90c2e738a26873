"""The load test itself, on random weights and for a second per load: counts only, no time is judged."""

import asyncio

import httpx
import pytest

from benchmarks.serve_load import LOADS, Phase, measure, one_client, server


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


PIECE = 'data: {"choices": [{"text": "a"}]}\n\n'
ENDINGS = {
    "an error event": ('data: {"error": {"message": "the step failed"}}\n\n', "failed"),
    "a cut stream": ("", "failed"),
    "another answer": ("data: [DONE]\n\n", "mixed_up"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_answer_that_goes_wrong_after_its_status_is_counted(ending):
    text, counted = ENDINGS[ending]

    async def ask():
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=PIECE + text))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await one_client(client, "prompt", "ab", None, phase)

    phase = Phase(1.0, 1.0)
    asyncio.run(ask())
    assert getattr(phase, counted) == 1 and phase.failed + phase.mixed_up == 1
