"""The ways to several ranks besides LLM(): torchrun, the command line, the server."""

import json
import os
import socket
import subprocess
import sys

import httpx
import psutil
import pytest

from minillm import LLM, SamplingParams
from tests.unit.running_server import TEMPLATE, Running, until
from tests.unit.two_ranks import OPTIONS, WAIT_S, child_of, tokens


@pytest.mark.slow
def test_torchrun_starts_the_same_command_on_every_rank_and_only_rank_0_answers():
    command = ["-m", "minillm", "generate", "abcdef", "xyz", "--json", "--temperature", "0", "--max-tokens", "5"]
    options = {**OPTIONS, "model": "random:tiny"}
    command += [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, *command, "--tensor-parallel-size", "2"],
        capture_output=True, text=True, timeout=4 * WAIT_S, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with LLM(**options) as one:
        expected = tokens(one, ["abcdef", "xyz"], SamplingParams(temperature=0.0, max_tokens=5))
    assert [[row["token_ids"]] for row in json.loads(done.stdout)] == expected


def test_the_server_answers_from_two_ranks_and_is_no_longer_healthy_when_it_has_lost_one():
    with LLM("random:tiny", **OPTIONS) as one:
        one.tokenizer.chat_template = TEMPLATE
        params = SamplingParams(temperature=0.0, max_tokens=8)
        (expected,) = one.chat([{"role": "user", "content": "hello"}], params, use_tqdm=False)
    with Running(tensor_parallel_size=2, attention="sdpa") as running:
        child = child_of(running.llm)
        answer = running.client.chat.completions.create(
            model="random:tiny", messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=8
        )
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert running.is_idle() and child.poll() is None
        assert running.http.get("/health").status_code == 200
        child.kill()
        body = {"model": "random:tiny", "prompt": "hello", "max_tokens": 8}
        answer = running.http.post("/v1/completions", json=body)
        assert answer.status_code >= 500 and "rank 1 of 2" in answer.text
        assert running.http.get("/health").status_code == 503


def test_torchrun_serves_from_rank_0_alone_and_ends_when_a_rank_dies():
    """All processes get the same port; a second listener there would fail and end them all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "minillm", "serve", "--model", "random:tiny", "--tensor-parallel-size", "2", "--port", str(port)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
    server = subprocess.Popen(
        [sys.executable, *torchrun, *command, "--num-kv-blocks", "64", "--attention", "sdpa"],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        body = {"model": "random:tiny", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        until(lambda: server.poll() is None and _answers(port), "the server never came up")
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=WAIT_S)
        assert answer.json()["usage"]["completion_tokens"] == 3
        (follower,) = (p for p in psutil.Process(server.pid).children() if p.environ().get("RANK") == "1")
        follower.kill()
        server.communicate(timeout=WAIT_S)
        assert server.returncode != 0 and not _answers(port)
    finally:
        if server.poll() is None:
            server.terminate()
            server.communicate(timeout=WAIT_S)


def _answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
