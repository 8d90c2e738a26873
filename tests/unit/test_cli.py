"""The command line as a user types it: in a process of its own where that may matter, else in this one."""

import gc
import json
import subprocess
import sys

import pytest

from minillm import LLM
from minillm.cli import main
from minillm.errors import MinillmError
from tests.unit.command import minillm


def started(*args, input=None):
    command = [sys.executable, "-m", "minillm", *args]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", input=input, timeout=240)


def test_generate_json_has_the_promised_keys_and_the_right_answer():
    done = started("generate", "The capital of France is", "Water boils at", "--json", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["prompt"] for row in rows] == ["The capital of France is", "Water boils at"]
    assert "Paris" in rows[0]["text"]
    for row in rows:
        assert set(row) == {"prompt", "text", "token_ids", "finish_reason", "num_cached_tokens", "metrics"}
        assert len(row["token_ids"]) == 8 and row["finish_reason"] == "length"
        names = {"tokenize_s", "queue_s", "prefill_s", "ttft_s", "tpot_s", "itl_s", "e2e_s", "num_preemptions"}
        assert names <= set(row["metrics"])


def test_generate_takes_engine_options_and_a_seed():
    args = ["generate", "Once", "--model", "random:tiny", "--dtype", "float32", "--json", "--temperature", "1.0"]
    args += ["--seed", "3", "--block-size", "4", "--num-kv-blocks", "64", "--max-num-batched-tokens", "7"]
    first, second = (json.loads(minillm(*args).stdout)[0]["token_ids"] for _ in range(2))
    assert first == second
    assert json.loads(minillm(*args, "--seed", "4").stdout)[0]["token_ids"] != first


@pytest.mark.parametrize("flags", [[], ["--chat"]])
@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None])
@pytest.mark.parametrize("terminal", [True, False])
def test_generate_points_to_chat_where_somebody_looks_and_the_model_knows_messages(
    monkeypatch, capsys, flags, template, terminal
):
    def open_llm(args):
        llm = LLM("random:tiny", num_kv_blocks=8)
        llm.tokenizer.chat_template = template
        return llm

    monkeypatch.setattr("minillm.cli.talk.open_llm", open_llm)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    status = main(["generate", "hello", "--max-tokens", "2", *flags])
    said = capsys.readouterr().err
    assert status == (2 if flags and not template else 0), said
    assert said.count("--chat sends it") == (terminal and template is not None and not flags)


def test_help_tells_the_words_that_an_option_takes(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for line in (
        "auto, none, int8, int4, fp8; default auto",
        "static, iteration, prefill_first, chunked, similar_length, interleaved, speculative_prefill; default chunked",
        "sliding_window, dynamic_blocks, lsh; default auto",
        "only with scheduling policy interleaved",
    ):
        assert line in said, said


def test_chat_streams_an_answer_and_ends_at_the_end_of_input():
    done = started("chat", "--max-tokens", "24", input="Name the capital of France.\n")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_demo_shows_answer_ttft_parts_speed_and_attention():
    done = started("demo")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "tok/s" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TTFT")]
    for part in ("tokenize", "queue", "linear", "attention", "kv write", "lm head", "sample", "other"):
        assert part in line
    assert any(line.startswith("attention") for line in done.stdout.splitlines())


def test_the_garbage_collector_leaves_alone_what_a_command_has_loaded_until_it_ends(monkeypatch, capsys):
    frozen = []
    monkeypatch.setattr("minillm.doctor.report", lambda llm: {"frozen": frozen.append(gc.get_freeze_count())})
    assert main(["doctor", "--model", "random:tiny"]) == 0
    assert frozen[0] > 10_000 and gc.get_freeze_count() == 0


def test_doctor_tells_what_was_chosen_and_why():
    rows = json.loads(minillm("doctor", "--json", "--model", "random:tiny").stdout)
    assert {"device", "dtype", "attention", "kv_cache", "weight_bytes", "torch", "triton"} <= set(rows)


def test_bench_ends_with_one_json_object():
    done = minillm("bench", "--quick", "--model", "random:tiny", "--max-num-seqs", "8")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"ttft_s", "decode_tok_s", "mix"} <= set(result)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--stream-prompt", "no such.txt"], "no such.txt cannot be read: No such"),
        (["hi", "--model", "no/such folder"], "no/such folder"),
        (["hi", "--temperature", "-1"], "temperature"),
        (["hi", "--block-size", "-3"], "block_size=-3"),
        (["hi " * 9000], "2048"),
    ],
)
def test_an_error_is_one_line_on_stderr_with_exit_status_2(args, says):
    done = minillm("generate", "--model", "random:tiny", *args)
    assert_one_line(done, says)


def test_a_comparison_of_one_rank_refuses_two_before_they_start():
    options = ["--model", "random:tiny", "--tensor-parallel-size", "2"]
    assert_one_line(minillm("bench", "--compare", "attention", *options), "one rank")


def test_a_process_ends_with_the_error_and_logs_nothing_beside_it():
    assert_one_line(started("generate", ""), "empty")


def assert_one_line(done, says):
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("minillm: error:") and says in line


def test_debug_lets_the_traceback_through():
    with pytest.raises(MinillmError, match="empty"):
        main(["generate", "", "--model", "random:tiny", "--debug"])
