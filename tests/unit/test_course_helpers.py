"""What lessons call beside the figures: attention maps, the engine's own code, texts, boxes, pictures for the text."""

import base64
import math
import random
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minillm import LLM, SamplingParams
from minillm.attention import naive
from minillm.course import probe, source, texts, widgets
from minillm.course.build import pictures
from minillm.course.build.addresses import ROOT
from minillm.engine import Engine
from minillm.errors import PromptError
from minillm.request import Request

WORDS = ["ship", "lamp", "night", "reads", "the", "a", "book", "é", "静", "\n", "  "]


@pytest.fixture(scope="module", params=["random:tiny", "random:tiny-mistral", "random:tiny-qwen3"])
def llm(request):
    with LLM(request.param, dtype="float32", num_kv_blocks=64) as llm:
        yield llm


def sentence(n=12):
    return " ".join(random.choices(WORDS, k=n))


# ---- attention maps ------------------------------------------------------------------------------


def test_there_is_one_map_per_layer_and_head_and_each_row_sums_to_one(llm):
    text = sentence()
    tokens, maps = probe.attention_maps(llm, text)
    config = llm.engine.model.config
    n = len(llm.tokenizer.encode(text))
    assert maps.shape == (config.num_hidden_layers, config.num_attention_heads, n, n)
    assert len(tokens) == n
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))
    assert maps.triu(1).abs().max() == 0


def test_the_maps_are_the_softmax_of_the_scores_that_the_engine_used(llm):
    """The oracle takes q and k out of a run of the engine's own attention body, and works in float64."""
    text, seen = sentence(), []
    attend = llm.engine.attend

    def watch(q, k, v, kv_layer, batch):
        seen.append((q.double(), k.double(), kv_layer.window))
        return attend(q, k, v, kv_layer, batch)

    llm.engine.attend = watch
    try:
        llm.reset_prefix_cache()
        llm.generate(text, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    finally:
        llm.engine.attend = attend
    _, maps = probe.attention_maps(llm, text)
    assert len(seen) == len(maps)
    for (q, k, window), found in zip(seen, maps, strict=True):
        n, group = q.shape[0], q.shape[1] // k.shape[1]
        rows, columns = torch.arange(n)[:, None], torch.arange(n)[None, :]
        visible = (columns <= rows) & (rows - columns < (window or n))
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(q.shape[2])
            exponentials = torch.where(visible, scores.exp(), 0.0)
            expected = exponentials / exponentials.sum(1, keepdim=True)
            torch.testing.assert_close(found[head].double(), expected, rtol=1e-4, atol=1e-5)


def test_looking_leaves_the_engine_as_it_was(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompt = sentence(40)
    before = llm.generate(prompt, greedy, use_tqdm=False)[0]
    attend, pool = llm.engine.attend, llm.engine.scheduler.block_pool
    free = pool.num_free
    probe.attention_maps(llm, sentence(30))
    after = llm.generate(prompt, greedy, use_tqdm=False)[0]
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.num_cached_tokens > 0, "the cache was touched"
    assert (llm.engine.attend, pool.num_free) == (attend, free)
    pool.check([])


@pytest.mark.parametrize("text, count", [("", 0), ("x" * 300, 300)])
def test_a_text_without_tokens_or_with_too_many_is_refused_with_its_length(llm, text, count):
    with pytest.raises(PromptError, match=f"the text has {count} tokens; a picture needs 1 to 256"):
        probe.attention_maps(llm, text)


def test_a_single_token_looks_at_itself(llm):
    _, maps = probe.attention_maps(llm, "x")
    assert maps.shape[2:] == (1, 1)
    assert (maps == 1).all()


# ---- the engine's own code, and texts ------------------------------------------------------------


def test_code_is_shown_from_the_file_it_stands_in():
    shown = source.as_markdown(Request.metrics)
    where, _, code = shown.partition("\n\n")
    line = int(where.split("line ")[1])
    assert where.startswith("`minillm/request.py`")
    file = (ROOT / "minillm/request.py").read_text(encoding="utf-8").splitlines()
    assert file[line - 1].strip() == code.splitlines()[1] == "def metrics(self) -> RequestMetrics:"
    assert code.endswith("```")


def test_a_decorated_method_is_shown_and_not_its_decorator():
    shown = source.as_markdown(Engine.step)
    assert shown.startswith("`minillm/engine.py`")
    assert "def step(self)" in shown


def test_a_module_is_shown_from_its_first_line():
    assert source.as_markdown(naive).startswith("`minillm/attention/naive.py`, line 1\n")


def test_an_unknown_text_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no text is called 'moby_dick'; there are: .*pell_rock"):
        texts.read("moby_dick")


# ---- boxes ---------------------------------------------------------------------------------------


def test_a_box_draws_what_is_typed_and_shows_what_goes_wrong(capsys):
    drawn = []

    def draw(text):
        if not text:
            raise PromptError("the text has 0 tokens")
        drawn.append(text)

    box = widgets.text_box(draw, "Your sentence", "first")
    line = box.children[0]
    assert drawn == [], "a picture stands above already"
    line.value = "second"
    line.value = ""
    line.value = "third"
    assert drawn == ["second", "third"]
    out = capsys.readouterr().out
    assert "the text has 0 tokens" in out
    assert "Your sentence (a box to type into appears here when this cell runs)" in out


# ---- pictures for the text -----------------------------------------------------------------------


def drawn_notebook(name="cell"):
    png = [base64.b64encode(random.randbytes(20)).decode() for _ in range(2)]
    outputs = [new_output("display_data", data={"image/png": p, pictures.WIDGET_VIEW: {}}) for p in png]
    text = new_markdown_cell(f"![alt](attachment:{name}.png) and ![other](file.png)", id="text")
    return new_notebook(cells=[text, new_code_cell("draw()", id=name, outputs=outputs)]), png


def test_an_attachment_is_the_last_picture_of_its_cell():
    notebook, png = drawn_notebook()
    pictures.attach_pictures(notebook)
    assert notebook.cells[0].attachments == {"cell.png": {"image/png": png[-1]}}
    nbformat.validate(notebook)


def test_an_attachment_without_a_picture_is_refused_by_name():
    notebook, _ = drawn_notebook()
    notebook.cells[1].outputs = []
    with pytest.raises(ValueError, match="no code cell with the id cell has drawn a picture"):
        pictures.attach_pictures(notebook)


def test_a_saved_notebook_keeps_the_words_beside_a_widget_and_not_its_view():
    notebook, png = drawn_notebook()
    pictures.drop_widget_views(notebook)
    assert [output.data for output in notebook.cells[1].outputs] == [{"image/png": p} for p in png]


@pytest.mark.parametrize("lesson, picture", pictures.README_PICTURES.items())
def test_the_readme_picture_is_the_one_in_the_lesson(lesson, picture):
    name, target = picture
    notebook = nbformat.read(ROOT / "notebooks" / lesson, as_version=4)
    file = ROOT / "notebooks" / target
    assert file.read_bytes() == base64.b64decode(pictures.picture(notebook, name))
    assert file.stat().st_size < 300_000
    assert Path("notebooks", target).as_posix() in (ROOT / "README.md").read_text(encoding="utf-8")
