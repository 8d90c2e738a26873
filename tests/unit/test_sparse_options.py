"""`attention="sliding_window(1024, sinks=4)"`: what is understood, and how the rest is refused."""

import dataclasses
import json
import random

import pytest
import torch

from minillm import LLM
from minillm.attention import choose_attention
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.sparse_options import LSH, METHODS, DynamicBlocks, SlidingWindow, is_sparse, parse
from tests.unit.command import minillm


@pytest.mark.parametrize(
    "text, expected",
    [
        ("sliding_window(1024,sinks=4)", SlidingWindow(1024, 4)),
        (" sliding_window ( 1024 , sinks = 4 ) ", SlidingWindow(1024, 4)),
        ("sliding_window(sinks=4)", SlidingWindow(None, 4)),
        ("sliding_window(7, 2)", SlidingWindow(7, 2)),
        ("dynamic_blocks(mass=0.95,block=64)", DynamicBlocks(0.95, None, 64)),
        ("dynamic_blocks(top=8)", DynamicBlocks(None, 8, 64)),
        ("dynamic_blocks(1)", DynamicBlocks(1)),
        ("lsh(rounds=4,bucket=64)", LSH(4, 64)),
        ("lsh", LSH()),
        ("lsh()", LSH()),
    ],
)
def test_a_method_is_read_from_its_name_and_values(text, expected):
    assert parse(text) == expected
    assert is_sparse(text)
    assert EngineConfig(attention=text).attention == text


def test_what_is_printed_is_read_again():
    methods = [
        SlidingWindow(random.randint(1, 5000), random.randint(0, 9)),
        DynamicBlocks(random.uniform(0.01, 1.0), block=2 ** random.randint(4, 8)),
        DynamicBlocks(top=random.randint(1, 99)),
        LSH(
            random.randint(1, 9),
            random.randint(1, 99),
            2 * random.randint(1, 9),
            random.randint(0, 5),
            random.randint(0, 99),
        ),
    ]
    for method in methods:
        assert parse(str(method)) == method
    assert {type(method) for method in methods} == set(METHODS.values())


@pytest.mark.parametrize(
    "text, message",
    [
        ("sliding_windw(4)", "'sliding_windw' is not one of sliding_window, .*did you mean 'sliding_window'"),
        ("sliding_window(4, sink=1)", "sliding_window has no 'sink', only window, sinks; did you mean 'sinks'"),
        ("sliding_window(4, 1, 2)", "'2' is one value too many; sliding_window takes window, sinks"),
        ("sliding_window(sinks=1, 4)", "'4' stands behind a named value"),
        ("sliding_window(4, window=5)", "window is given twice"),
        ("sliding_window(0)", "window=0 must be an integer of at least 1"),
        ("sliding_window(4.5)", "window=4.5 must be an integer"),
        ("sliding_window(4, sinks=-1)", "sinks=-1 must be an integer of at least 0"),
        ("sliding_window()", "changes nothing: give a window"),
        ("sliding_window", "changes nothing: give a window"),
        ("sliding_window(4", "cannot be read; write it like"),
        ("sliding_window(4))", "cannot be read"),
        ("sliding_window(4,)", "sinks='' is not a number"),
        ("dynamic_blocks", "mass=None and top=None; give one of them"),
        ("dynamic_blocks(mass=0.9, top=3)", "mass=0.9 and top=3; give one of them"),
        ("dynamic_blocks(mass=0)", r"mass=0 is not in \(0, 1\]"),
        ("dynamic_blocks(mass=nan)", r"mass=nan is not in \(0, 1\]"),
        ("dynamic_blocks(mass=95)", r"mass=95 is not in \(0, 1\]"),
        ("dynamic_blocks(top=0)", "top=0 must be an integer of at least 1"),
        ("dynamic_blocks(mass=1, block=48)", "block=48 is not a power of two"),
        ("dynamic_blocks(mass=1, block=8)", "block=8 must be an integer of at least 16"),
        ("lsh(buckets=3)", "buckets=3 must be even"),
        ("lsh(rounds=0)", "rounds=0 must be an integer of at least 1"),
        ("lsh(rounds=x)", "rounds='x' is not a number"),
        ("lsh(rounds=" + "9" * 5000 + ")", "rounds='999.* is not a number"),
        ("lsh(rounds=__import__('os'))", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(attention=text)
    with pytest.raises(ConfigError, match=message):
        choose_attention("cpu", torch.float32, text)


def test_values_are_never_evaluated(monkeypatch):
    for name in ("eval", "exec", "compile"):
        monkeypatch.setattr(f"builtins.{name}", lambda *_: pytest.fail("evaluated"))
    assert parse("lsh(rounds=2)") == LSH(2)
    with pytest.raises(ConfigError):
        parse("lsh(rounds=1+1)")


@pytest.mark.parametrize("text", ["sliding_window(64, sinks=2)", "dynamic_blocks(mass=0.5)", "lsh(rounds=2)"])
def test_the_reason_names_every_option_and_what_decodes(text):
    _, reason = choose_attention("cpu", torch.float32, text)
    assert reason.startswith(str(parse(text)) + ", as asked: prefill")
    assert "decode" in reason and "cpu" in reason
    for field in dataclasses.fields(parse(text)):
        assert getattr(parse(text), field.name) is None or f"{field.name}=" in reason


def test_sinks_alone_need_a_model_with_a_window():
    with pytest.raises(ConfigError, match="this model has none; give one"):
        LLM("random:tiny", attention="sliding_window(sinks=4)")
    with LLM("random:tiny-mistral", attention="sliding_window(sinks=4)") as llm:
        assert llm.reasons["attention"].startswith("sliding_window(sinks=4), as asked")


def test_doctor_prints_the_method_from_the_command_line():
    method = "sliding_window(1024,sinks=4)"
    done = minillm("doctor", "--json", "--model", "random:tiny", "--dtype", "float32", "--attention", method)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attention"].startswith("sliding_window(window=1024, sinks=4), as asked")


def test_the_command_line_refuses_a_wrong_method_in_one_line():
    done = minillm("generate", "hi", "--model", "random:tiny", "--attention", "lsh(round=4)")
    assert done.returncode == 2 and done.stdout == ""
    assert "lsh has no 'round'" in done.stderr and "Traceback" not in done.stderr
