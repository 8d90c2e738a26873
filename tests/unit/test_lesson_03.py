"""Lesson 03 says what is true: its sums, margins, lines of code, the bug's answer; its pictures draw their data."""

import ast
import random
import re

import nbformat
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.course import figures, style
from minillm.course.build.addresses import ROOT
from minillm.course.engine_so_far import boot
from tests.grader.answers import TASKS, define, starter_code

MARGIN = 0.5  # logits between the chosen token and the next best one
LESSON = nbformat.read(ROOT / "notebooks" / "03_block_and_model.ipynb", as_version=4)
EXERCISE = nbformat.read(ROOT / "solutions" / "ex03_block_and_model.ipynb", as_version=4)
CELLS = {cell.id: cell for cell in LESSON.cells}
PROSE = "\n".join(cell.source for cell in LESSON.cells + EXERCISE.cells if cell.cell_type == "markdown")


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m-instruct", dtype="float32", num_kv_blocks=32) as llm:
        yield llm


def ask(llm, *contents):
    roles = ("system", "user")[-len(contents) :]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    return llm.tokenizer.encode(llm.tokenizer.apply_chat_template(messages), add_special_tokens=False)


def said(cell):
    return "".join(o.get("text", "") for o in CELLS[cell].outputs if o.output_type == "stream")


def test_version_1_has_at_most_forty_lines():
    lines = [line for line in CELLS["v1"].source.splitlines() if line.strip()]
    assert len(lines) <= 40
    names = {node.name for node in ast.parse(CELLS["v1"].source).body if isinstance(node, ast.FunctionDef)}
    assert {"attention", "block", "stream", "logits", "generate"} == names


def test_the_printed_answer_hangs_on_no_close_call(llm):
    prompt = ask(llm, "Answer in one sentence.", "What is the capital of France?")
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    answer = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    for chosen, choices in zip(answer.token_ids, answer.logprobs, strict=True):
        best, second = sorted((entry.logprob for entry in choices.values()), reverse=True)[:2]
        assert choices[chosen].logprob == best and best - second > MARGIN
    text = llm.tokenizer.decode(answer.token_ids)
    assert f"{text!r}\n{len(prompt)} prompt tokens, same tokens as minillm: True" in said("answer")


def test_the_starter_gives_the_answer_that_the_exercise_quotes(llm):
    """And in the exercise's last cell, which asks the same."""
    assert '"content": "Name the capital of France."' in EXERCISE.cells[-2].source
    prompt = ask(llm, "Name the capital of France.")
    starter = define(starter_code(TASKS["ex03.2"]), "rotate")
    tokens = boot(llm, "v2", {"rotate": starter}).generate(prompt, 14)
    quoted = re.search(r"with \*(Theres the name of .*?)\*[;.]", PROSE, re.DOTALL)
    assert llm.tokenizer.decode(tokens).startswith(quoted[1])


def test_the_rank_of_the_answer_is_the_one_in_the_text(llm):
    """The lesson's own cells, run again without their pictures."""
    ids = llm.tokenizer.encode("Paris is the capital of France, and Rome is the capital of")
    names = {}
    cells = [CELLS[name].source for name in ("street", "norm", "rope", "weights", "v1")]
    skipped = re.compile(r"^(setup\.start|figures\.show|print).*$", re.MULTILINE)
    names.update(llm=llm, c=llm.engine.model.config)
    for source in cells:
        code = skipped.sub("", source.replace("from minillm.course import figures, setup", ""))
        exec(compile("from minillm.checkpoint import load\n" + code, "lesson", "exec"), names)
    rows = [names["logits"](x[-1:])[0] for x in names["stream"](ids)]
    answer = int(rows[-1].argmax())
    ranks = [1 + int((row > row[answer]).sum()) for row in rows]
    assert llm.tokenizer.decode([answer]) == " Italy"
    assert f"from place {max(ranks):,} of {len(rows[0]):,} to place 1" in PROSE.replace("\n", " ")
    assert ranks.index(1) == 30 and rows[-1].topk(2).values.diff().abs() > MARGIN
    assert "Italy leads from layer 29 on" in said("lens")
    assert llm.tokenizer.decode([int(rows[0].argmax())]) == " of"


def test_the_sums_in_the_text_are_right(llm):
    c = llm.engine.model.config
    assert sum(512 + i for i in range(64)) == 34_784 and "34,784 rows for 575" in PROSE.replace("\n", " ")
    assert 512 + 64 - 1 == 575
    assert 2 * c.num_hidden_layers + 1 == 61 and "stands 61 times" in PROSE
    assert c.rope_theta == 100_000 and c.hidden_size == 576 and c.num_hidden_layers == 30
    silu = torch.nn.functional.silu(torch.tensor([2.0, -2.0])) * 3
    assert [round(x, 2) for x in silu.tolist()] == [5.28, -0.72]
    assert torch.finfo(torch.float16).max == 65_504


def test_the_lesson_was_equal_to_the_library_and_to_the_engine():
    assert (
        said("transformers")
        == "logits [26, 49152], max |difference| < 1e-3: True\nsame best token in every row: True\n"
    )
    assert "max |difference| < 1e-5: True" in said("norm") and "max |difference| < 1e-5: True" in said("rope")
    assert "all rows would cost 27% more" in said("claim")


# ---- pictures ------------------------------------------------------------------------------------


def texts(figure):
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_the_lens_draws_each_layer_and_says_where_the_answer_leads(capsys):
    readings = [(random.choice(["a", "b"]), random.random(), random.randint(2, 900)) for _ in range(8)]
    readings += [("x", 0.5, 1), ("b", 0.5, 7), ("x", 0.6, 1), ("x", 0.9, 1)]
    figure = figures.logit_lens(readings, "x", "a text")
    left, right = figure.axes
    assert [p.get_width() for p in left.patches] == pytest.approx([p for _, p, _ in readings])
    assert right.lines[0].get_xdata().tolist() == [rank for *_, rank in readings]
    assert capsys.readouterr().out == "logit_lens: 11 layers, x leads from layer 9 on\n"
    assert "x stays the likeliest from layer 9 on" in figure.get_label()
    style.to_png(figure)


def test_the_dials_turn_by_their_frequencies_and_the_scores_lie_on_each_other(capsys):
    values = [random.random() for _ in range(5)]
    figure = figures.rotation({"fast": 1.0, "slow": 0.1}, range(5), {"here": values, "there": values})
    assert "equal: True" in capsys.readouterr().out
    assert "fast once in 6 tokens, slow once in 63 tokens" in figure.get_label()
    fast = figure.axes[0]
    hands = [line.get_data() for line in fast.lines if len(line.get_xdata()) == 2]
    angles = sorted(torch.atan2(torch.tensor(y[1]), torch.tensor(x[1])).item() % 6.2832 for x, y in hands)
    assert angles == pytest.approx(sorted(p % 6.2832 for p in range(8)), abs=1e-3)
    other = figures.rotation({"fast": 1.0}, range(5), {"here": values, "there": values[::-1]})
    assert "equal: False" in capsys.readouterr().out
    style.to_png(other)


def test_the_plan_counts_the_weights_of_a_layer(llm, capsys):
    c = llm.engine.model.config
    sizes = (c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size)
    figure = figures.block_plan(*sizes)
    assert capsys.readouterr().out == "block_plan: 3,538,944 weights, attention 25%\n"
    counts = [int(text.replace(",", "")) for text in texts(figure) if re.fullmatch(r"[\d,]{5,}", text)]
    assert sum(counts) == 3_538_944 and len(counts) == 4
    style.to_png(figure)
