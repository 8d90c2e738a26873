"""Lesson 06 says what is true: sums, margins, forty lines; its pages equal the engine in any order, size and turn."""

import contextlib
import io
import math
import random
import re

import nbformat
import pytest
import torch

from minillm import LLM, costs
from minillm.course.build.addresses import ROOT
from minillm.course.engine_so_far import STAGES, boot
from minillm.course.gauges import requests_that_fit
from minillm.errors import NumericsError
from minillm.estimate import shape_of

MARGIN = 0.5  # logits between the chosen token and the next best one
LESSON = nbformat.read(ROOT / "notebooks" / "06_pages.ipynb", as_version=4)
CELLS = {cell.id: cell for cell in LESSON.cells}
PROSE = " ".join(" ".join(cell.source.split()) for cell in LESSON.cells if cell.cell_type == "markdown")


def said(cell):
    return "".join(o.get("text", "") for o in CELLS[cell].outputs if o.output_type == "stream")


def run(names, *cells):
    """Run these cells of the lesson in `names`; returns what they print."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, torch.inference_mode():
        for cell in cells:
            exec(compile(CELLS[cell].source, cell, "exec"), names)
    return printed.getvalue()


def lesson_on(llm):
    """The names that the lesson defines, with this engine in the place of its own."""
    names = {"given": llm}
    exec("import functools, math, torch", names)
    source = CELLS["model"].source.replace('LLM(dtype="float32")', "given")
    exec(compile(source, "model", "exec"), names)
    run(names, "loop", "slots", "v3")
    for cell, part in (("together", "prompts ="), ("bug", "(alone,) =")):
        exec(compile(CELLS[cell].source.split(part)[0], cell, "exec"), names)
    return names


@pytest.fixture(scope="module")
def small():
    with LLM("smollm2-135m-instruct", dtype="float32", num_kv_blocks=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny():
    with LLM("random:tiny", dtype="float32", num_kv_blocks=32) as llm:
        yield llm


def random_ids(llm, n):
    return [random.randrange(llm.engine.model.config.vocab_size) for _ in range(n)]


# ---- version 3 -----------------------------------------------------------------------------------


def test_version_3_has_at_most_forty_lines():
    formula = CELLS["slots"].source.split("def slots_of")[1].split("\n\n")[0]
    lines = [line for line in (formula + "\n" + CELLS["v3"].source).splitlines() if line.strip()]
    assert len(lines) <= 40


@pytest.mark.parametrize("size", [1, 4, 5, 16])
def test_texts_that_take_turns_in_one_memory_have_the_logits_of_the_engine(tiny, size):
    """The engine's own logits are the oracle: one text at a time, and a cache that is not the lesson's."""
    names = lesson_on(tiny)
    memory = names["Pages"](number=math.ceil(30 / size) * 2 + 1, size=size)
    random.shuffle(memory.free)
    with torch.inference_mode():
        gone = names["Text"](memory)
        gone.read(random_ids(tiny, 20))
        gone.end()
        texts = [(random_ids(tiny, random.randint(8, 30)), names["Text"](memory), []) for _ in range(2)]
        while waiting := [t for t in texts if t[1].length < len(t[0])]:
            ids, text, found = random.choice(waiting)
            piece = ids[text.length : text.length + random.randint(1, 6)]
            found.append(names["logits"](text.read(piece)))
        for ids, text, found in texts:
            expected = torch.cat([rows for rows, _ in tiny.logits(ids, start=1)])  # of the tokens 1 and later
            torch.testing.assert_close(torch.cat(found)[:-1], expected, atol=1e-4, rtol=1e-4)
            assert len(text.table) == math.ceil(len(ids) / size)
    held = {page for _, text, _ in texts for page in text.table}
    assert len(held) == sum(len(text.table) for _, text, _ in texts)
    assert held | set(memory.free) == set(range(len(memory.free) + len(held)))


def test_a_slot_is_found_by_walking_through_the_pages(tiny):
    names, size = lesson_on(tiny), random.randint(1, 7)
    table = random.sample(range(50), 6)
    walked = [(page, offset) for page in table for offset in range(size)]
    length = random.randint(5 * size + 1, 6 * size)
    slots = names["slots_of"](torch.tensor(table), torch.arange(length), size).tolist()
    assert [divmod(slot, size) for slot in slots] == walked[:length]
    assert names["slots_by_loop"](table, length, size) == slots


def test_the_formula_runs_in_stage_v3_and_a_wrong_one_would_be_seen(tiny):
    slots_of, prompts = lesson_on(tiny)["slots_of"], [random_ids(tiny, n) for n in (5, 16, 33)]
    own = boot(tiny, "v3", also={"slot_mapping": slots_of})
    expected = [boot(tiny, "v2", {}).generate(ids, 5) for ids in prompts]
    assert [own.generate(ids, 5) for ids in prompts] == expected
    assert own.stamp == "yours" and own.parts["slot_mapping"].calls == 15
    wrong = boot(tiny, "v3", also={"slot_mapping": lambda table, positions, size: positions % size})
    with contextlib.suppress(NumericsError):  # it may read rows that nobody wrote, which are NaN
        assert [wrong.generate(ids, 5) for ids in prompts] != expected


def test_what_a_notebook_defines_lies_over_what_is_given_and_has_to_be_a_part(tiny):
    def first(table, positions, size):
        raise AssertionError("this one is covered")

    own = {"slot_mapping": first, "hash_block": lambda parent, tokens: 0}
    so_far = boot(tiny, "v4", own, also={"slot_mapping": lesson_on(tiny)["slots_of"]})
    assert so_far.generate([1, 2, 3], 2) and so_far.parts["hash_block"]
    with pytest.raises(ValueError, match="v2 has no part slot_mapping; its parts are causal_mask"):
        boot(tiny, "v2", also={"slot_mapping": first})


# ---- texts ---------------------------------------------------------------------------------------


def test_no_printed_text_hangs_on_a_close_call(small):
    names, margins = lesson_on(small), []
    prompts = [names["prompt_of"](f"What is the capital of {land}?") for land in ("France", "Japan")]
    logits, right = names["logits"], []

    def noted(x):
        rows = logits(x)
        best = rows.topk(2).values
        margins.extend((best[:, 0] - best[:, 1]).tolist())
        return rows

    names["logits"] = noted
    with torch.inference_mode():
        for line, ids in zip(said("together").splitlines(), prompts, strict=False):
            right.append(line.split(" 32 tokens in pages ")[0])
            answer = small.tokenizer.encode(right[-1])
            text = names["Text"](names["Pages"](8, 4))
            assert noted(text.read(ids + answer[:-1])[-7:]).argmax(-1).tolist() == answer
        memory = names["Pages"](16, 4)
        mixed = names["in_turn"]([names["WithoutTable"](memory) for _ in prompts], prompts, 7)
    assert len(margins) == 28 and min(margins) > MARGIN
    france, japan = right
    assert [small.tokenizer.decode(tokens) for tokens in mixed] == [japan, japan] and france != japan
    assert said("bug") == f"alone:   {france}\nin turn: {japan}\nin turn: {japan}\n"
    assert "same tokens as minillm: True" in said("together")
    assert {len(ids) for ids in prompts} == {26} and "Their 26 tokens take 7 pages of 4" in PROSE


def test_equalities_were_printed_as_true():
    assert said("again").count("< 1e-3: True") == 3 and "False" not in said("again")


# ---- sums ----------------------------------------------------------------------------------------


def test_the_story_on_paper_is_the_one_in_the_loop():
    names = {}
    assert run(names, "loop") == said("loop")
    lengths, size = names["lengths"], names["size"]
    needed = [math.ceil(lengths[name] / size) for name in "acdefg"]
    assert list(lengths.values()) == [13, 8, 11, 7, 4, 13] and "texts of 13, 8, 11, 7, 4 and 13 tokens" in PROSE
    assert f"{' + '.join(map(str, needed))} = 16 pages" in PROSE and sum(needed) == 64 // size
    unused = [-n % size for n in lengths.values()]
    assert (
        sum(unused) == 8 and max(unused) == 3 and "56 hold a token. The other 8 lie in last pages, at most 3" in PROSE
    )
    pages = [page for table in names["tables"].values() for page in table]
    assert sorted(pages) == list(range(16)) and not names["free"]
    assert "Pages 2 and 8 once were b's; now they hold the ends of g and a." in PROSE
    assert names["tables"]["g"][-1] == 2 and names["tables"]["a"] == [0, 1, 7, 8]
    assert "in the table [0, 1, 7, 8], which is page 7" in PROSE
    assert names["tables"]["a"][9 // 4] * 4 + 9 % 4 == 29 and "= **29** of the cache" in PROSE
    names["torch"] = torch
    assert run(names, "slots") == said("slots")


def test_unused_rows_and_entries_are_those_of_the_lengths():
    names = {"torch": torch, "math": math}
    exec(CELLS["serve"].source.split("def serve")[0], names)  # draws from the same generator
    assert run(names, "sizes") == said("sizes")
    tokens = names["tokens"]
    assert len(tokens) == 22 and all(288 <= n <= 768 for n in tokens)
    for size in (1, 4, 16, 64, 256, 2048):
        unused, entries = sum(-n % size for n in tokens), sum(math.ceil(n / size) for n in tokens)
        share = unused / (unused + sum(tokens))
        line = rf"pages of +{size}: +{unused:,} rows unused \({share:.1%}\) +{entries:,} entries"
        assert re.search(line, said("sizes")), line
    per_token = costs.kv_bytes_per_token(shape_of("135m"), 4)
    assert f"22 texts hold {per_token * sum(tokens) / 1e6:,.0f} MB" in said("claims")
    assert f"would reserve {per_token * 2048 * 22 / 1e6:,.0f} MB: {1 - sum(tokens) / 2048 / 22:.0%} unused" in said(
        "claims"
    )
    wasted = sum(-n % 16 for n in tokens)
    assert f"here {wasted / 22:.1f}, {per_token * (sum(tokens) + wasted) / 1e6:,.0f} MB" in said("claims")


def test_both_engines_had_the_same_bytes_and_one_ran_all_requests():
    c = shape_of("135m")
    num_bytes = 2 * c.num_hidden_layers * 1024 * c.num_key_value_heads * c.head_dim * 4
    lines = [line for line in said("serve").splitlines() if not line.startswith("~ ")]
    assert lines == [
        f" 2 pages of 512 rows, {num_bytes:,} bytes: 2 requests at once",
        f"64 pages of  16 rows, {num_bytes:,} bytes: 8 requests at once",
    ]
    assert c.num_key_value_heads * c.head_dim * 4 == 768 and "a row of K is only 768 bytes" in PROSE


def test_the_shared_page_is_copied_when_it_is_written():
    assert said("cow").startswith(
        "a [0, 1, 2], h [0, 1, 2], users of each page [2, 2, 2]\n"
        "h writes token 10: page 2 is copied to 3; a [0, 1, 2], h [0, 1, 3]\n"
    )
    assert "Eight tokens are kept once" in PROSE


def test_the_gauges_that_are_counted_are_those_of_the_stages():
    fit = {stage.key: requests_that_fit(stage) for stage in STAGES[:3]}
    assert re.search(rf"requests that fit +{fit['v2']} -> +{fit['v3']}  better", said("gauges"))
    assert (fit["v2"], fit["v3"]) == (6, 22) and "22 in place of 6" in PROSE
    assert "your function gave the slots of 14 steps" in said("gauges")
    for cell in ("serve", "read", "guess", "gauges"):
        for line in said(cell).splitlines():
            assert line.startswith("~ ") or not re.search(r"\d\s?(ms|s|us)\b", line), line
