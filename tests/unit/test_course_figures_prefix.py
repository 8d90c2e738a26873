"""Figures of lesson 07: the tree shares what is shared, the strips judge block by block, points lie where measured."""

import random

import pytest
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from minillm.course import figures, style, widgets
from minillm.course.figures import Served
from minillm.course.figures.prefix_tree import tree, walk
from minillm.course.figures.shared_blocks import verdicts
from minillm.course.shared_blocks_widget import shared_blocks_box
from minillm.course.timing import Timing, show_time


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def boxes(axes, label):
    return [p for p in axes.patches if isinstance(p, Rectangle) and p.get_label() == label]


def prompts_of(size):
    """Rules for all, two kinds of examples, and questions of any length whose tokens occur nowhere else."""
    rules, *examples = ([kind] * random.randint(size, 3 * size) for kind in (1, 2, 3))
    return [rules + examples[i // 2] + [10 + i] * random.randint(1, 3 * size) for i in range(4)]


def test_the_tree_has_one_node_for_each_beginning():
    size = random.randint(1, 4)
    prompts = prompts_of(size)
    beginnings = {tuple(p[:end]): set() for p in prompts for end in range(size, len(p) + 1, size)}
    for number, prompt in enumerate(prompts):
        for text in beginnings:
            if tuple(prompt[: len(text)]) == text:
                beginnings[text].add(number)
    nodes = list(walk(tree(prompts, size)))
    assert sorted((n.depth, n.prompts) for n in nodes) == sorted(
        (len(text) // size - 1, sorted(users)) for text, users in beginnings.items()
    )


def test_the_picture_draws_each_block_once_and_each_time_as_a_bar(capsys):
    size = random.randint(2, 4)
    prompts = prompts_of(size)
    served = {f"p{i}": Served(p, random.uniform(0.5, 1), random.uniform(0.01, 0.4)) for i, p in enumerate(prompts)}
    figure = figures.prefix_tree(served, size)
    left, bars, _ = figure.axes
    nodes = list(walk(tree(prompts, size)))
    shared = [node for node in nodes if len(node.prompts) > 1]
    assert len(boxes(left, "shared")) == len(shared)
    assert len(boxes(left, "own")) == len(nodes) - len(shared)
    assert len(boxes(left, "tail")) == sum(len(p) % size > 0 for p in prompts)
    right = max(p.get_x() + p.get_width() for p in left.patches)
    assert right <= left.get_xlim()[1] + 1e-6  # nothing grows into the bars
    assert [p.get_width() for p in boxes(bars, "cold")] == [s.cold_s for s in served.values()]
    assert [p.get_width() for p in boxes(bars, "hit")] == [s.hit_s for s in served.values()]
    assert all(p.get_hatch() for p in boxes(bars, "cold")) and not any(p.get_hatch() for p in boxes(bars, "hit"))
    total = sum(len(p) // size for p in prompts)
    assert (
        capsys.readouterr().out == f"prefix_tree: 4 prompts, {total} full blocks of {size} tokens, {len(nodes)} kept\n"
    )
    for name, one in served.items():
        assert name in texts(figure) and show_time(one.hit_s) in figure.get_label()
    assert f"{len(nodes)} are kept, {len(shared)} of them shared" in figure.get_label()
    style.to_png(figure)
    with pytest.raises(ValueError, match="no prompt"):
        figures.prefix_tree({}, size)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("abcdef", "abcdefg", ["found", "found", "found", "not full"]),
        ("abcdef", "abcdef", ["found", "found", "holds the last token"]),
        ("abcdef", "abXdef", ["found", "differs", "behind a difference"]),
        ("abcde", "abcdefg", ["found", "found", "differs", "not full"]),
        ("ab", "ab", ["holds the last token"]),
        ("xxab", "abab", ["differs", "behind a difference"]),
    ],
)
def test_a_block_is_found_up_to_the_first_difference_and_never_the_last_token(first, second, expected):
    assert verdicts(first, second, 2) == expected


def test_the_strips_name_the_same_tokens_behind_another_beginning(capsys):
    first, second = ([bytes([letter]) for letter in text] for text in (b"abcdefgh", b"abXdefgh"))
    figure = figures.shared_blocks(first, second, 2)
    assert texts(figure).count("same tokens, other beginning") == 2
    assert texts(figure).count("=") == 1 and texts(figure).count("≠") == 1
    assert "2 of 8 tokens need not be read again" in texts(figure)
    assert capsys.readouterr().out == "shared_blocks: 8 and 8 tokens in blocks of 2, 1 found\n"
    assert "1 found, 2 differs, 3 behind a difference" in figure.get_label()
    style.to_png(figure)
    for wrong in ([], [b"a"] * 40):
        with pytest.raises(ValueError, match=f"{len(wrong)} tokens"):
            figures.shared_blocks(first, wrong, 2)


def test_the_time_over_tokens_found_lies_where_it_was_measured(capsys):
    times = {n: Timing(tuple(sorted(random.uniform(0.1, 1) for _ in range(3)))) for n in (0, 32, 48)}
    guess = (48, random.uniform(0.1, 1))
    figure = figures.found_tokens(times, 64, guess)
    (axes,) = figure.axes
    lines = [tuple(map(list, line.get_data())) for line in axes.lines]
    assert ([0, 32, 48], [times[n].median for n in (0, 32, 48)]) in lines
    assert ([0, 64], [times[0].median, 0]) in lines and ([48], [guess[1]]) in lines
    assert capsys.readouterr().out == "found_tokens: 64 prompt tokens, 0, 32, 48 of them found\n"
    assert show_time(times[32].median) in figure.get_label()
    style.to_png(figure)
    for wrong in ({32: times[32]}, {0: times[0], 64: times[32]}):
        with pytest.raises(ValueError, match="tokens found"):
            figures.found_tokens(wrong, 64, guess)


def test_the_box_draws_the_strips_of_its_texts(capsys):
    class Letters:
        encode = staticmethod(lambda text: list(text.encode()))
        token_bytes = staticmethod(lambda id: bytes([id]))

    def picture_of(first, second, size):
        return widgets.image_tag(
            figures.shared_blocks(*([bytes([b]) for b in t.encode()] for t in (first, second)), size)
        )

    box = shared_blocks_box(Letters(), "abcd", "abce", size=2)
    first, second, size, picture = box.children
    assert picture.value == picture_of("abcd", "abce", 2)
    second.value, size.value = "abcdef", "4"
    assert picture.value == picture_of("abcd", "abcdef", 4)
    second.value = ""
    assert "0 tokens" in picture.value and "<img" not in picture.value
