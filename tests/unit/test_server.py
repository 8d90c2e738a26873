"""The server over real sockets: uvicorn in a thread, OpenAI's own client, and plain HTTP for what that client hides."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading

import httpx
import openai
import pytest

from minillm import SamplingParams
from minillm.errors import ConfigError
from minillm.server.app import ServerConfig
from minillm.server.run import listen
from tests.unit.command import minillm
from tests.unit.running_server import MODEL, WAIT_S, Running, make_llm, until


@pytest.fixture(scope="module")
def server():
    with Running() as running:
        yield running


def post(running, path="/v1/completions", **body):
    return running.http.post(path, json=body)


def events(response):
    """The data of server-sent events, as they come."""
    for line in response.iter_lines():
        if line:
            yield line.removeprefix("data: ")


# ---- OpenAI's client -----------------------------------------------------------------------------


def test_the_models_are_listed(server):
    (model,) = server.client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")


def test_a_completion_equals_the_engines_own(server):
    answer = server.client.completions.create(model=MODEL, prompt="hello there", max_tokens=9, temperature=0)
    with make_llm() as alone:
        expected = alone.generate("hello there", SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)[0]
    (choice,) = answer.choices
    assert choice.text == expected.outputs[0].text
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 9)


def test_a_chat_goes_through_the_template(server):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    options = {"max_completion_tokens": 5, "temperature": 0, "seed": 1}
    answer = server.client.chat.completions.create(model=MODEL, messages=messages, **options)
    raw = server.client.completions.create(model=MODEL, prompt="<system>s\n<user>hi\n<assistant>", max_tokens=5, seed=1)
    assert answer.choices[0].message.content == raw.choices[0].text
    assert answer.usage.prompt_tokens == raw.usage.prompt_tokens


def test_a_stream_joined_is_the_whole_answer(server):
    options = dict(model=MODEL, prompt=["ab", "cde"], n=2, max_tokens=12, seed=7, temperature=1)
    whole = server.client.completions.create(**options)
    texts, reasons, usage = [""] * 4, [None] * 4, None
    for piece in server.client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 48)
    assert len(set(texts[:2])) == 2, "two samples of one prompt are two draws"


def test_a_chat_stream_opens_with_a_role_and_ends_with_a_reason(server):
    pieces = list(
        server.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=4, temperature=0
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].choices[0].finish_reason == "length"
    assert len({piece.id for piece in pieces}) == 1


def test_stop_strings_end_an_answer_and_do_not_show(server):
    whole = server.client.completions.create(model=MODEL, prompt="q", max_tokens=40, temperature=0, extra_body=IGNORE)
    text = whole.choices[0].text
    stop = text[10:12]
    cut = server.client.completions.create(
        model=MODEL, prompt="q", max_tokens=40, temperature=0, stop=[stop], extra_body=IGNORE
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].model_extra["stop_reason"] == stop


IGNORE = {"ignore_eos": True}


def test_logprobs_are_those_of_the_engine_streamed_or_not(server):
    options = dict(model=MODEL, prompt="abc", max_tokens=5, temperature=0, logprobs=2)
    whole = server.client.completions.create(**options).choices[0].logprobs
    streamed = [piece.choices[0].logprobs for piece in server.client.completions.create(**options, stream=True)]
    assert sum((piece.token_logprobs for piece in streamed), []) == whole.token_logprobs
    assert sum((piece.text_offset for piece in streamed), []) == whole.text_offset
    assert all(1 <= len(row) <= 2 for row in whole.top_logprobs)
    prompt = make_llm().tokenizer.encode("abc")
    with make_llm() as alone:
        out = alone.generate([prompt], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0].outputs[0]
        scored = alone.score(prompt + out.token_ids)[len(prompt) - 1 :]
    assert whole.token_logprobs == pytest.approx(scored, abs=1e-4)


def test_chat_logprobs_name_the_rivals(server):
    answer = server.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=3, logprobs=True, top_logprobs=4
    )
    for entry in answer.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs == sorted(entry.top_logprobs, key=lambda e: -e.logprob)


def test_the_bytes_of_tokens_make_up_the_answer_where_characters_are_split(server):
    options = dict(model=MODEL, messages=[{"role": "user", "content": "é"}], max_tokens=30, temperature=0)
    choice = server.client.chat.completions.create(
        **options, logprobs=True, top_logprobs=1, extra_body={**IGNORE, "skip_special_tokens": False}
    ).choices[0]
    entries = choice.logprobs.content
    assert any(entry.token == "\ufffd" for entry in entries), "no token is a part of a character: nothing is tested"
    assert bytes(b for e in entries for b in e.bytes).decode("utf-8", "replace") == choice.message.content
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in entries)  # greedy: the likeliest was chosen


def test_a_repeated_prompt_reports_its_cached_tokens(server):
    prompt = [7] * 40
    first = server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    second = server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 32


# ---- what is refused -----------------------------------------------------------------------------

LONG = "x" * 3000


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, {"prompt": ""}, "empty"),
        (400, {"prompt": LONG}, "max_model_len=2048"),
        (400, {"prompt": [999999]}, "999999"),
        (400, {"prompt": 5}, "prompt"),
        (400, {"prompt": []}, "prompt"),
        (400, {"prompt": [[1], "a"]}, "prompt"),
        (400, {"prompt": [1, True]}, "prompt"),
        (400, {}, "prompt"),
        (400, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        (400, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (400, {"prompt": "a", "temperature": -1}, "temperature"),
        (400, {"prompt": "a", "n": 65}, "n"),
        (400, {"prompt": "a", "stop": [""]}, "stop"),
        (400, {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens=9"),
        (400, {"prompt": "a", "tools": []}, "tools"),
        (400, {"prompt": "a", "seed": 2**70}, "seed"),
        (400, {"prompt": "a\ud800"}, "surrogate"),
        (404, {"prompt": "a", "model": "gpt-17"}, "gpt-17"),
    ],
)
def test_what_cannot_be_served_gets_a_4xx_that_names_it(server, status, body, words):
    response = server.http.post("/v1/completions", content=json.dumps(body), headers=JSON)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert server.is_idle()


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[]", b'{"prompt": NaN}', b"\xff\xfe", b'"' * 9, b"[" * 9999])
def test_bad_json_is_a_400(server, content):
    response = server.http.post("/v1/chat/completions", content=content, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16 items"),
        ({"prompt": "a", "stop": ["x", "y" * 1001]}, "stop.1", "at most 1000 characters"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128 items"),
        ({"prompt": [[1], []]}, "prompt.1", "at least 1 item"),
        ({"prompt": [3, -1]}, "prompt.1", "greater than or equal to 0"),
        ({"prompt": "a", "max_tokens": 0, "stop": ["x"] * 17}, "max_tokens", "greater than or equal to 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
    ],
)
def test_the_limit_that_was_broken_is_told_and_not_another_form_of_the_field(server, body, param, words):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = post(server, path, **body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param
    assert error["message"].startswith(f"{param}: ") and words in error["message"]


def test_a_body_that_is_no_json_object_is_told_so(server):
    good = b'{"prompt": "a", "max_tokens": 1}'
    for content, headers, words in (
        (good, {"content-type": "application/x-www-form-urlencoded"}, "content-type: application/json"),  # curl -d
        (b"[]", JSON, "JSON object"),
        (b"", JSON, "empty"),
        (b'{"prompt": }', JSON, "not JSON: Expecting value (character 11)"),
    ):
        response = server.http.post("/v1/completions", content=content, headers=headers)
        error = response.json()["error"]
        assert response.status_code == 400 and words in error["message"] and error["param"] is None


def test_nan_as_a_temperature_is_a_400(server):
    content = b'{"prompt": "a", "temperature": NaN}'
    assert server.http.post("/v1/completions", content=content, headers=JSON).status_code == 400


def test_wrong_paths_and_methods_have_the_same_error_form(server):
    for response, status in ((server.http.get("/v1/nothing"), 404), (server.http.get("/v1/completions"), 405)):
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_a_body_over_the_limit_is_refused_unread():
    with Running(ServerConfig(max_body_bytes=1000)) as running:
        assert post(running, prompt="a" * 100, max_tokens=1).status_code == 200
        announced = post(running, prompt="a" * 2000)
        assert announced.status_code == 413
        assert "1,000 bytes" in announced.json()["error"]["message"]

        def unannounced():
            for _ in range(20):
                yield b'{"prompt": "' + b"a" * 100

        response = running.http.post("/v1/completions", content=unannounced(), headers=JSON)
        assert response.status_code == 413
        assert "1,000 bytes" in response.json()["error"]["message"]
        assert running.http.get("/health").status_code == 200


def test_a_key_is_asked_for_under_v1_only():
    with Running(ServerConfig(api_key="sesame")) as running:
        assert running.http.get("/v1/models").status_code == 401
        assert running.http.get("/v1/models", headers={"authorization": "Bearer sesam"}).status_code == 401
        assert running.http.get("/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 200
        assert running.http.get("/v1/models", headers=[(b"authorization", b"Bearer \xff")]).status_code == 401
        assert running.http.get("/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            running.client.models.list()


@pytest.mark.parametrize("options", [{"api_key": " "}, {"request_timeout_s": 0}, {"max_body_bytes": 0}])
def test_options_without_sense_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


# ---- under way -----------------------------------------------------------------------------------


def test_a_stream_arrives_token_by_token():
    """Each token is read before the engine is allowed to compute the next one."""
    with Running() as running:
        gate = threading.Semaphore(0)
        forward = running.engine.model.forward
        running.engine.model.forward = lambda *a, **k: gate.acquire() and forward(*a, **k)
        body = {"prompt": "abc", "max_tokens": 6, "stream": True, "ignore_eos": True, "temperature": 0, "logprobs": 0}
        with running.http.stream("POST", "/v1/completions", json=body) as response:
            arriving = events(response)
            for _ in range(6):
                gate.release()
                assert len(json.loads(next(arriving))["choices"][0]["logprobs"]["tokens"]) == 1
            assert next(arriving) == "[DONE]"


def sent(address, body):
    """A connection over which a completion was asked for; nobody reads what comes back."""
    host, port = address.split(":")
    connection, body = socket.create_connection((host, int(port)), WAIT_S), json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(stream):
    with Running() as running:
        running.slow_down(0.02)
        body = {"prompt": "abc" * 20, "max_tokens": 1500, "stream": stream, "ignore_eos": True}
        if stream:
            with running.http.stream("POST", "/v1/completions", json=body) as response:
                next(events(response))
                assert running.engine.has_work
        else:
            with sent(running.url.removeprefix("http://"), body):
                until(lambda: running.engine.has_work)
        until(running.is_idle, "the blocks of a client that left are still taken")
        until(lambda: 'minillm_requests_total{finish_reason="abort"} 1.0' in running.http.get("/metrics").text)
        assert post(running, prompt="abc", max_tokens=2).status_code == 200


def test_an_abort_takes_effect_before_the_next_step():
    """The command is taken between two steps: after it no forward pass computes that request."""
    from minillm.server.engine_thread import EngineThread

    async def scenario():
        llm = make_llm()
        steps, forward = [], llm.engine.model.forward
        llm.engine.model.forward = lambda *a, **k: steps.append(1) or forward(*a, **k)
        thread = EngineThread(llm.engine)
        request = llm.engine.make_request("abc", SamplingParams(max_tokens=2000, ignore_eos=True, temperature=0))
        call = await thread.submit([request])
        async for _ in call.chunks():
            if len(request.token_times) >= 3:
                break
        thread.abort(call)
        seen = len(steps)
        while llm.engine.has_work:
            await asyncio.sleep(0.001)
        assert len(steps) <= seen + 1, "at most the pass that was under way"
        await asyncio.to_thread(thread.stop)

    asyncio.run(scenario())


def test_a_full_queue_answers_429_and_stays_responsive():
    with Running(max_num_seqs=1, max_queued_requests=2) as running:
        running.slow_down(0.05)
        statuses = []

        def ask():
            response = httpx.post(
                f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 20}, timeout=WAIT_S
            )
            statuses.append((response.status_code, response.headers.get("retry-after")))

        askers = [threading.Thread(target=ask) for _ in range(12)]
        for asker in askers:
            asker.start()
        until(lambda: any(status == 429 for status, _ in statuses))
        assert running.http.get("/health").json() == {"status": "ok"}
        never = post(running, prompt=["a"] * 3)
        assert never.status_code == 400 and "3 prompts in one request" in never.json()["error"]["message"]
        for asker in askers:
            asker.join()
        assert {status for status, _ in statuses} == {200, 429}
        assert all(after == "1" for status, after in statuses if status == 429)
        refused = sum(status == 429 for status, _ in statuses)
        assert f"minillm_requests_refused_total {refused}.0" in running.http.get("/metrics").text
        until(running.is_idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_is_cut_off(stream):
    with Running(ServerConfig(request_timeout_s=0.3)) as running:
        running.slow_down(0.02)
        response = post(running, prompt="abc", max_tokens=1500, ignore_eos=True, stream=stream)
        if stream:
            last = list(events(response))[-1]
            assert json.loads(last)["error"]["type"] == "timeout_error"
        else:
            assert response.status_code == 504
        until(running.is_idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_step_is_a_500_and_the_server_goes_on(stream):
    with Running() as running:
        forward = running.engine.model.forward

        def broken(*args, **kwargs):
            running.engine.model.forward = forward
            raise RuntimeError("the card fell out")

        running.engine.model.forward = broken
        response = post(running, prompt="abc", stream=stream)
        if stream:
            assert "the card fell out" in json.loads(list(events(response))[-1])["error"]["message"]
        else:
            assert response.status_code == 500
            assert "the card fell out" in response.json()["error"]["message"]
        assert post(running, prompt="abc", max_tokens=2).status_code == 200
        assert running.is_idle()


def test_answers_are_not_mixed_up_under_load(session_seed):
    """Thirty clients at once, a third of whom leave in the middle: every other answer is the one it gets alone."""
    import random

    draw = random.Random(session_seed)
    prompts = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 60))) for _ in range(30)]
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
    with make_llm() as alone:
        expected = [o.outputs[0].text for o in alone.generate(prompts, SamplingParams(**options), use_tqdm=False)]
    with Running(num_kv_blocks=40) as running:
        got = {}

        async def ask(client, index):
            body = {"prompt": prompts[index], "stream": True, **options}
            text = ""
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        got[index] = text
                    elif line:
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                        if index % 3 == 0 and len(text) > 3:
                            return

        async def all_of_them():
            async with httpx.AsyncClient(base_url=running.url, timeout=WAIT_S) as client:
                await asyncio.gather(*(ask(client, index) for index in range(30)))

        asyncio.run(all_of_them())
        assert {i: got[i] for i in got if i % 3} == {i: expected[i] for i in range(30) if i % 3}
        until(running.is_idle)
        running.pool.check([])


def test_idle_time_warms_the_prefix_cache_where_the_policy_wants_it():
    """A prompt that came twice and was evicted is computed again while nobody asks; then its next request finds it."""
    options = {"scheduling_policy": "speculative_prefill", "speculative_memory_share": 0.9}
    with Running(num_kv_blocks=12, **options) as running:
        often, other = [5] * 81, [9] * 190  # the other one takes every block
        for prompt in (often, often, other):
            assert post(running, prompt=prompt, max_tokens=1).status_code == 200
        speculation = running.engine.scheduler.speculation
        until(lambda: speculation.num_warmed_tokens == 80 and not running.engine.scheduler.has_idle_work)
        answer = running.client.completions.create(model=MODEL, prompt=often, max_tokens=1)
        assert answer.usage.prompt_tokens_details.cached_tokens == 80
        until(running.is_idle)
        running.pool.check([])


# ---- the process ---------------------------------------------------------------------------------


@contextlib.contextmanager
def process(*arguments):
    command = [sys.executable, "-m", "minillm", "serve", "--model", MODEL, "--port", "0", *arguments]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    try:
        line = next(line for line in running.stderr if "http://" in line)
        yield running, line.split("http://")[1].split("/v1")[0]
    finally:
        running.kill()
        running.wait()
        running.stderr.close()


def test_a_signal_lets_answers_finish_and_exits_with_0():
    with process("--shutdown-timeout-s", "60") as (running, address):
        assert address.startswith("127.0.0.1:"), "this machine only, unless told otherwise"
        body = {"prompt": "abc", "max_tokens": 100, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"http://{address}/v1/completions", json=body, timeout=WAIT_S) as response:
            arriving = events(response)
            next(arriving)
            running.send_signal(signal.SIGTERM)
            assert list(arriving)[-1] == "[DONE]"
        assert running.wait(WAIT_S) == 0


def test_what_is_not_finished_at_the_deadline_is_cut_off():
    with process("--shutdown-timeout-s", "1", "--max-model-len", "2048") as (running, address):
        body = {"prompt": "a", "max_tokens": 2000, "n": 60, "stream": True, "ignore_eos": True}
        with sent(address, body) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            running.send_signal(signal.SIGINT)
            assert running.wait(WAIT_S) == 0


def test_a_taken_port_is_one_line():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        result = minillm("serve", "--model", MODEL, "--port", str(port))
    assert result.returncode == 2
    assert f"127.0.0.1:{port}" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_does_not_exist_is_refused(port):
    with pytest.raises(ConfigError, match=f"port {port}"):
        listen("127.0.0.1", port)
