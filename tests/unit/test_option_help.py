"""`--help` says of every option what it is for, and the defaults that it promises are those of the engine."""

import re
from dataclasses import fields

import pytest

from minillm.cli import main
from minillm.config import EngineConfig
from minillm.pipeline.stages import CHUNK_ROWS
from minillm.resources import CPU_CACHE_LIMIT, CPU_CACHE_SHARE
from minillm.sampling_params import SamplingParams
from minillm.scheduler.interleaved import MAX_OVERTAKEN_STEPS
from minillm.scheduler.similar_length import MAX_GROUP_WAIT_STEPS
from minillm.scheduler.speculative_prefill import CHUNK_SIZE, MEMORY_SHARE
from minillm.simulator.command import ENGINE_OPTIONS

ALL = {field.name: field for field in (*fields(EngineConfig), *fields(SamplingParams))}  # --seed is the request's


def said_of(command, capsys):
    """{flag: what the command's help says of it}"""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = re.split(r"\n\s*(?=--[\w-]+)", capsys.readouterr().out.split("options:", 1)[1])
    rows = (row.split(None, 1) for row in said if row.startswith("--"))
    return {flag.rstrip(","): " ".join(rest[0].split()) for flag, *rest in rows}


@pytest.mark.parametrize(
    ("command", "names"),
    [("generate", ALL), ("chat", ALL), ("serve", [f.name for f in fields(EngineConfig)]), ("simulate", ENGINE_OPTIONS)],
)
def test_every_flag_of_an_option_says_what_the_option_is_for(command, names, capsys):
    said = said_of(command, capsys)
    shown = [name for name in names if f"--{name.replace('_', '-')}" in said]
    assert len(shown) > 15
    for name in shown:
        assert ALL[name].metadata["help"] in said[f"--{name.replace('_', '-')}"]


@pytest.mark.parametrize("field", ALL.values(), ids=ALL.keys())
def test_an_option_says_more_than_its_name_and_what_it_does_when_it_is_left_out(field):
    sentence = field.metadata["help"]
    assert len(sentence.split()) >= 4 and sentence == sentence.strip() and not sentence.endswith(".")
    if field.default is None and field.name != "prefill_chunk_size":  # another name for an option that says it
        assert "; default" in sentence


@pytest.mark.parametrize(
    ("name", "default"),
    {
        "pipeline_chunk_size": CHUNK_ROWS,
        "max_group_wait_steps": MAX_GROUP_WAIT_STEPS,
        "max_overtaken_steps": MAX_OVERTAKEN_STEPS,
        "speculative_chunk_size": CHUNK_SIZE,
        "speculative_memory_share": MEMORY_SHARE,
        "kv_cache_memory_bytes": f": {CPU_CACHE_SHARE:.0%} of a CPU's free memory, at most {CPU_CACHE_LIMIT >> 30} GiB",
    }.items(),
)
def test_a_default_that_is_chosen_elsewhere_is_said_as_it_is_there(name, default):
    words = default if isinstance(default, str) else f" {default}"
    assert f"; default{words}" in ALL[name].metadata["help"]
