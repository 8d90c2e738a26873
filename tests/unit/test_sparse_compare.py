"""`minillm bench --compare attention`: the table, its ledger line, and the same as JSON."""

import json

import pytest
import torch

from minillm import LLM
from minillm.compare import Comparison, Ledger, in_turns, ratio
from minillm.compare_attention import COLUMNS, NEEDLES, QUICK_METHODS, TEXT, measure, needles, note
from minillm.errors import ConfigError
from tests.unit.command import minillm

COMMAND = ["bench", "--compare", "attention", "--quick", "--model", "random:tiny"]


def bench(*more):
    done = minillm(*COMMAND, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_json_has_every_column_of_every_method_and_the_ledger():
    result = json.loads(bench("--json"))
    assert result["compare"] == "attention" and result["dtype"] in ("float32", "bfloat16")
    assert [row["name"] for row in result["rows"]] == ["dense", *QUICK_METHODS]
    for row in result["rows"]:
        assert set(row) == {"name", *COLUMNS} and None not in row.values()
        assert 0 < row["mass"] <= 1.0001 and 0 < row["kept"] <= 1
    assert set(result["ledger"]) == {"invariant", "wins where", "loses where", "could mislead"}
    assert len(result["notes"]) == len(QUICK_METHODS)


def test_the_text_shows_the_rows_what_columns_mean_and_the_ledger():
    lines = bench().splitlines()
    for start in ("dense ", *QUICK_METHODS, *(f"{heading}:" for heading in COLUMNS)):
        assert any(line.startswith(start) for line in lines), start
    assert [line.split(":")[0] for line in lines[-4:]] == ["invariant", "wins where", "loses where", "could mislead"]


def test_a_comparison_that_is_not_known_is_refused_with_the_known_ones():
    done = minillm("bench", "--compare", "colours")
    assert done.returncode == 2 and "'attention'" in done.stderr


@pytest.fixture(scope="module")
def llm():
    with LLM("random:tiny", dtype="float32") as llm:
        yield llm


def test_a_whole_budget_is_reported_as_dense(llm):
    before = llm.engine.attend
    table = measure(llm, ("sliding_window(4096)", "dynamic_blocks(mass=1)"), limit=100, repeats=1)
    assert llm.engine.attend is before
    dense = table.rows[0]
    for row in table.rows[1:]:
        assert row["kept"] == row["random"] == 1.0 and row["error"] == pytest.approx(0, abs=1e-5)
        assert row["mass"] == pytest.approx(1.0, abs=1e-5)
        assert row["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-5)
        assert row["needles"] == dense["needles"]


def test_an_engine_that_is_sparse_itself_is_no_dense_side():
    with (
        LLM("random:tiny", attention="lsh", dtype="float32") as llm,
        pytest.raises(ConfigError, match="'lsh' is sparse"),
    ):
        measure(llm, QUICK_METHODS, limit=50, repeats=1)


def test_needles_stand_in_the_prompt_behind_which_they_are_asked_for(llm, monkeypatch):
    prompts = []

    def caught(model, ids, attend):
        prompts.append(llm.tokenizer.decode(ids))
        return torch.zeros(1, llm.engine.model.config.hidden_size)

    monkeypatch.setattr("minillm.compare_attention.forward", caught)
    text = TEXT.read_text(encoding="utf-8")
    for limit in (900, 100_000):
        prompts.clear()
        needles(llm, text, llm.engine.attend, limit)
        for prompt, (fact, question, answer) in zip(prompts, NEEDLES, strict=True):
            assert fact == f"{question}{answer}."
            assert prompt.endswith(question) and prompt.count(fact) == 1 and answer not in text
            assert len(llm.tokenizer.encode(prompt)) <= limit


def test_the_words_follow_the_figures():
    row = {"name": "x", "kept": 0.5, "mass": 0.5, "random": 0.6, "random+": 0.7, "from-to": "1.01-3.00"}
    assert note(row).startswith("x does not beat random keys in attention mass; its first token comes later")
    assert "but not beside" in note(row | {"random": 0.4})
    assert "also beside" in note(row | {"random": 0.3, "random+": 0.4})
    assert note(row | {"kept": 1.0}).startswith("x keeps every key; its first")
    assert "comes sooner than" in note(row | {"from-to": "0.50-0.99"})
    assert "in some rounds" in note(row | {"from-to": "0.50-1.10"})


def test_runs_take_turns_and_the_first_round_is_thrown_away():
    order, clock = [], iter(range(100))

    def run(name):
        return lambda: order.append(name) or float(next(clock))

    taken = in_turns({"a": run("a"), "b": run("b")}, repeats=3)
    assert order == ["a", "b"] * 4
    assert taken == {"a": [2.0, 4.0, 6.0], "b": [3.0, 5.0, 7.0]}
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0


def test_a_column_without_meaning_for_a_way_is_a_dash():
    table = Comparison(
        "n", {"a": 1}, {"c": (".1f", "means")}, [{"name": "x", "c": None}], [], Ledger("i", "w", "l", "m")
    )
    assert any(line.split() == ["x", "-"] for line in table.lines())
    assert table.as_dict()["rows"] == [{"name": "x", "c": None}]
