"""Boxes: a picture follows its controls, errors become sentences, and a saved notebook shows words in their place."""

import base64
import io
import random

import pytest
from PIL import Image

from minillm.course import style, widgets
from minillm.errors import PromptError


def drawn(log, width=3.0):
    """A draw function that remembers its calls and draws a card that says so."""

    def draw(**values):
        log.append(values)
        if values.get("text") == "":
            raise PromptError("the text has 0 <tokens>")
        print("a figure's own line")
        figure = style.card(width, 1, str(values))
        return style.describe(figure, f'alt "{values}"')

    return draw


def test_a_picture_is_there_at_once_and_follows_every_control(capsys):
    calls = []
    text = widgets.text_line("Text", "first")
    layer = widgets.slider("Layer", 0, 9, 3)
    name = widgets.choice("Name", ["a", "b"], "a")
    box = widgets.picture_box(drawn(calls), text=text, layer=layer, name=name)
    picture = box.children[-1]
    assert box.children[:-1] == (text, layer, name)
    assert calls == [{"text": "first", "layer": 3, "name": "a"}]
    seen = [picture.value]
    for control, value in ((layer, random.randint(4, 9)), (text, "second"), (name, "b")):
        control.value = value
        seen.append(picture.value)
    assert calls[-1] == {"text": "second", "layer": layer.value, "name": "b"}
    assert len(calls) == len(set(seen)) == 4, "each move makes one new picture"
    out = capsys.readouterr().out
    assert "own line" not in out and "Text, Layer, Name (to be set here" in out


def test_a_picture_is_a_png_with_its_alt_text_and_its_width():
    box = widgets.picture_box(drawn([], width=4.25), text=widgets.text_line("Text", "x"))
    tag = box.children[-1].value
    assert 'alt="alt &quot;{&#x27;text&#x27;: &#x27;x&#x27;}&quot;"' in tag
    assert f'width="{round(4.25 * style.SCREEN_DPI)}"' in tag
    data = base64.b64decode(tag.split("base64,")[1].split('"')[0])
    assert Image.open(io.BytesIO(data)).size[0] == pytest.approx(4.25 * style.DPI, abs=1)


def test_an_error_is_a_sentence_and_the_box_goes_on():
    line = widgets.text_line("Text", "x")
    picture = widgets.picture_box(drawn([]), text=line).children[-1]
    line.value = ""
    assert picture.value == "<p>the text has 0 &lt;tokens&gt;</p>"
    line.value = "y"
    assert picture.value.startswith("<img ")


def test_controls_wait_until_they_are_let_go():
    assert not widgets.text_line("Text", "x").continuous_update
    assert not widgets.slider("Layer", 0, 9, 3).continuous_update


def test_another_error_is_not_swallowed():
    def draw(text):
        raise RuntimeError("a bug in the lesson")

    with pytest.raises(RuntimeError, match="a bug in the lesson"):
        widgets.picture_box(draw, text=widgets.text_line("Text", "x"))
