"""`minillm bench --compare pipeline`: the rows, what they say, and that the engine is as it was afterwards."""

import json
import time
from dataclasses import replace

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.compare_pipeline import COLUMNS, QUICK, measure, notes_of
from minillm.compare_pipeline_rows import Sizes, characters, nats_from, slowly, timed
from minillm.errors import ConfigError
from minillm.perplexity import JARGON_FILE
from tests.unit.command import minillm

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM("random:tiny", dtype="float32", num_kv_blocks=64) as llm:
        yield llm


def test_every_way_stands_beside_its_plain_one_and_the_engine_is_as_it_was(llm):
    model, threads = llm.engine.model, torch.get_num_threads()
    before = llm.generate("as it was", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    table = measure(llm, replace(QUICK, chunks=(64, 1024)))
    assert llm.engine.model is model and torch.get_num_threads() == threads
    assert llm.generate("as it was", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before
    rows = {row["name"]: row for row in table.rows}
    for row in table.rows:
        assert set(row) == {"name", *COLUMNS} and row["TTFT ms"] > 0
    for name in ("whole text", "slow text, awaited", "1 process, 1 thread", "whole model"):
        assert rows[name]["TTFT x"] == 1.0
    assert rows["2 stages, chunks of 64"]["bubble"] == pytest.approx(1 / 4)  # three chunks
    assert rows["2 stages, chunks of 1024"]["bubble"] == 1 / 2 and rows["2 stages, chunks of 1024"]["ideal x"] == 1
    exact = rows["exit after 1 of 2"]  # in float32
    assert exact["same first"] == 1.0 and exact["KL"] < 1e-6 and exact["needles"] == rows["whole model"]["needles"]
    assert 0 < exact["ideal x"] < 1 and rows["whole model"]["ideal x"] == 1
    assert len(table.notes) == 4


def test_the_command_prints_json():
    done = minillm("bench", "--compare", "pipeline", "--quick", "--json", "--model", "random:tiny")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["compare"] == "pipeline" and len(result["rows"]) >= 8
    assert set(result["ledger"]) == {"invariant", "wins where", "loses where", "could mislead"}


@pytest.mark.parametrize("options", [{"early_exit_layer": 1}, {"pipeline_parallel_size": 2}])
def test_an_engine_that_is_pipelined_itself_is_no_plain_side(options):
    with LLM("random:tiny", dtype="float32", num_kv_blocks=8, **options) as llm:
        with pytest.raises(ConfigError, match="whole model in one process"):
            measure(llm, Sizes())


def test_a_slow_text_is_the_text_and_takes_its_time():
    text = "".join(map(str, range(300)))
    start = time.perf_counter()
    assert "".join(slowly(text, 0.2)) == text
    assert time.perf_counter() - start >= 0.2
    assert "".join(slowly("ab", 0.0)) == "ab"


def test_so_many_characters_are_about_so_many_tokens(llm):
    text = JARGON_FILE.read_text(encoding="utf-8")
    for tokens in (50, 500):
        assert 0.7 * tokens < len(llm.tokenizer.encode(text[: characters(llm, text, tokens)])) <= tokens


def test_a_divergence_is_that_of_the_sum_by_hand():
    p, q = torch.rand(3, 7).softmax(-1), torch.rand(3, 7).softmax(-1)
    by_hand = [sum(float(a * (a / b).log()) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    assert nats_from(p.log(), q.log()).tolist() == pytest.approx(by_hand, abs=1e-6)
    assert nats_from(p.log() + 3, p.log()).abs().max() < 1e-6


def test_the_words_follow_the_figures():
    def row(name, x, **more):
        return timed(name, [x, x], [1.0, 1.0]) | more

    whole = row("whole model", 1.0, KL=0.0, **{"same first": 1.0})
    half = row("exit after 2 of 4", 0.6, KL=1.5, **{"same first": 0.5})
    last = row("exit after 3 of 4", 0.8, KL=0.001, **{"same first": 1.0})
    (note,) = notes_of([whole, half, last])
    assert "exit after 3 of 4 layers takes 0.80 x" in note and note.endswith("90% is exit after 3 of 4, 0.80 x")
    (note,) = notes_of([whole, half, last | {"same first": 0.7}])
    assert note.endswith("no exit reaches 90%")

    alone, both = row("1 process, 1 thread", 1.0), row("1 process, 2 threads", 0.55)
    few = row("2 stages, chunks of 512", 0.9, idle=0.44, bubble=0.33)
    many = row("2 stages, chunks of 64", 0.7, idle=0.29, bubble=0.1)
    (note,) = notes_of([alone, both, few, many])
    assert "chunks of 64, take 0.70 x" in note and "idle for 29.0% where the bubble alone would be 10.0%" in note
    assert note.endswith("2 threads of one process take 0.55 x")
    assert "of one process" not in notes_of([alone, few])[0]
