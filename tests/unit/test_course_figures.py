"""Each figure draws the data it is given, says so in its alt text, and prints one line without measured numbers."""

import base64
import io
import random
import re
from itertools import accumulate
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from PIL import Image

import minillm
from minillm.course import figures, style
from minillm.course.figures.attention_map import readable
from minillm.course.figures.growth import AREAS
from minillm.course.figures.parts import LOOKS, in_order
from minillm.course.figures.street import HOUSES, SHEDS
from minillm.course.fit import Growth
from minillm.request import RequestMetrics


def metrics(num_gaps=None):
    """A request with random parts and gaps."""
    parts = {name: random.uniform(0.001, 0.2) for name in LOOKS}
    gaps = [random.uniform(0.005, 0.02) for _ in range(random.randint(2, 40) if num_gaps is None else num_gaps)]
    ttft = sum(parts.values())
    tpot = sum(gaps) / len(gaps) if gaps else None
    return RequestMetrics(ttft_s=ttft, tpot_s=tpot, itl_s=gaps, e2e_s=ttft + sum(gaps), ttft_parts=parts)


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


# ---- silence -------------------------------------------------------------------------------------


def test_silence_draws_every_part_with_its_length_one_after_another():
    waits = {"short": metrics(), "long": metrics()}
    axes = figures.silence(waits).axes[0]
    for lane, wait in enumerate(waits.values()):
        bars = [p for p in axes.patches if p.get_label() in LOOKS and p.get_y() < lane < p.get_y() + p.get_height()]
        assert [bar.get_label() for bar in bars] == list(LOOKS)
        starts = [0.0, *accumulate(1000 * wait.ttft_parts[name] for name in LOOKS)]
        assert [bar.get_x() for bar in bars] == pytest.approx(starts[:-1])
        assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(1000 * wait.ttft_s)


def test_silence_ticks_where_each_token_came():
    wait = metrics()
    axes = figures.silence({"one": wait}).axes[0]
    (ticks,) = [c for c in axes.collections if isinstance(c, LineCollection)]
    drawn = [segment[0][0] for segment in ticks.get_segments()]
    expected = [1000 * (wait.ttft_s + sum(wait.itl_s[: i + 1])) for i in range(len(wait.itl_s))]
    assert drawn == pytest.approx(expected)
    assert axes.get_xlim()[0] == 0
    assert axes.get_xlim()[1] > expected[-1]


def test_a_request_of_one_token_has_a_silence_and_no_beat():
    figure = figures.silence({"one token": metrics(num_gaps=0)})
    assert "every" not in figure.get_label()
    assert not any("every" in text for text in texts(figure))


def test_silence_reads_its_numbers_aloud():
    wait = metrics(num_gaps=7)
    alt = figures.silence({"64 prompt tokens": wait}).get_label()
    assert f"64 prompt tokens: first token after {1000 * wait.ttft_s:,.0f} ms, then 7 more" in alt


def test_an_unknown_part_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown part kv_read; known: tokenize, queue"):
        in_order({"kv_read": 1.0})


def test_a_remainder_below_zero_is_drawn_as_nothing():
    assert in_order({"other": -1e-6, "tokenize": 0.5}) == {"tokenize": 0.5, "other": 0.0}


# ---- the TTFT bar --------------------------------------------------------------------------------


def test_the_bar_has_shares_that_fill_it_and_says_each_of_them():
    parts = metrics().ttft_parts
    figure = figures.ttft_bar(parts)
    axes = figure.axes[0]
    tallest = max(p.get_height() for p in axes.patches)
    bars = [p for p in axes.patches if p.get_label() in LOOKS and p.get_height() == tallest]
    total = sum(parts.values())
    assert [bar.get_width() for bar in bars] == pytest.approx([parts[name] / total for name in LOOKS])
    for name, look in LOOKS.items():
        assert f"{look.label} {parts[name] / total:.1%}" in figure.get_label()
        assert look.label in texts(figure)


def test_parts_are_told_apart_without_colour():
    """In shades of grey two parts may look alike; then their hatching differs."""
    shades = {name: round(sum(to_rgb(look.color)) / 3, 1) for name, look in LOOKS.items()}
    assert len({(shades[name], look.hatch) for name, look in LOOKS.items()}) == len(LOOKS)
    hatched = [look.hatch for look in LOOKS.values() if look.hatch]
    assert len(set(hatched)) == len(hatched)


# ---- growth --------------------------------------------------------------------------------------

FIT = Growth(0.02, 0.0006, 1e-7)
POINTS = {n: FIT.seconds(n) for n in (64, 256, 1024, 2048)}


def test_growth_puts_the_points_where_they_were_measured():
    axes = figures.growth(POINTS, FIT, 6144).axes[0]
    (points,) = [line for line in axes.lines if line.get_label() == "measured"]
    assert dict(zip(*points.get_data(), strict=True)) == pytest.approx(POINTS)
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_the_areas_lie_on_each_other_and_end_at_the_fit():
    axes = figures.growth(POINTS, FIT, 6144).axes[0]
    areas = [c for c in axes.collections if c.get_label() in [label for label, *_ in AREAS]]
    assert len(areas) == 3
    for area, top in zip(areas, accumulate(FIT.terms(2048)), strict=True):
        corners = area.get_paths()[0].vertices
        upper = {}
        for n, seconds in corners:
            upper[n] = max(seconds, upper.get(n, 0))
        n = np.array(sorted(upper))
        height = np.exp(np.interp(np.log(2048), np.log(n), np.log([upper[x] for x in n])))
        assert height == pytest.approx(top, rel=1e-3)


def test_the_line_stands_where_it_was_counted():
    overtakes = random.uniform(3000, 9000)
    axes = figures.growth(POINTS, FIT, overtakes).axes[0]
    assert any(set(line.get_xdata()) == {overtakes} for line in axes.lines)
    assert axes.get_xlim()[1] > overtakes


def test_a_guess_is_drawn_and_told_only_when_there_is_one():
    without = figures.growth(POINTS, FIT, 6144)
    figure = figures.growth(POINTS, FIT, 6144, guess=(2048, 77.0))
    (mark,) = [line for line in figure.axes[0].lines if line.get_label() == "your guess"]
    assert (*mark.get_xdata(), *mark.get_ydata()) == (2048, 77.0)
    assert "The guess was 77 s at 2,048" in figure.get_label()
    assert "guess" not in without.get_label() + "".join(texts(without))
    assert figure.axes[0].get_ylim()[1] > 77


def test_the_rulers_have_the_slopes_they_name():
    axes = figures.growth(POINTS, FIT, 6144).axes[0]
    last = (2048, POINTS[2048])
    rulers = [line.get_data() for line in axes.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] == last[0]]
    slopes = [np.diff(np.log(y))[0] / np.diff(np.log(x))[0] for x, y in rulers]
    assert slopes == pytest.approx([1, 2])
    assert {"slope 1", "slope 2"} <= set(texts(axes.figure))


# ---- attention map -------------------------------------------------------------------------------


def causal(n):
    p = np.tril(np.random.rand(n, n) + 1e-3)
    return p / p.sum(1, keepdims=True)


def test_a_map_shows_what_was_computed_and_hides_the_rest():
    n = random.randint(3, 20)
    p = causal(n)
    axes = figures.attention_map([f" t{i}" for i in range(n)], p).axes[0]
    (mesh,) = [c for c in axes.collections if isinstance(c, QuadMesh)]
    cells = mesh.get_array().reshape(n, n)
    assert (np.ma.getmaskarray(cells) == np.triu(np.ones((n, n), bool), 1)).all()
    assert cells.compressed() == pytest.approx(np.clip(p, 0.003, 1)[np.tril_indices(n)])


def test_row_0_is_at_the_top_and_both_axes_are_labelled_with_tokens():
    axes = figures.attention_map(["Hello", " world", "!"], causal(3)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Hello", "world", "!"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["Hello", "world", "!"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_each_row_of_the_word_gets_a_ring_at_its_largest_cell():
    tokens = ["the", " cat", " because", " it", " saw", " it"]
    p = causal(6)
    axes = figures.attention_map(tokens, p, point_out="it").axes[0]
    rings = {r.get_xy() for r in axes.patches if isinstance(r, Rectangle) and not r.get_fill()}
    assert rings == {(int(p[row].argmax()) - 0.5, row - 0.5) for row in (3, 5)}


def test_the_map_tells_where_the_word_looks():
    p = np.array([[1, 0, 0], [0.9, 0.1, 0], [0.07, 0.8, 0.13]])
    alt = figures.attention_map(["the", " cat", " it"], p, point_out="it").get_label()
    assert "token 3, it, looks most at cat (80%) and it (13%)" in alt


@pytest.mark.parametrize(
    "token, label", [(" cat", "cat"), ("\n\n", "\\n\\n"), (" ", "␣"), ("\t", "\\t"), ("$5$", r"\$5\$")]
)
def test_tokens_that_cannot_be_seen_are_written_out(token, label):
    assert readable(token) == label


def test_tokens_of_any_script_can_be_drawn():
    tokens = ["$a$", "^_{", "\\frac", " ", "\n", "ß"]
    style.to_png(figures.attention_map(tokens, causal(len(tokens))))


def test_a_map_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match=r"3 tokens need probabilities of shape \(3, 3\), not \(2, 2\)"):
        figures.attention_map(["a", "b", "c"], causal(2))


# ---- the street ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*HOUSES, *SHEDS])
def test_a_pin_can_stand_on_every_house_and_shed(key):
    figure = figures.street(key)
    assert texts(figure).count("you are here") == 1
    name = HOUSES[key].name if key in HOUSES else SHEDS[key].replace("\n", " ")
    assert figure.get_label().endswith(f"You are here: {name}.")


def test_the_words_stand_once_also_with_two_pins():
    assert texts(figures.street("scheduler", "block_pool")).count("you are here") == 1


@pytest.mark.parametrize("key, house", HOUSES.items())
def test_every_house_stands_at_its_address(key, house):
    assert (Path(minillm.__file__).parent / house.file).exists(), f"minillm/{house.file} is gone"


def test_a_pin_on_nothing_is_refused_with_the_known_houses():
    for keys in ((), ("castle",)):
        with pytest.raises(ValueError, match="llm, tokenizer, scheduler"):
            figures.street(*keys)


# ---- what all figures have in common -------------------------------------------------------------


def every_figure():
    return {
        "silence": lambda: figures.silence({"a": metrics(), "b": metrics(num_gaps=0)}),
        "ttft_bar": lambda: figures.ttft_bar(metrics().ttft_parts),
        "growth": lambda: figures.growth(POINTS, FIT, 6144, guess=(2048, 3.0)),
        "attention_map": lambda: figures.attention_map([f"t{i}" for i in range(12)], causal(12), point_out="t5"),
        "street": lambda: figures.street("llm"),
    }


@pytest.mark.parametrize("name", every_figure())
def test_a_figure_prints_one_line_has_alt_text_and_leaves_settings_alone(name, capsys):
    before = dict(matplotlib.rcParams)
    figure = every_figure()[name]()
    out = capsys.readouterr().out
    assert re.fullmatch(rf"{name}: .+\n", out)
    assert len(figure.get_label()) > 60
    assert dict(matplotlib.rcParams) == before
    assert not matplotlib._pylab_helpers.Gcf.figs, "a figure belongs to the notebook, not to pyplot"


@pytest.mark.parametrize("name", every_figure())
def test_a_card_brings_its_own_background_and_reads_the_same_on_any_page(name):
    figure = every_figure()[name]()
    image = np.asarray(Image.open(io.BytesIO(style.to_png(figure))).convert("RGBA")).astype(float)
    alpha = image[..., 3] / 255
    inside = alpha[20:-20, 20:-20]
    assert inside.min() == 1, "the page shines through"
    assert alpha[0, 0] == alpha[-1, -1] == 0, "the corners are round"


def test_letters_stand_out_from_the_paper():
    def luminance(color):
        channels = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]

    for ink in (style.INK, style.MUTED):
        assert (luminance(style.PAPER) + 0.05) / (luminance(ink) + 0.05) >= 4.5  # WCAG 2, level AA


def test_the_same_data_give_the_same_bytes():
    assert style.to_png(figures.street("model")) == style.to_png(figures.street("model"))


def test_show_sends_a_png_with_its_alt_text_and_its_size_on_the_page(monkeypatch):
    sent = []
    monkeypatch.setattr(style, "display", lambda data, **options: sent.append((data, options)))
    figure = figures.street("llm")
    style.show(figure)
    ((data, options),) = sent
    image = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    width, height = figure.get_size_inches()
    assert options["metadata"]["image/png"]["alt"] == figure.get_label()
    assert options["metadata"]["image/png"]["width"] == round(96 * width)
    assert image.size == pytest.approx((style.DPI * width, style.DPI * height), abs=1)
    assert data["text/plain"] == "<picture>"


def test_a_figure_without_alt_text_is_not_shown():
    with pytest.raises(ValueError, match="alt text"):
        style.show(style.card(2, 2))
