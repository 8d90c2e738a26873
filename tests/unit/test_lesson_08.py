"""Lesson 08 says what is true: sums by hand, equality for any tile, texts without close calls, a quoted record."""

import ast
import contextlib
import functools
import io
import math
import random
import re
from fractions import Fraction

import nbformat
import pytest
import torch

from minillm import LLM, costs
from minillm.attention.naive import attention as oracle
from minillm.course.build.addresses import ROOT
from minillm.course.engine_so_far import STAGES, boot
from minillm.course.gauges import requests_that_fit
from minillm.devices import find_device
from minillm.estimate import shape_of
from minillm.roofline import predict_ttft

MARGIN = 0.5  # logits between the chosen token and the next best one
LESSON = nbformat.read(ROOT / "notebooks" / "08_online_softmax.ipynb", as_version=4)
CELLS = {cell.id: cell for cell in LESSON.cells}
PROSE = " ".join(" ".join(cell.source.split()) for cell in LESSON.cells if cell.cell_type == "markdown")


def said(cell):
    return "".join(o.get("text", "") for o in CELLS[cell].outputs if o.output_type == "stream")


@pytest.fixture(scope="module")
def lesson():
    """The functions that the lesson defines."""
    names = {"math": math, "torch": torch}
    for cell in ("loop", "tiles", "forget", "flash", "equal"):
        body = [node for node in ast.parse(CELLS[cell].source).body if isinstance(node, ast.FunctionDef)]
        exec(compile(ast.Module(body, []), cell, "exec"), names)
    return names


# ---- on paper --------------------------------------------------------------------------------------


def test_the_numbers_on_paper_are_those_of_exact_fractions():
    rows = re.findall(r"\| (\d) \| ([\d ]+) \| ([\d ]+) \|", CELLS["hand"].source)
    tiles = [tuple([int(x) for x in column.split()] for column in row[1:]) for row in rows]
    scores, values = (sum(column, []) for column in zip(*tiles, strict=True))
    listed = ast.parse(CELLS["loop"].source).body[:2]
    assert [ast.literal_eval(node.value) for node in listed] == [scores, values] and len(scores) == 16
    told = re.findall(r"Sum (\d+),? mix (\S+ = )?", CELLS["hand"].source)
    assert len(told) >= 2
    for number in range(1, 5):
        s, v = scores[: 4 * number], values[: 4 * number]
        powers = [Fraction(2) ** (x - max(s)) for x in s]
        total, mix = sum(powers), sum(p * x for p, x in zip(powers, v, strict=True))
        assert f"after {4 * number:>2} keys: m = {max(s)}, sum {total}, mix {mix}\n" in said("loop")
        (bullet,) = re.findall(rf"\* \*\*Tile {number}\*\*: (.*?)(?=\n\*|\n\n)", CELLS["hand"].source, re.DOTALL)
        numbers = re.findall(r"\d+", bullet.replace("*", ""))
        assert str(total) in numbers and str(mix) in numbers, bullet
    assert mix / total == 6 and "24 / 4 = **6**" in PROSE and said("loop").endswith("in one pass 6, all at once 6\n")


def test_the_two_halves_merge_on_paper_as_the_text_says():
    halves = [
        ([3, 2, 2, 3, 2, 1, 0, 0], [4, 8, 0, 4, 8, 8, 0, 16]),
        ([5, 4, 3, 3, 3, 4, 2, 2], [10, 4, 8, 0, 8, 4, 8, 0]),
    ]
    weights = [sum(2**s for s in scores) for scores, _ in halves]
    outs = [
        Fraction(sum(2**s * v for s, v in zip(*half, strict=True)), w) for half, w in zip(halves, weights, strict=True)
    ]
    assert weights == [32, 96] and outs == [5, Fraction(19, 3)]
    assert sum(w * o for w, o in zip(weights, outs, strict=True)) / 128 == 6
    for part in ("20 / 4 = 5", "= 32", "19 / 3", "= 96", "(32 · 5 + 96 · 19/3) / 128 = **6**"):
        assert part in PROSE


# ---- the learner's part ------------------------------------------------------------------------------


def test_the_learners_part_has_at_most_forty_lines():
    parts = [node for cell in ("tiles", "flash") for node in ast.parse(CELLS[cell].source).body]
    lengths = {n.name: n.end_lineno - n.lineno + 1 for n in parts if isinstance(n, ast.FunctionDef)}
    assert lengths["absorb"] + lengths["flash_attention"] <= 40
    assert "thirty lines" in PROSE and abs(lengths["absorb"] + lengths["flash_attention"] - 30) <= 3


@pytest.mark.parametrize("group", [1, 3])
def test_any_tile_gives_what_the_engine_computes_in_float64(lesson, group):
    """Scores rise along the keys, so that every tile has something to correct."""
    n, tile = random.randint(1, 20), random.randint(1, 25)
    S = n + random.randint(0, 20)
    q, k, v = (torch.randn(rows, h, 8, dtype=torch.float64) for rows, h in ((n, 2 * group), (S, 2), (S, 2)))
    q = q.abs()
    k = k + 2 * torch.arange(S, dtype=torch.float64)[:, None, None]
    expected = oracle(q, k, v)[0]
    for name, options in (("flash_attention", {"tile": tile}), ("whole_matrix", {})):
        torch.testing.assert_close(lesson[name](q, k, v, **options), expected, atol=1e-10, rtol=1e-9)
    forgot = lesson["flash_attention"](q, k, v, tile=tile, absorb=lesson["forgetful"])
    assert torch.allclose(forgot, expected) == (tile >= S)  # one tile has nothing to forget


def test_over_tiles_returns_the_log_sum_exp(lesson):
    q, k, v = (torch.randn(rows, 8, dtype=torch.float64) for rows in (3, 17, 17))
    scores = 40 * q @ k.T / math.sqrt(8)
    out, lse = lesson["over_tiles"](40 * q, k, v, random.randint(1, 17))
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)


def test_equalities_were_printed_as_they_should_be():
    assert said("tiles").count("True") == 8 and said("equal").count("True") == 4
    assert [line.endswith("True") for line in said("forget").splitlines()] == [True, True, True, False]
    assert "whole matrix: 0 of 64" in said("skip") and "tiles of 16: 48 of 64" in said("skip")
    assert f"{4 * 5 // 2} of 16 tiles visited" in said("skip")
    assert [line.endswith("True") for line in said("merge").splitlines()] == [True, False]


# ---- in the model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    with LLM("smollm2-135m-instruct", dtype="float32", num_kv_blocks=32) as llm:
        yield llm


class Spy:
    """A model that notes by how much the best token of each step led."""

    def __init__(self, model):
        self.model, self.margins = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, *inputs, **options):
        logits = self.model.forward(*inputs, **options)
        best = logits.float().topk(2, -1).values
        self.margins.append(float((best[..., 0] - best[..., 1]).min()))
        return logits


def test_no_printed_text_hangs_on_a_close_call(lesson, small):
    names = {}
    exec(CELLS["model"].source.split("question = ")[1].join(["question = ", ""]).split("text =")[0], names)
    template = small.tokenizer.apply_chat_template(names["question"])
    prompt = small.tokenizer.encode(template, add_special_tokens=False)

    def text(attention, count):
        so_far = boot(small, "v5", own={"flash_attention": attention})
        engine = so_far.machine.engine
        engine.model = Spy(engine.model)
        tokens = so_far.generate(prompt, count)
        assert len(engine.model.margins) == count and min(engine.model.margins) > MARGIN, engine.model.margins
        return small.tokenizer.decode(tokens)

    assert said("model").startswith(
        f"{text(lesson['flash_attention'], 8)!r}\nsame tokens as version 4 and as minillm: True"
    )
    wrong = functools.partial(lesson["flash_attention"], absorb=lesson["forgetful"])
    told = [f"tiles of {tile:>2}: {text(functools.partial(wrong, tile=tile), 6)!r}\n" for tile in (64, 16, 8)]
    assert said("forgetful-model") == "".join(told)
    assert len(prompt) <= 64 and "With 64 there is one tile" in PROSE
    assert [("Tokyo" in line) for line in told] == [True, True, False]


# ---- sums ----------------------------------------------------------------------------------------------


def test_the_bytes_of_the_walk_are_counted_right():
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(CELLS["walk"].source.split("ways =")[0], names)
    naive, tiled = names["traffic"](1024), names["traffic"](1024, 128)
    c = shape_of("135m")
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (9, 3, 64)
    assert naive["scores"] == 6 * costs.score_bytes(c, 1024, 4) and tiled["scores"] == 0
    read = sum(128 * (row + 1) for row in range(8))  # keys in front of each tile of queries
    assert tiled["K"] == tiled["V"] == read * 3 * 64 * 4 and naive["K"] == 1024 * 3 * 64 * 4
    assert tiled["K"] == 4.5 * naive["K"] and "4.5 times as often" in PROSE
    totals = [sum(ways.values()) / 1e6 for ways in (naive, tiled)]
    assert said("walk") == (
        f"tile_walk: 36 of 64 tiles visited, 28 skipped; whole matrix {totals[0]:.0f} MB, in tiles {totals[1]:.0f} MB\n"
    )
    assert "136 tiles of 64" in PROSE and 16 * 17 // 2 == 136 and 64 * 65 // 2 == 2080 and "2,080 rounds" in PROSE
    assert round(9 * 1024**2 * 4 / 1e6) == 38 and "three copies of 38 MB" in PROSE


def test_the_gigabytes_under_the_gauges_are_those_of_the_model():
    c = shape_of("135m")
    scores = {n: sum(op.scores for op in costs.operations(c, [(n, n)], 4, naive=True)) / 1e9 for n in (512, 4096)}
    assert round(scores[512], 1) == 1.7 and round(scores[4096]) == 109
    assert "were 1.7 GB, and of 4,096 tokens they would be 109" in PROSE
    assert round(63 * costs.weight_bytes(c, 4) / 1e9) == 34 and "34 are weights: 63 later tokens" in PROSE
    before, after = (float(x) for x in re.search(r"bytes moved +(\S+) GB -> +(\S+) GB", said("gauges")).groups())
    assert round(before) == 38 and round(100 * (1 - after / before)) == 5 and "only by 5%" in PROSE
    fit = requests_that_fit(STAGES[4])
    assert STAGES[4].key == "v5" and re.search(rf"requests that fit +\d+ -> +{fit}  same", said("gauges"))


def test_the_claims_sum_is_the_roofs_and_the_record_is_quoted_as_it_stands():
    model, gpu = shape_of("7b"), find_device("A100-80GB")
    ratios = {
        n: predict_ttft(model, n, gpu, naive=True) / predict_ttft(model, n, gpu) for n in (512, 2048, 8192, 16_384)
    }
    assert ", ".join(f"{ratio:.2f}x at {n:,}" for n, ratio in ratios.items()) in said("claim")
    file, fields = "benchmarks/results/gpu_h200.json", ("H200", "bfloat16")
    assert file in CELLS["record"].source and all(field in said("record") for field in fields)
    for line in said("record").splitlines() + said("guess").splitlines()[:-1]:
        assert line.startswith("~ "), line
