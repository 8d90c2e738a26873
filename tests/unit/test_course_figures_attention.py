"""Figures of lessons 01 and 02 draw the data they are given, in an order and with marks that can be checked."""

import random
import re
import warnings

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle

from minillm.course import figures, style
from minillm.course.figures.attention_map import readable
from minillm.course.figures.masks import CELL as MASK_CELL
from minillm.course.figures.merges import NEW
from minillm.course.figures.tiles import label


def causal(n):
    p = np.tril(np.random.rand(n, n) + 1e-3)
    return p / p.sum(1, keepdims=True)


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def tiles(axes, y=None):
    """The tiles of an axes from left to right: (x, words)."""
    found = [p for p in axes.patches if isinstance(p, FancyBboxPatch)]
    return [(p.get_x(), p.get_label()) for p in found if y is None or abs(p.get_y() - y) < 1e-6]


# ---- gallery -------------------------------------------------------------------------------------


def test_the_gallery_draws_each_map_below_the_diagonal_on_one_scale():
    n = random.randint(4, 12)
    maps = {f"head {i}": (f"line {i}", causal(n)) for i in range(6)}
    figure = figures.gallery([f" t{i}" for i in range(n)], maps)
    meshes = [
        c for axes in figure.axes for c in axes.collections if isinstance(c, QuadMesh) and c.get_array().size == n * n
    ]
    assert len(meshes) == 6
    for mesh, (_, p) in zip(meshes, maps.values(), strict=True):
        cells = mesh.get_array().reshape(n, n)
        assert (np.ma.getmaskarray(cells) == np.triu(np.ones((n, n), bool), 1)).all()
        assert cells.compressed() == pytest.approx(np.clip(p, 0.003, 1)[np.tril_indices(n)])
        assert mesh.get_clim() == meshes[0].get_clim()
    for name, (line, _) in maps.items():
        assert {name, line} <= set(texts(figure))


def test_each_map_of_the_gallery_marks_the_largest_cell_of_each_row_and_has_its_tokens_on_both_axes():
    tokens = ["the", " cat", " and", " the", " dog"]
    p = causal(5)
    figure = figures.gallery(tokens, {"one": ("", p), "two": ("", causal(5))})
    axes = figure.axes[0]
    (dots,) = axes.lines
    assert (dots.get_xdata() == p.argmax(1)).all() and list(dots.get_ydata()) == [0, 1, 2, 3, 4]
    words = [token.strip() for token in tokens]
    assert [t.get_text() for t in axes.get_xticklabels()] == words
    assert [t.get_text() for t in axes.get_yticklabels()] == words
    assert [t.get_text() for t in figure.axes[1].get_xticklabels()] == words
    assert f"one (): dog looks most at {words[int(p[4].argmax())]}, {p[4].max():.0%}" in figure.get_label()


def test_a_gallery_map_of_the_wrong_size_is_refused_by_name():
    with pytest.raises(ValueError, match=r"3 tokens need probabilities of shape \(3, 3\), not \(2, 2\) \(late\)"):
        figures.gallery(["a", "b", "c"], {"early": ("", causal(3)), "late": ("", causal(2))})


# ---- masks ---------------------------------------------------------------------------------------


def marked_cells(axes):
    """(cells with a dot, cells with a cross) as (row, key)."""
    dots = {(int(c.center[1]), int(c.center[0])) for c in axes.patches if isinstance(c, Circle)}
    crosses = {(int(min(line.get_ydata())), int(min(line.get_xdata()))) for line in axes.lines}
    return dots, crosses


def test_a_mask_has_a_dot_where_a_key_is_seen_and_a_cross_where_that_is_wrong():
    n, keys = random.randint(2, 4), random.randint(5, 9)
    got, right = np.random.rand(n, keys) < 0.5, np.random.rand(n, keys) < 0.5
    figure = figures.masks({"mine": torch.tensor(got), "other": right}, {"mine": right})
    panels = [axes for axes in figure.axes if axes.get_xticklabels()]
    assert marked_cells(panels[0]) == (
        set(zip(*got.nonzero(), strict=True)),
        set(zip(*(got != right).nonzero(), strict=True)),
    )
    assert marked_cells(panels[1]) == (set(zip(*right.nonzero(), strict=True)), set())


def test_masks_name_the_position_of_each_query_and_say_the_cells_aloud(capsys):
    window = np.zeros((3, 8), bool)
    for row in range(3):
        window[row, [0, row + 3, row + 4, row + 5]] = True
    figure = figures.masks({"window": window}, {"window": np.ones((3, 8), bool)})
    assert {"token 5", "token 6", "token 7"} <= set(texts(figure))
    assert "token 5 sees 0 and 3 to 5, token 6 sees 0 and 4 to 6" in figure.get_label()
    assert "12 cells are crossed out as wrong" in figure.get_label()
    assert capsys.readouterr().out == "masks: 1 panels, 12 cells seen, 12 wrong\n"
    assert "sees none" in figures.masks({"empty": np.zeros((1, 3), bool)}).get_label()
    assert MASK_CELL * 8 < figure.get_size_inches()[0]


# ---- small matrices, memory ----------------------------------------------------------------------


def test_matrices_write_each_number_and_hide_minus_infinity():
    scores = torch.randn(3, 4)
    scores[0, 2:] = -torch.inf
    figure = figures.matrices(
        "by hand", [figures.Matrix("s", scores, "abc", "wxyz", digits=1), figures.Matrix("v", [[7]])]
    )
    numbers = [t.get_text() for t in figure.axes[0].texts]
    assert numbers == [f"{x:.1f}".replace("-", "−") if np.isfinite(x) else "−∞" for x in scores.flatten().tolist()]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["a", "b", "c"]
    assert "hidden hidden;" in figure.get_label() and "inf" not in figure.get_label()


def test_areas_are_bytes():
    lengths, heads, d, kv_heads = sorted(random.sample(range(256, 8192), 4)), 32, 128, random.choice([4, 8, 32])
    axes = figures.score_matrix(lengths, heads, d, kv_heads).axes[0]
    areas = {p.get_label(): p.get_width() * p.get_height() for p in axes.patches if isinstance(p, Rectangle)}
    unit = areas[f"scores {lengths[-1]}"] / (2 * heads * lengths[-1] ** 2)
    for n in lengths:
        assert areas[f"scores {n}"] == pytest.approx(unit * 2 * heads * n * n)
        assert areas[f"kv {n}"] == pytest.approx(unit * 2 * 2 * kv_heads * d * n)


def test_the_score_memory_of_the_article(capsys):
    label = figures.score_matrix([2048], 32, 128, 32).get_label()
    assert "2,048 tokens: scores 268 MB, K and V 34 MB" in label
    assert capsys.readouterr().out == "score_matrix: 2,048 tokens 268 MB\n"


def test_the_rulers_leave_the_point_before_the_last_and_end_at_twice_and_four_times_its_time():
    seconds = {n: random.uniform(0.01, 2) for n in (256, 512, 1024)}
    guess = random.uniform(0.01, 2)
    figure = figures.doubling(seconds, guess, "Time")
    axes = figure.axes[0]
    points = next(line for line in axes.lines if line.get_label() == "measured")
    assert dict(zip(*points.get_data(), strict=True)) == pytest.approx(seconds)
    ends = [line.get_ydata()[-1] for line in axes.lines if list(line.get_xdata()) == [512, 1024]]
    assert ends == pytest.approx([2 * seconds[512], 4 * seconds[512]])
    (mark,) = [line for line in axes.lines if line.get_label() == "your guess"]
    assert (*mark.get_xdata(), *mark.get_ydata()) == (1024, guess)
    assert axes.get_ylim()[1] > max(guess, *seconds.values(), 4 * seconds[512])


def test_one_size_shows_no_growth():
    with pytest.raises(ValueError, match="two are the least"):
        figures.doubling({256: 1.0}, 1.0, "Time")


# ---- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, words",
    [
        (b" cat", "␣cat"),
        (b"\n\t", "↵→"),
        ("é".encode(), "é"),
        (b"\xf0\x9f", "F0 9F"),
        ("中".encode(), "E4 B8 AD"),
        (b"", ""),
        (b"\x00", "00"),
    ],
)
def test_a_token_is_written_so_that_it_can_be_seen(data, words):
    assert label(data) == words


def test_token_tiles_stand_in_reading_order_with_their_ids():
    tokens = ["".join(random.choices("abcdefgh", k=random.randint(1, 9))).encode() for _ in range(60)]
    ids = [random.randrange(50_000) for _ in tokens]
    axes = figures.token_tiles(tokens, ids).axes[0]
    shown = [p for p in axes.patches if isinstance(p, FancyBboxPatch)]
    assert [p.get_label() for p in shown] == [token.decode() for token in tokens]
    places = [(p.get_y(), p.get_x()) for p in shown]
    assert places == sorted(places) and len({y for y, _ in places}) > 1
    assert all(p.get_x() + p.get_width() <= axes.get_xlim()[1] + 1e-6 for p in shown)
    assert [t.get_text() for t in axes.texts[1::2]] == [str(id) for id in ids]


@pytest.mark.parametrize("count", [0, 301])
def test_a_text_that_fits_no_picture_is_refused(count):
    with pytest.raises(ValueError, match=f"{count} tokens: a picture shows 1 to 300"):
        figures.token_tiles([b"a"] * count, [1] * count)


def test_tokens_of_any_script_are_drawn_without_a_warning():
    tokens = ["$a$", "^_{", "中", "\U0001f30a", "पू", "\n", " "]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        style.to_png(figures.token_tiles([t.encode() for t in tokens], range(len(tokens))))
        style.to_png(figures.attention_map(tokens, causal(len(tokens))))
        style.to_png(figures.gallery(tokens, {"one": ("", causal(len(tokens)))}))
    assert readable("中") == "U+4E2D"


def test_merges_are_drawn_line_by_line_with_the_new_token_marked(capsys):
    lines = [
        figures.Merge([b"h", b"u", b"g", b"s"]),
        figures.Merge([b"h", b"ug", b"s"], new=1, rank=5),
        figures.Merge([b"hug", b"s"], new=0, rank=1234),
    ]
    figure = figures.merges(lines)
    axes = figure.axes[0]
    drawn = {p.get_y() for p in axes.patches}
    assert [[words for _, words in tiles(axes, y)] for y in sorted(drawn)] == [
        list("hugs"),
        ["h", "ug", "s"],
        ["hug", "s"],
    ]
    new = [p.get_label() for p in axes.patches if matplotlib.colors.to_hex(p.get_facecolor()) == NEW]
    assert new == ["ug", "hug"]
    assert {"bytes", "rank 5", "rank 1,234"} <= set(texts(figure))
    assert capsys.readouterr().out == "merges: 2 merges, 4 bytes become 2 tokens: hug s\n"


def test_a_stream_of_bytes_lines_up_characters_bytes_and_tokens():
    text, tokens, shown = "a€", [b"a\xe2", b"\x82", b"\xac"], ["a", "", "€"]
    figure = figures.byte_stream(text, tokens, shown)
    axes = figure.axes[0]
    rows = sorted({p.get_y() for p in axes.patches})
    words = [[w for _, w in tiles(axes, y)] for y in rows]
    assert words == [["a", "€"], ["61", "E2", "82", "AC"], ["61 E2", "82", "AC"], ["a", "waits", "€"]]
    assert tiles(axes, rows[0])[1][0] == tiles(axes, rows[1])[1][0], "a character begins over its first byte"
    assert "token 82 shows waits" in figure.get_label()


def test_tokens_that_are_not_the_text_are_refused():
    with pytest.raises(ValueError, match="do not join to the 2 bytes of the text"):
        figures.byte_stream("ab", [b"a"], ["a"])


def test_the_cheapest_text_stands_on_top():
    sizes = {f"text {i}": (random.randint(50, 90), random.randint(5, 200)) for i in range(5)}
    axes = figures.token_cost(sizes).axes[0]
    names = [t.get_text() for t in axes.get_yticklabels()]
    assert [sizes[name][1] for name in names] == sorted(tokens for _, tokens in sizes.values())
    bars = [p for p in axes.patches if isinstance(p, Rectangle)]
    assert [bar.get_width() for bar in bars] == [sizes[name][1] for name in names]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


# ---- what all of them have in common -------------------------------------------------------------


def every_figure():
    return {
        "gallery": lambda: figures.gallery([f"t{i}" for i in range(9)], {"a": ("x", causal(9)), "b": ("y", causal(9))}),
        "masks": lambda: figures.masks({"one": np.tril(np.ones((3, 3), bool))}),
        "matrices": lambda: figures.matrices(
            "Two", [figures.Matrix("a", torch.randn(2, 2)), figures.Matrix("b", [[1.0]])]
        ),
        "score_matrix": lambda: figures.score_matrix([512, 1024], 32, 128, 8),
        "doubling": lambda: figures.doubling({256: 0.01, 512: 0.05}, 0.04, "Time"),
        "token_tiles": lambda: figures.token_tiles([b"The", b" cat", b" sat"], [1, 2, 3]),
        "merges": lambda: figures.merges([figures.Merge([b"a", b"b"]), figures.Merge([b"ab"], 0, 7)]),
        "byte_stream": lambda: figures.byte_stream("a€", [b"a\xe2", b"\x82\xac"], ["a", "€"]),
        "token_cost": lambda: figures.token_cost({"English": (60, 12), "Greek": (55, 50)}),
    }


@pytest.mark.parametrize("name", every_figure())
def test_a_figure_prints_one_line_has_alt_text_and_leaves_settings_alone(name, capsys):
    before = dict(matplotlib.rcParams)
    figure = every_figure()[name]()
    assert re.fullmatch(rf"{name}: .+\n", capsys.readouterr().out)
    assert len(figure.get_label()) > 40
    assert dict(matplotlib.rcParams) == before
    assert not matplotlib._pylab_helpers.Gcf.figs, "a figure belongs to the notebook, not to pyplot"


@pytest.mark.parametrize("name", every_figure())
def test_nothing_is_drawn_outside_of_its_card(name):
    figure = every_figure()[name]()
    FigureCanvasAgg(figure).draw()
    card = figure.bbox
    on_axes = [t for axes in figure.axes for t in (*axes.texts, axes.xaxis.label, axes.yaxis.label)]
    for text in [*figure.texts, *on_axes]:
        if text.get_text().strip():
            box = text.get_window_extent()
            assert box.x0 >= card.x0 - 1 and box.x1 <= card.x1 + 1, f"{text.get_text()!r} leaves the card"
            assert box.y0 >= card.y0 - 1 and box.y1 <= card.y1 + 1, f"{text.get_text()!r} leaves the card"
