"""LLM.generate_from: tokens of the whole text, computed while it arrives, and nothing left behind however it ends."""

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from minillm import LLM, SamplingParams
from minillm.cli import main
from minillm.errors import ConfigError, EngineClosedError, ProducerError, PromptError
from minillm.pipeline import producer as producer_module
from minillm.pipeline.growing import grow
from minillm.tokenizer import Tokenizer
from minillm.tokenizer.bpe import BYTE_TO_CHAR
from tests.unit.tokenizer_oracles import corpus
from tests.unit.two_ranks import WAIT_S, is_alive

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS = dict(dtype="float32", num_kv_blocks=64, max_num_batched_tokens=48)


def open_llm(**options):
    """A random model behind a tokenizer with real words; 64 blocks of 16 tokens."""
    llm = LLM("random:tiny", **{**OPTIONS, **options})
    llm.tokenizer = llm.engine.tokenizer = Tokenizer.train(corpus()[:2], llm.engine.model.config.vocab_size)
    return llm


@pytest.fixture(scope="module")
def llm():
    with open_llm() as llm:
        yield llm
    assert children() == []


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """No block, no process, and no test that waits for ever."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(4 * WAIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        assert_idle(llm)
        assert len(children()) <= 1, "a process that tokenises is left"


def assert_idle(llm):
    pool = llm.engine.scheduler.block_pool
    assert pool.num_free == pool.num_blocks and not llm.engine.has_work
    pool.check([])


def children():
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def text_of(num_words):
    words = "the cat sat on a mat, don't you see? Größe 1234 naïve 中文 x_y(z)".split()
    return " ".join(random.choices(words, k=num_words))


def cut(text, sizes=(1, 2, 5, 30, 200)):
    start = 0
    while start < len(text):
        end = start + random.choice(sizes)
        yield text[start:end]
        start = end


def tokens(output):
    return [completion.token_ids for completion in output.outputs]


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


# ---- the same answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 16, 17, 1000])
def test_tokens_are_those_of_the_whole_text_however_it_is_cut(llm, chunk):
    for num_words in (1, 3, 40, 120):
        text = text_of(num_words)
        llm.reset_prefix_cache()
        (whole,) = llm.generate([text], GREEDY, use_tqdm=False)
        llm.reset_prefix_cache()
        found = llm.generate_from(cut(text), GREEDY, chunk)
        assert found.prompt_token_ids == whole.prompt_token_ids == llm.tokenizer.encode(text)
        assert tokens(found) == tokens(whole) and found.prompt == text
        assert found.num_cached_tokens == 0


def test_a_text_whose_last_characters_have_no_token_is_still_answered():
    """Bytes that a vocabulary lacks are dropped: nothing follows the tokens that were certain before."""
    with open_llm() as llm:
        llm.tokenizer = llm.engine.tokenizer = Tokenizer([char for char in BYTE_TO_CHAR if char != "."], [])
        (whole,) = llm.generate(["one two..."], GREEDY, use_tqdm=False)
        found = llm.generate_from(["one two.", "", ".."], GREEDY, 1)
        assert tokens(found) == tokens(whole) and len(found.prompt_token_ids) == 7


def test_a_text_in_one_piece_a_file_and_a_list_are_read_alike(llm, tmp_path):
    text = text_of(60) + "\nand a second line\n"
    (whole,) = llm.generate([text], GREEDY, use_tqdm=False)
    (tmp_path / "text").write_text(text, encoding="utf-8")
    with open(tmp_path / "text", encoding="utf-8") as file:
        for pieces in (text, [text], file):
            assert tokens(llm.generate_from(pieces, GREEDY)) == tokens(whole)


def test_the_cache_grows_while_the_text_is_incomplete(llm):
    seen = []

    def pieces():
        for _ in range(4):
            yield text_of(25) + " "
            wait_until(lambda: llm.engine.scheduler.running)
            (request,) = llm.engine.scheduler.running
            wait_until(lambda r=request: r.num_computed_tokens >= r.num_tokens > sum(seen[-1:]) and r.is_open)
            seen.append(request.num_computed_tokens)

    output = llm.generate_from(pieces(), GREEDY, chunk_tokens=16)
    assert len(seen) == 4 and seen == sorted(set(seen)), seen
    assert output.metrics.arrival["waited_s"] > 0 and output.metrics.arrival["pieces"] == 4


@pytest.mark.parametrize("chunk", [1, 30])
def test_other_requests_go_on_while_a_text_is_awaited(llm, chunk):
    text, others = text_of(80), [text_of(20), text_of(3)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = [tokens(output)[0] for output in llm.generate([text, *others], params, use_tqdm=False)]
    llm.reset_prefix_cache()

    def pieces():
        yield text[:150]
        wait_until(lambda: any(len(r.token_times) > 20 for r in llm.engine.scheduler.running))
        yield from cut(text[150:])

    streams = [*(llm.stream(prompt, params) for prompt in others), llm.stream_from(pieces(), params, chunk)]
    found = [[], [], []]
    for chunks in itertools.zip_longest(*streams):
        for ids, piece in zip(found, chunks, strict=True):
            ids += piece.token_ids if piece else []
    assert [found[2], *found[:2]] == expected


@pytest.mark.parametrize("policy", ["prefill_first", "interleaved", "speculative_prefill"])
def test_every_policy_that_computes_chunks_gives_the_same_tokens(policy):
    text = text_of(100)
    with open_llm(scheduling_policy=policy) as llm:
        (whole,) = llm.generate([text], GREEDY, use_tqdm=False)
        llm.reset_prefix_cache()
        assert tokens(llm.generate_from(cut(text), GREEDY, 16)) == tokens(whole)
        assert_idle(llm)


def test_siblings_draw_the_same_tokens_from_one_seed(llm):
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=6, ignore_eos=True)
    text = text_of(50)
    (whole,) = llm.generate([text], params, use_tqdm=False)
    assert tokens(llm.generate_from(cut(text), params, 16)) == tokens(whole)


def test_a_prompt_that_finds_no_free_block_gives_its_own_back_and_is_computed_again():
    text = text_of(70)
    with open_llm(num_kv_blocks=24) as llm:
        (whole,) = llm.generate([text], GREEDY, use_tqdm=False)
        assert len(whole.prompt_token_ids) > 12 * 16
        llm.reset_prefix_cache()
        pool = llm.engine.scheduler.block_pool
        taken = []

        def pieces():
            yield text[:200]
            wait_until(lambda: any(r.num_computed_tokens for r in llm.engine.scheduler.running))
            taken.extend(pool.allocate(pool.num_free))
            yield text[200:300]
            wait_until(lambda: llm.engine.scheduler.waiting)
            pool.free(taken)
            yield text[300:]

        output = llm.generate_from(pieces(), GREEDY, 16)
        assert tokens(output) == tokens(whole) and output.metrics.num_preemptions == 1
        assert_idle(llm)


def half_a_text_that_fills_the_pool(llm, text):
    """A stream whose first piece is computed and holds most blocks, a way to let it go on, and what it finds."""
    may_go_on = threading.Event()

    def pieces():
        yield text[:-40]
        assert may_go_on.wait(WAIT_S)
        yield text[-40:]

    return llm.stream_from(pieces(), GREEDY, 16), may_go_on


def test_a_prompt_that_waits_for_its_text_makes_way_for_requests_that_wait_for_blocks():
    text, other = text_of(70), text_of(60)
    with open_llm(num_kv_blocks=22) as llm:
        expected = [tokens(output) for output in llm.generate([text, other], GREEDY, use_tqdm=False)]
        assert all(len(llm.tokenizer.encode(t)) > 11 * 16 for t in (text, other)), "both do not fit"
        llm.reset_prefix_cache()
        stream, may_go_on = half_a_text_that_fills_the_pool(llm, text)
        step, answered = llm.engine.step, []

        def others_come_when_it_stands_still():
            chunks = step()
            if llm.engine.was_idle and not answered:
                answered.append(None)
                answered[0] = tokens(llm.generate([other], GREEDY, use_tqdm=False)[0])
                may_go_on.set()
            return chunks

        llm.engine.step = others_come_when_it_stands_still
        output = list(stream)[-1].output
        assert [tokens(output), answered[0]] == expected and output.metrics.num_preemptions >= 1
        assert_idle(llm)


def test_two_texts_that_do_not_fit_beside_each_other_both_end():
    texts = [text_of(70), text_of(60)]
    with open_llm(num_kv_blocks=22) as llm:
        expected = [tokens(output)[0] for output in llm.generate(texts, GREEDY, use_tqdm=False)]
        llm.reset_prefix_cache()
        streams = [llm.stream_from(cut(text, sizes=(60,)), GREEDY, 16) for text in texts]
        found = [[], []]
        for chunks in itertools.zip_longest(*streams):
            for ids, chunk in zip(found, chunks, strict=True):
                ids += chunk.token_ids if chunk else []
        assert found == expected
        assert_idle(llm)


def test_two_texts_at_once_have_a_process_each_and_the_next_one_finds_it_there(llm):
    texts = [text_of(60), text_of(90)]
    expected = [tokens(output)[0] for output in llm.generate(texts, GREEDY, use_tqdm=False)]
    streams = [llm.stream_from(cut(text), GREEDY, 16) for text in texts]
    found = [[], []]
    for chunks in itertools.zip_longest(*streams):
        for ids, chunk in zip(found, chunks, strict=True):
            ids += chunk.token_ids if chunk else []
    assert found == expected
    two = {child.pid for child in children()}
    assert len(two) == 2
    for text, ids in zip(texts, expected, strict=True):
        assert tokens(llm.generate_from([text], GREEDY)) == [ids]
    assert {child.pid for child in children()} == two
    llm._producer.close()  # the other tests expect one at most
    llm._producer = None


def test_the_figures_of_an_arrival_belong_together(llm):
    output = llm.generate_from(cut(text_of(100)), GREEDY)
    m, arrival = output.metrics, output.metrics.arrival
    assert 0 <= arrival["hidden_s"] <= arrival["tokenize_s"] + 1e-9 and arrival["pieces"] > 1
    assert 0 < arrival["ttft_after_text_s"] <= m.ttft_s
    assert m.tokenize_s + m.queue_s + m.prefill_s == pytest.approx(m.ttft_s)
    assert output.to_dict()["metrics"]["arrival"] == arrival
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].metrics.arrival is None


# ---- the end ---------------------------------------------------------------------------------------


def half_way(llm, then):
    """Pieces of which the first is computed before `then()` happens."""
    yield text_of(60)
    wait_until(lambda: any(r.num_computed_tokens for r in llm.engine.scheduler.running))
    yield from then() or ()


def still_works(llm):
    assert_idle(llm)
    text = text_of(30)
    (whole,) = llm.generate([text], GREEDY, use_tqdm=False)
    assert tokens(llm.generate_from(cut(text), GREEDY)) == tokens(whole)


def test_ctrl_c_while_text_is_awaited(llm):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)

    with pytest.raises(KeyboardInterrupt):
        llm.generate_from(half_way(llm, interrupt), GREEDY, 16)
    still_works(llm)


def test_a_process_that_dies_is_an_error_and_the_next_text_gets_another(llm):
    llm.generate_from("a", GREEDY)
    (victim,) = children()

    def kill():
        victim.kill()
        time.sleep(0.1)
        return [text_of(5)] * 3

    with pytest.raises(ProducerError, match=f"status {-signal.SIGKILL}; start again"):
        llm.generate_from(half_way(llm, kill), GREEDY, 16)
    still_works(llm)

    (victim,) = children()
    victim.kill()  # this time between two texts
    victim.wait()
    still_works(llm)


def test_an_iterator_that_raises_is_told_with_its_error(llm):
    with pytest.raises(PromptError, match="stopped after 1 pieces: ZeroDivisionError") as raised:
        llm.generate_from(half_way(llm, lambda: 1 / 0), GREEDY, 16)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    still_works(llm)


@pytest.mark.parametrize(
    "pieces, says", [([b"x"], "got bytes"), ([None], "NoneType"), (["a\ud800"], "surrogate"), (5, "iter")]
)
def test_what_is_no_text_is_refused(llm, pieces, says):
    with pytest.raises(PromptError, match=says):
        llm.generate_from(pieces, GREEDY)
    still_works(llm)


@pytest.mark.parametrize("pieces", ["", [], [""], ["", ""]])
def test_an_empty_text_is_refused(llm, pieces):
    with pytest.raises(PromptError, match="empty"):
        llm.generate_from(pieces, GREEDY)
    still_works(llm)


TOO_LARGE = "8; shorten it or raise|longer than max_model_len"  # a text that came fast is found to be too long first


@pytest.mark.parametrize(
    "options, says", [({"max_model_len": 256}, "max_model_len=256"), ({"num_kv_blocks": 8}, TOO_LARGE)]
)
def test_a_text_that_never_ends_is_refused_when_it_is_too_long(options, says):
    read = []
    with open_llm(**options) as llm:
        with pytest.raises(PromptError, match=says):
            llm.generate_from((read.append(time.sleep(0.001)) or text_of(10) for _ in itertools.count()), GREEDY, 16)
        with pytest.raises(PromptError, match="shorten it"):
            llm.generate_from(itertools.repeat("as fast as can be. "), GREEDY, 16)
        assert_idle(llm)
        wait_until(lambda: not any(t.name == "minillm-producer" for t in threading.enumerate()))
        before = len(read)
        time.sleep(0.05)
        assert len(read) == before, "the text is read on"
        assert tokens(llm.generate_from("a", GREEDY)) == tokens(llm.generate("a", GREEDY, use_tqdm=False)[0])


@pytest.mark.parametrize("length, fits", [(62, True), (63, True), (64, False), (65, False)])
def test_the_longest_prompt_leaves_room_for_one_token(length, fits):
    with open_llm(max_model_len=64) as llm:
        text = ".".join("a" for _ in range(length))[:length]
        assert len(llm.tokenizer.encode(text)) == length
        if fits:
            assert len(tokens(llm.generate_from(cut(text), GREEDY, 7))[0]) == min(8, 64 - length)
        else:
            with pytest.raises(PromptError, match="max_model_len=64"):
                llm.generate_from(cut(text), GREEDY, 7)
        assert_idle(llm)


def test_leaving_a_stream_and_aborting_it_free_its_blocks(llm):
    for chunk in llm.stream_from(cut(text_of(50)), GREEDY):
        assert chunk.token_ids
        break
    still_works(llm)

    def abort():
        (request,) = llm.engine.scheduler.running
        llm.abort(request.request_id)
        return [text_of(3)]

    assert list(llm.stream_from(half_way(llm, abort), GREEDY, 16)) == []
    still_works(llm)


def test_an_llm_that_is_closed_or_forgotten_leaves_no_process():
    for end in (LLM.close, lambda llm: None):
        llm = open_llm()
        llm.generate_from("one text", GREEDY)
        (process,) = llm._producer._idle
        end(llm)
        if llm.engine.closed:
            with pytest.raises(EngineClosedError):
                llm.generate_from("a", GREEDY)
        del llm
        gc.collect()
        assert process.poll() is not None


SCRIPT = f"""
from itertools import count
import psutil
from minillm import LLM
llm = LLM("random:tiny", **{OPTIONS!r})
def pieces():
    yield "one text "
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    for _ in count():
        input()
llm.generate_from(pieces())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_one_that_started_it(how):
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)
    (child,) = parent.stdout.readline().split()
    os.killpg(parent.pid, how)
    parent.communicate(timeout=WAIT_S)
    assert parent.returncode == -how
    wait_until(lambda: not is_alive(int(child)))


# ---- what is refused before anything starts --------------------------------------------------------


@pytest.fixture
def starts_nothing(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(producer_module.subprocess, "Popen", refuse)


@pytest.mark.parametrize("options", [{"scheduling_policy": "static"}, {"enable_chunked_prefill": False}])
def test_an_engine_that_computes_prompts_whole_says_what_to_do(starts_nothing, options):
    with open_llm(**options, max_model_len=256, max_num_batched_tokens=256) as llm:
        with pytest.raises(ConfigError, match="scheduling_policy='chunked'"):
            llm.generate_from("a", GREEDY)


@pytest.mark.parametrize("chunk", [0, -1, 1.5, None])
def test_chunks_have_at_least_one_token(starts_nothing, chunk):
    with open_llm() as llm, pytest.raises(ConfigError, match="chunk_tokens"):
        llm.generate_from("a", GREEDY, chunk)


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch):
    with open_llm() as llm:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(ProducerError, match="cannot be started"):
            llm.generate_from("a", GREEDY)
        assert_idle(llm)


def test_an_engine_that_found_nothing_to_compute_knows_it_until_something_is_added(llm):
    assert llm.engine.step() == [] and llm.engine.was_idle
    request = llm.engine.make_request([1, 2], GREEDY)
    llm.engine.add(request)
    assert not llm.engine.was_idle
    llm.abort(request.request_id)


def test_growing_a_prompt_that_waits_takes_no_blocks_and_one_that_runs_has_them_at_once(llm):
    request = llm.engine.make_request(llm.tokenizer.encode(text_of(20)), GREEDY)
    request.is_open = True
    llm.engine.add(request)
    grow(llm.engine.scheduler, request, [1] * 5)
    assert request.block_table == []
    while request.num_uncomputed_tokens:
        assert llm.engine.step() == []
    n = request.num_tokens
    grow(llm.engine.scheduler, request, [2] * 33)
    assert len(request.block_table) == -(-(n + 33) // 16) and request.num_prompt_tokens == n + 33
    llm.abort(request.request_id)


# ---- the command -----------------------------------------------------------------------------------


def generate(*args, input=None):
    command = [sys.executable, "-m", "minillm", "generate", "--model", "random:tiny", "--dtype", "float32", *args]
    return subprocess.run(command, capture_output=True, input=input, timeout=120)


def test_the_command_reads_a_file_or_standard_input_as_it_comes(tmp_path, capfd):
    text = "Größe, 中文 and a long tail. " * 9
    file = tmp_path / "a text"
    file.write_text(text, encoding="utf-8")
    flags = ["--temperature", "0", "--max-tokens", "5", "--ignore-eos"]
    base = ["generate", "--model", "random:tiny", "--dtype", "float32", *flags]
    assert main([*base, text]) == 0
    expected = capfd.readouterr().out
    assert main([*base, "--stream-prompt", str(file)]) == 0
    shown = capfd.readouterr()
    assert shown.out == expected and "tokens from 1 pieces" in shown.err
    piped = generate(*flags, "--stream-prompt", "-", input=text.encode())
    assert piped.returncode == 0 and piped.stdout.decode() == expected, piped.stderr.decode()


@pytest.mark.parametrize(
    "args, says",
    [
        ([], "--stream-prompt FILE"),
        (["a prompt", "--stream-prompt", "x"], "--stream-prompt FILE"),
        (["--stream-prompt", "x", "--chat"], "without --chat"),
        (["--stream-prompt", "/no/such/file"], "No such file"),
        (["--stream-prompt", "BINARY"], "UnicodeDecodeError"),
        (["--stream-prompt", "CUT SHORT"], "unexpected end of data"),
    ],
)
def test_the_command_refuses_what_it_cannot_read(args, says, tmp_path, capsys):
    (tmp_path / "BINARY").write_bytes(b"ok \xff\xfe" * 5000)
    (tmp_path / "CUT SHORT").write_bytes("é".encode()[:1])
    args = [str(tmp_path / a) if a in ("BINARY", "CUT SHORT") else a for a in args]
    assert main(["generate", "--model", "random:tiny", *args]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert says in line and len(line) < 500, "the file itself is not part of the message"
