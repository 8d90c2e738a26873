"""`minillm bench --compare precision`: the table beside numbers computed another way, and its words."""

import json
from dataclasses import replace

import pytest
import torch

from minillm import LLM
from minillm.compare_precision import COLUMNS, QUICK, ROUNDED, Sizes, measure, note
from minillm.perplexity import JARGON_FILE
from tests.unit.command import minillm

COMMAND = ["bench", "--compare", "precision", "--quick", "--model", "random:tiny"]
KV_VALUES = 2 * 2 * 2 * 16  # K and V of 2 layers, 2 heads of 16


def bench(*more):
    done = minillm(*COMMAND, *more)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def table():
    with LLM("random:tiny", dtype="float32") as llm:
        return measure(llm, QUICK)


@pytest.fixture(scope="module")
def rows(table):
    return {row["name"]: row for row in table.rows}


def test_the_json_has_every_way_and_every_column_and_progress_goes_to_stderr():
    done = bench("--json")
    result = json.loads(done.stdout)
    names = [row["name"].removesuffix(" (emulated)") for row in result["rows"]]
    assert names == ["fp32", "bf16", *ROUNDED] and result["compare"] == "precision"
    for row in result["rows"]:
        assert set(row) == {"name", *COLUMNS}
        assert row["name"].startswith("fp8") is ("emulated" in row["name"]) is (row["TTFT x"] is None)
    assert set(result["ledger"]) == {"invariant", "wins where", "loses where", "could mislead"}
    assert "int4, KV int8: 100%" in done.stderr


def test_bytes_are_those_of_the_formats(rows):
    with LLM("random:tiny", dtype="bfloat16", quantization="none") as llm:
        plain = sum(llm.engine.model.num_weight_bytes.values()) / 1e6
    assert rows["bf16"]["weights MB"] == pytest.approx(plain)
    assert rows["int4"]["weights MB"] < rows["int8"]["weights MB"] < plain < rows["fp32"]["weights MB"]
    eight_bits = KV_VALUES * (1 + 4 / 16)
    for name, expected in {"fp32": 4 * KV_VALUES, "bf16": 2 * KV_VALUES, "KV int8": eight_bits}.items():
        assert rows[name]["KV B/token"] == expected
    assert rows["KV fp8"]["KV B/token"] == rows["int4, KV int8"]["KV B/token"] == eight_bits


def test_quality_is_that_of_the_engine_s_own_scores_beside_fp32(rows):
    """One window over one window, so that the mean of the table is a plain mean; logits of steps from `generate`."""
    assert rows["fp32"]["nats"] == rows["fp32"]["error"] == 0 and rows["fp32"]["argmax"] == 1
    sizes = replace(QUICK, text=QUICK.window + 1)
    options = {"fp32": dict(dtype="float32"), "KV fp8": dict(dtype="bfloat16", kv_cache_dtype="fp8")}
    losses, best = {}, {}
    for name, opened in options.items():
        with LLM("random:tiny", quantization="none", **opened) as llm:
            ids = llm.tokenizer.encode(JARGON_FILE.read_text(encoding="utf-8"))[: sizes.text]
            first, last = llm.score(ids[:-1]), llm.score(ids[sizes.stride :])[-1]
            losses[name] = -(sum(first) + last) / (len(ids) - 1)
            steps = llm.logits(ids[:-1], sizes.window - sizes.steps, step=1)
            best[name] = torch.cat([logits.argmax(-1) for logits, _ in steps])
            if name == "fp32":
                measured = {row["name"]: row for row in measure(llm, sizes, ["KV fp8"]).rows}
    assert set(measured) == {"fp32", "bf16", "KV fp8"}
    assert measured["KV fp8"]["nats"] == pytest.approx(losses["KV fp8"] - losses["fp32"], abs=1e-5)
    same = float((best["KV fp8"] == best["fp32"]).float().mean())
    assert measured["KV fp8"]["argmax"] == pytest.approx(same)
    assert measured["KV fp8"]["error"] > 0


def test_a_type_that_does_not_run_here_is_a_note_and_not_a_row(table):
    if not torch.cuda.is_available():
        assert "fp16" not in {row["name"] for row in table.rows}
        assert table.notes[-1].startswith("fp16 does not run here: dtype='float16'")


def test_a_model_for_short_prompts_gets_shorter_ones():
    with LLM("random:tiny", dtype="bfloat16", max_model_len=100) as llm:
        table = measure(llm, replace(Sizes(), text=300, repeats=1), [])
    assert table.setting["windows"] == "5 of 100" and table.setting["prompt"] == 68
    assert table.setting["decode steps"] == 50


def test_16_bits_stand_beside_themselves(rows):
    assert rows["bf16"]["TTFT x"] == rows["bf16"]["TPOT x"] == 1


def test_the_words_follow_the_figures():
    row = {"name": "x", "nats": 0.01, "± nats": 0.004, "spread": {"first token": (1.01, 2.0), "decode": (0.4, 0.99)}}
    assert note(row, "bf16") == (
        "x: first token later (1.01-2.00 x) and decode sooner (0.40-0.99 x) than in bf16; "
        "loses 0.0100 nats per token (+0.0100 ± 0.0040)"
    )
    assert "gains 0.0100 nats" in note(row | {"nats": -0.01}, "bf16")
    assert "no loss that this text can show" in note(row | {"± nats": 0.006}, "bf16")
    row["spread"]["decode"] = (0.9, 1.1)
    assert "decode now sooner, now later (0.90-1.10 x)" in note(row, "bf16")
    assert note(row | {"spread": None}, "bf16").startswith("x: its times mean nothing where it is emulated; ")
