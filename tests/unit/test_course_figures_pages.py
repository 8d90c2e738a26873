"""Figures of lesson 06: every row of the map is what its table says, shared pages are framed twice, the box replays."""

import random
from collections import Counter

import pytest
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.text import Text

from minillm.course import figures, style, widgets
from minillm.course.figures.pages import CELL, COLUMNS, MAP, filled
from minillm.course.pages_widget import LONGEST, NUM_ROWS, SIZES, pages_box, replay

STORY = [("a", 6), ("b", 3), ("c", 5), ("a", 5), ("b", 0), ("d", 9), ("e", 4)]


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def scattered(size):
    """Requests with random lengths, in pages of a random order."""
    order = list(range(NUM_ROWS // size))
    random.shuffle(order)
    requests = {}
    for name in "adeh":
        tokens = random.randint(1, 15)
        requests[name] = figures.Pages([order.pop() for _ in range(-(-tokens // size))], tokens)
    return requests


def by_row(requests, size):
    """Row of the cache -> its letter, or " " where it is reserved: token by token, without a formula for pages."""
    rows = {}
    for name, (table, tokens) in requests.items():
        places = [page * size + offset for page in table for offset in range(size)]
        rows |= {place: name if token < tokens else " " for token, place in enumerate(places)}
    return rows


def drawn(figure):
    """Row of the cache -> (its letters, hatched), read off the map."""
    (axes,) = figure.axes
    cells = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_x() >= MAP - 1e-6 and p.get_fill()]
    cells = [p for p in cells if p.get_width() == p.get_height() == CELL]
    top = max(p.get_y() for p in cells)
    found = {}
    for cell in cells:
        row = round((top - cell.get_y()) / CELL) * COLUMNS + round((cell.get_x() - MAP) / CELL)
        letters = "".join(
            text.get_text()
            for text in axes.texts
            if text.get_text().isalpha() and cell.contains_point(axes.transData.transform(text.get_position()))
        )
        found[row] = (letters, bool(cell.get_hatch()))
    return found


@pytest.mark.parametrize("size", [2, 8])
def test_every_row_of_the_map_is_what_the_tables_say(size, capsys):
    requests = scattered(size)
    figure = figures.pages(requests, size)
    rows, map_ = by_row(requests, size), drawn(figure)
    assert sorted(map_) == list(range(NUM_ROWS))
    for row, (letters, hatched) in map_.items():
        assert (letters, hatched) == (rows.get(row, "").strip(), rows.get(row) == " "), row
    tokens, held = sum(r.tokens for r in requests.values()), sum(len(r.table) for r in requests.values())
    line = f"4 requests, {tokens} rows filled in {held} of {NUM_ROWS // size} pages of {size}"
    assert capsys.readouterr().out == f"pages: {line}, {held * size - tokens} unused; in one piece 4 would fit\n"
    assert line in figure.get_label()
    for name, (table, count) in requests.items():
        assert f"{name}: {count} tokens, pages {', '.join(map(str, table))}" in figure.get_label()
    assert {str(page) for r in requests.values() for page in r.table} <= set(texts(figure))


def test_arrows_leave_the_last_table_as_long_as_they_can_be_told_apart():
    short, long = figures.Pages([3, 9], 7), figures.Pages([0, 1, 2, 4, 5, 6], 24)
    for requests, arrows in (({"a": long, "b": short}, 2), ({"b": short, "a": long}, 0), ({}, 0)):
        figure = figures.pages(requests, 4)
        assert len(figure.findobj(FancyArrowPatch)) == arrows
        assert any("arrows" in text for text in texts(figure)) == bool(arrows)


def test_a_page_in_two_tables_is_framed_twice_and_counted_once(capsys):
    requests = {"a": figures.Pages([5, 0, 2], 10), "b": figures.Pages([5, 0, 3], 11)}
    assert filled(requests, 4) == {5: ("ab", 4), 0: ("ab", 4), 2: ("a", 2), 3: ("b", 3)}
    figure = figures.pages(requests, 4, num_rows=32, longest=None)
    assert "2 requests, 13 rows filled in 4 of 8 pages of 4, 3 unused\n" in capsys.readouterr().out
    frames = [p for p in figure.axes[0].patches if isinstance(p, Rectangle) and not p.get_fill() and p.get_x() >= MAP]
    widths = Counter(round(p.get_width(), 3) for p in frames)
    assert sorted(widths.values()) == [2, 8]  # eight pages, two of them with a second line inside
    assert "in two tables" in texts(figure) and "pages 0, 5" in figure.get_label()
    assert "reservations" not in figure.get_label()


def test_the_reservation_below_holds_the_first_ones_and_names_those_that_wait():
    requests = {name: figures.Pages([page], 9) for page, name in enumerate("abcd")}
    figure = figures.pages(requests, 16, waiting="ef")
    assert "in one piece, 16 rows for each: 28 of them unused; e, f would wait" in texts(figure)
    assert "e, f waiting: too few pages are free" in texts(figure)
    assert "Too few pages were free for e, f." in figure.get_label()


@pytest.mark.parametrize(
    ("requests", "size", "why"),
    [
        ({"a": figures.Pages([0], 5)}, 4, "a has 5 tokens and 1 pages of 4"),
        ({"a": figures.Pages([0, 1], 4)}, 4, "a has 4 tokens and 2 pages of 4"),
        ({"a": figures.Pages([16], 4)}, 4, "page 16 of a is not one of the 16"),
        ({}, 3, "64 rows in pages of 3"),
    ],
)
def test_tables_that_cannot_be_are_refused(requests, size, why):
    with pytest.raises(ValueError, match=why):
        figures.pages(requests, size)


@pytest.mark.parametrize("size", SIZES)
def test_at_every_moment_of_the_story_no_page_has_two_owners_and_nobody_has_one_too_many(size):
    for moment in range(1, len(STORY) + 1):
        requests, waiting = replay(STORY[:moment], size)
        lengths = {}
        for name, tokens in STORY[:moment]:
            lengths[name] = lengths.get(name, 0) + tokens if tokens else 0
        there = {name: n for name, n in lengths.items() if n and name not in waiting}
        assert {name: r.tokens for name, r in requests.items()} == there
        pages = [page for r in requests.values() for page in r.table]
        assert len(pages) == len(set(pages)) and set(pages) <= set(range(NUM_ROWS // size))
        assert [len(r.table) for r in requests.values()] == [-(-n // size) for n in there.values()]


def test_whoever_finds_too_few_pages_waits_and_whoever_cannot_grow_is_named():
    requests, waiting = replay([("a", 16), ("b", 16), ("c", 16), ("d", 16), ("e", 1), ("e", 5)], LONGEST)
    assert list(requests) == ["a", "b", "c", "d"] and waiting == "e"
    requests, waiting = replay([("a", 16), ("b", 16), ("c", 16), ("d", 16), ("b", 0), ("e", 5)], LONGEST)
    assert requests["e"] == figures.Pages([1], 5) and not waiting
    with pytest.raises(ValueError, match="a cannot grow to 17 tokens"):
        replay([("a", 16), ("b", 16), ("c", 16), ("d", 16), ("a", 1)], LONGEST)


def test_the_box_draws_the_moment_and_the_size_that_are_chosen(capsys):
    box = pages_box(STORY)
    moment, size, picture = box.children
    moment.value, size.value = 3, "16"
    requests, waiting = replay(STORY[:3], 16)
    assert picture.value == widgets.image_tag(figures.pages(requests, 16, NUM_ROWS, LONGEST, waiting))


def test_a_request_keeps_its_colour_when_others_leave():
    colours = []
    for requests in (dict.fromkeys("abc"), dict.fromkeys("c")):
        named = {name: figures.Pages([page], 4) for page, name in enumerate(requests)}
        (axes,) = figures.pages(named).axes
        row = 4 * list(requests).index("c")
        x, y = MAP + row % COLUMNS * CELL, 0
        cells = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_width() == CELL and p.get_fill()]
        column = [p for p in cells if abs(p.get_x() - x) < 1e-6 and p.get_y() > y]
        colours.append(sorted(column, key=lambda p: -p.get_y())[row // COLUMNS].get_facecolor())
    assert colours[0] == colours[1]


def test_bars_and_line_over_the_page_sizes_are_the_numbers_that_were_given(capsys):
    sizes = [1, 16, 256]
    unused = dict(zip(sizes, (0.0, random.uniform(0.01, 0.1), random.uniform(0.2, 0.8)), strict=True))
    seconds = {size: random.uniform(1e-3, 1) for size in sizes}
    guess = (16, random.uniform(1e-4, 2))
    figure = figures.block_sizes(unused, seconds, guess)
    left, right = figure.axes
    bars = [p.get_height() for p in left.patches if isinstance(p, Rectangle)]
    assert bars == list(unused.values()) and all(p.get_hatch() for p in left.patches)
    lines = {line.get_label(): line for line in right.lines}
    assert list(lines["read"].get_ydata()) == list(seconds.values())
    assert (list(lines["your guess"].get_xdata()), list(lines["your guess"].get_ydata())) == ([1], [guess[1]])
    low, high = right.get_ylim()
    assert low < min(guess[1], *seconds.values()) and high > max(guess[1], *seconds.values())
    assert capsys.readouterr().out == "block_sizes: pages of 1, 16, 256, a guess for 16\n"
    assert f"{unused[256]:.1%} with pages of 256" in figure.get_label()
    style.to_png(figure)


def test_page_sizes_have_to_agree():
    for unused, seconds, guess in (({1: 0.0}, {2: 1.0}, (1, 1.0)), ({1: 0.0}, {1: 1.0}, (4, 1.0))):
        with pytest.raises(ValueError, match="page sizes differ"):
            figures.block_sizes(unused, seconds, guess)
