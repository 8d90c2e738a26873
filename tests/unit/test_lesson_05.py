"""Lesson 05 says what is true: sums, margins, forty lines; its cache equals the engine on any cut of a text."""

import ast
import contextlib
import io
import random
import re
from dataclasses import replace

import nbformat
import pytest
import torch

from minillm import LLM, costs
from minillm.course.build.addresses import ROOT
from minillm.course.engine_so_far import STAGES
from minillm.course.gauges import requests_that_fit
from minillm.estimate import shape_of
from minillm.kv_cache import ContiguousKV

MARGIN = 0.5  # logits between the chosen token and the next best one
LESSON = nbformat.read(ROOT / "notebooks" / "05_kv_cache.ipynb", as_version=4)
CELLS = {cell.id: cell for cell in LESSON.cells}
PROSE = " ".join(" ".join(cell.source.split()) for cell in LESSON.cells if cell.cell_type == "markdown")


def said(cell):
    return "".join(o.get("text", "") for o in CELLS[cell].outputs if o.output_type == "stream")


def lesson_on(llm):
    """The names that the lesson defines, with this engine in the place of its own."""
    names = {}
    exec("import functools, math, torch", names)
    for cell in ("attention", "model", "v1", "v2"):
        source = CELLS[cell].source.replace('LLM(dtype="float32")', "given")
        names["given"] = llm
        with contextlib.redirect_stdout(io.StringIO()), torch.inference_mode():
            exec(compile(source, cell, "exec"), names)
    return names


@pytest.fixture(scope="module")
def small():
    with LLM("smollm2-135m-instruct", dtype="float32", num_kv_blocks=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny():
    with LLM("random:tiny", dtype="float32", num_kv_blocks=32) as llm:
        yield llm


# ---- version 2 -----------------------------------------------------------------------------------


def test_version_2_has_at_most_forty_lines():
    lines = [line for line in (CELLS["v1"].source + "\n" + CELLS["v2"].source).splitlines() if line.strip()]
    assert len(lines) <= 40
    names = [node.name for node in ast.parse(CELLS["v2"].source).body]
    assert names == ["Cache", "with_cache"]


def test_a_text_that_is_read_in_any_pieces_has_the_logits_of_the_engine(tiny):
    """The engine's own logits are the oracle: it cuts nothing, and its cache is a different one."""
    names = lesson_on(tiny)
    ids = [random.randrange(tiny.engine.model.config.vocab_size) for _ in range(random.randint(8, 40))]
    expected = torch.cat([rows for rows, _ in tiny.logits(ids, start=1)])  # of the tokens 1 and later
    cache, found, start = names["Cache"](len(ids)), [], 0
    with torch.inference_mode():
        while start < len(ids):
            size = random.randint(1, 6)
            found.append(names["logits"](cache.read(ids[start : start + size])))
            start += size
    assert cache.length == len(ids) and not cache.k.isnan().any()
    torch.testing.assert_close(torch.cat(found)[:-1], expected, atol=1e-4, rtol=1e-4)


def test_both_versions_say_what_the_engine_says(tiny):
    names = lesson_on(tiny)
    ids = [random.randrange(tiny.engine.model.config.vocab_size) for _ in range(9)]
    with torch.inference_mode():
        answers = [list(names[version](ids, 6)) for version in ("without_cache", "with_cache")]
    assert answers[0] == answers[1] and len(answers[0]) == 6


def test_the_loop_and_the_lines_are_attention(tiny):
    """PyTorch's own attention is the oracle, with a mask that is built from positions."""
    names = lesson_on(tiny)
    n, keys = random.randint(1, 5), random.randint(5, 9)
    q, k, v = torch.randn(n, 6, 8), torch.randn(keys, 2, 8), torch.randn(keys, 2, 8)
    seen = torch.arange(keys)[None] <= torch.arange(keys - n, keys)[:, None]
    spread = (x.repeat_interleave(3, dim=1).transpose(0, 1) for x in (k, v))
    right = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *spread, attn_mask=seen)
    for name in ("attention", "attention_by_loop"):
        torch.testing.assert_close(names[name](q, k, v), right.transpose(0, 1), atol=1e-5, rtol=1e-4)


# ---- texts ---------------------------------------------------------------------------------------


def test_no_printed_text_hangs_on_a_close_call(small):
    names = lesson_on(small)
    exec(CELLS["positions"].source.split("start =")[0], names)
    tokenizer = small.tokenizer

    def text(ids, count, make):
        cache, told = names[make](len(ids) + count), []
        for _ in range(count):
            with torch.inference_mode():
                best = names["logits"](cache.read(ids)[-1:])[0].topk(2)
            assert best.values[0] - best.values[1] > MARGIN
            ids = [int(best.indices[0])]
            told += ids
        return tokenizer.decode(told)

    question = ast.literal_eval(CELLS["answer"].source.split("text =")[0].removeprefix("question = "))
    prompt = tokenizer.encode(tokenizer.apply_chat_template(question), add_special_tokens=False)
    answer = text(prompt, 8, "Cache")
    assert said("answer") == (
        f"{answer!r}\n{len(prompt)} prompt tokens, same tokens as version 1 and as minillm: True\n"
    )
    start = "One, two, three,"
    ids = tokenizer.encode(start)
    right, wrong = (text(ids, 3, make) for make in ("Cache", "Forgetful"))
    assert right != wrong
    assert said("positions") == f"Cache     {start}{right}\nForgetful {start}{wrong}\n"
    assert text(ids, 8, "Cache").startswith(right) and said("triangle").startswith("recompute: 6 + 8 tokens")


def test_equalities_were_printed_as_true():
    assert said("attention").count("< 1e-5: True") == 3
    assert said("pieces").count("True") == 4 and "False" not in said("pieces")
    layers = re.findall(r"the same keys in (\d+) of 30 layers", said("licence"))
    assert layers == ["30", "1"]
    assert "those of its first layer and no others" in PROSE


# ---- sums ----------------------------------------------------------------------------------------


def test_the_two_tokens_on_paper_are_right():
    share = torch.tensor([0.0, 1.0]).softmax(0)
    assert [round(100 * float(x)) for x in share] == [27, 73] and "27% to 73%" in PROSE
    assert round(float(share @ torch.tensor([20.0, 30.0])), 2) == 27.31 and "**27.31**" in PROSE
    assert said("loop") == (
        "[20.0, 27.31] with 8 products\n[20.0, 27.31] with 6 products\nkept: keys [0.0, 1.0], values [20.0, 30.0]\n"
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(CELLS["loop"].source, {"math": __import__("math")})
    assert printed.getvalue() == said("loop")


def test_the_claims_count_what_the_cache_holds():
    c = shape_of("135m")
    counted = 2 * c.num_hidden_layers * 26 * c.num_key_value_heads * c.head_dim * 4
    assert f"= {counted:,} bytes" in said("claims") and f"~ measured here: {counted:,} bytes" in said("claims")
    assert "in the first 26 rows of each layer alone: True" in said("claims")
    assert "the same first token: True; 26 rows then, 33 after token 8" in said("claims")


def test_the_rows_of_the_triangle_are_those_of_the_text():
    assert sum(512 + i for i in range(64)) == 34_784 and 512 + 64 - 1 == 575
    assert "34,784 against 575" in PROSE
    assert said("triangle") == (
        f"recompute: 6 + 8 tokens, {sum(6 + i for i in range(8))} rows without a cache, {6 + 8 - 1} with, "
        f"{sum(6 + i for i in range(8)) - 13} were computed again\n"
    )


def test_the_sizes_are_those_of_the_formula():
    for name, model, mib in (("a 7B", "7b", 32.0), ("a 70B", "70b", 8.0), ("this model", "135m", 1.5)):
        c = shape_of(model)
        assert 2 * 2048 * c.num_key_value_heads * c.head_dim * 2 / 2**20 == mib
        (line,) = re.findall(rf"^{name} .*$", said("size"), re.MULTILINE)
        assert f"{mib:.1f} MiB a layer" in line
        assert line.endswith(f"{mib * c.num_hidden_layers:,.0f} MiB in all")
    assert "measured here: 32 MiB; 8 K/V heads of 128: 8 MiB" in said("size")
    groups = [shape_of(m).num_attention_heads // shape_of(m).num_key_value_heads for m in ("135m", "70b")]
    assert groups == [3, 8] and "three for this model, eight for the 70B" in PROSE
    one = ContiguousKV(replace(shape_of("135m"), num_hidden_layers=1), num_slots=1, max_model_len=2048)
    assert f"{one.wasted_bytes([33]) / one.num_bytes:.0%} unused" in said("size")


def test_the_cache_weighs_as_much_as_the_weights_where_the_lesson_says():
    c = shape_of("135m")
    even = int(re.search(r"([\d,]+) tokens weigh as much", said("bytes"))[1].replace(",", ""))
    step, empty = (costs.step_bytes(c, [(1, context)], 4) for context in (even + 1, 1))
    assert step / empty == pytest.approx(2, rel=1e-3)


def test_the_gauges_that_are_counted_are_those_of_the_stages():
    fit = {stage.key: requests_that_fit(stage) for stage in STAGES[:2]}
    assert re.search(rf"requests that fit +{fit['v1']} -> +{fit['v2']}  better", said("gauges"))
    assert fit["v2"] == 6 and "six requests" in PROSE
    for cell in ("measure", "guess", "gauges"):
        for line in said(cell).splitlines():
            assert line.startswith("~ ") or not re.search(r"\d\s?(ms|s|us)\b", line), line
