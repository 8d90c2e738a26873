"""F6, second half: prompts as a tree of blocks, in which each shared one is kept once, and TTFT cold and with a hit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.course.style import BLUE, INK, MARGIN, MUTED, PAPER, card, describe, place, styled, write
from minillm.course.timing import show_time

WIDTH, LANE = 8.6, 0.62  # inches of the card, and of a prompt
TREE, BETWEEN, BARS = 4.5, 0.34, 2.5  # widths in inches; values stand right of the bars
ABOVE, BELOW = 0.86, 0.62
LARGEST_CELL, HEIGHT = 0.3, 0.26  # inches of a block
FORK = 0.34  # inches between a block and those that go on from it
WORDS = 1.15  # and of a stretch over which both of its numbers have room
SHARED, OWN = "#cfe8f7", "#f0eee7"
TAIL = {"facecolor": PAPER, "edgecolor": MUTED, "linewidth": 0.8, "hatch": "////"}


class Served(NamedTuple):
    """One prompt: its tokens, and its TTFT with an empty cache and with a warm one."""

    tokens: Sequence[int]
    cold_s: float
    hit_s: float


class Node(NamedTuple):
    """A full block behind all blocks before it. Two prompts share it when they share the whole path."""

    depth: int
    prompts: list[int]
    children: dict[tuple[int, ...], Node]


@styled
def prefix_tree(prompts: Mapping[str, Served], size: int) -> Figure:
    """A lane per prompt: blocks of `size` tokens as cells, shared ones drawn once, between the lanes that use them.

    What a prompt has beyond its last full block is hatched. Prompts that share should follow one another.
    """
    if not prompts:
        raise ValueError("no prompt: a tree needs one at least")
    served = list(prompts.values())
    root = tree([list(s.tokens) for s in served], size)
    nodes = list(walk(root))
    total, kept = sum(len(s.tokens) // size for s in served), len(nodes)
    lefts, cell = _places(root)

    figure = card(WIDTH, ABOVE + LANE * len(served) + BELOW, "What is shared is kept once, and read once")
    height = figure.get_size_inches()[1]
    axes = place(figure, MARGIN + 0.06, BELOW, WIDTH - MARGIN - 0.06 - TREE, ABOVE)
    axes.set(xlim=(0, TREE), ylim=(LANE * len(served), 0))
    axes.axis("off")
    for node in nodes:
        _cell(axes, node, lefts, cell)
        _forks(axes, node, lefts, cell)
    _runs(axes, root, lefts, cell)
    ends = {lane: node for node in [root, *nodes] for lane in node.prompts}  # the last block of each prompt
    for lane, one in enumerate(served):
        if len(one.tokens) % size:
            _tail(axes, lane, len(one.tokens) % size / size, ends[lane], lefts, cell)
    _bars(figure, prompts)
    write(figure, MARGIN + 0.06, height - 0.52, f"blocks of {size} tokens", fontsize=9, color=MUTED, va="top")
    _legend(figure, f"{total} full blocks read, {kept} kept")

    print(f"prefix_tree: {len(served)} prompts, {total} full blocks of {size} tokens, {kept} kept")
    told = "; ".join(
        f"{name} has {len(s.tokens)} tokens, TTFT {show_time(s.cold_s)} cold and {show_time(s.hit_s)} with a hit"
        for name, s in prompts.items()
    )
    shared = sum(len(node.prompts) > 1 for node in nodes)
    return describe(
        figure,
        f"A tree that grows from left to right, a cell per block of {size} tokens. {len(served)} prompts have {total} "
        f"full blocks; {kept} are kept, {shared} of them shared, drawn before the branches part. Right of it two bars "
        f"per prompt: {told}.",
    )


def tree(prompts: Sequence[list[int]], size: int) -> Node:
    """The prompts' full blocks as nodes; the root is the empty beginning, at depth -1."""
    root = Node(-1, list(range(len(prompts))), {})
    for number, tokens in enumerate(prompts):
        node = root
        for start in range(0, len(tokens) - size + 1, size):
            block = tuple(tokens[start : start + size])
            node = node.children.setdefault(block, Node(node.depth + 1, [], {}))
            node.prompts.append(number)
    return root


def walk(node: Node):
    """All nodes below this one, each before those that continue it."""
    for child in node.children.values():
        yield child
        yield from walk(child)


def _places(root: Node) -> tuple[dict[int, float], float]:
    """(left edge of each node by its id, width of a cell) in inches: a gap stands where a branch parts."""
    forks = {id(root): 0}
    nodes = [root, *walk(root)]
    for node in nodes:
        for child in node.children.values():
            forks[id(child)] = forks[id(node)] + (node is not root and _parts(node, child))
    room = [(TREE - FORK * (forks[id(node)] + 1)) / (node.depth + 2) for node in nodes]
    cell = min(LARGEST_CELL, *room)
    return {id(node): node.depth * cell + FORK * forks[id(node)] for node in nodes}, cell


def _parts(node: Node, child: Node) -> bool:
    return child.prompts != node.prompts


def _middle(lane: float) -> float:
    return LANE * (lane + 0.5) + 0.06


def _height(node: Node) -> float:
    return _middle(sum(node.prompts) / len(node.prompts))


def _cell(axes: Axes, node: Node, lefts: dict[int, float], cell: float) -> None:
    shared, left, middle = len(node.prompts) > 1, lefts[id(node)], _height(node)
    look = {"facecolor": SHARED, "edgecolor": BLUE} if shared else {"facecolor": OWN, "edgecolor": MUTED}
    name = "shared" if shared else "own"
    axes.add_patch(Rectangle((left, middle - HEIGHT / 2), cell, HEIGHT, linewidth=0.9, label=name, **look))
    if shared:  # the double border of the page map
        inner = (left + 0.035, middle - HEIGHT / 2 + 0.035)
        axes.add_patch(Rectangle(inner, cell - 0.07, HEIGHT - 0.07, fill=False, edgecolor=BLUE, linewidth=0.6))


def _forks(axes: Axes, node: Node, lefts: dict[int, float], cell: float) -> None:
    """A line from the end of a block to each branch that leaves it."""
    for child in node.children.values():
        start, end = lefts[id(node)] + cell, lefts[id(child)]
        if end - start > 0.01:
            _line(axes, (start, _height(node)), (end, _height(child)))


def _tail(axes: Axes, lane: int, share: float, last: Node, lefts: dict[int, float], cell: float) -> None:
    """What a prompt has behind its last full block, on its own lane."""
    start = lefts[id(last)] + cell if last.depth >= 0 else 0.0
    left = start
    if len(last.prompts) > 1 and last.depth >= 0:
        left += FORK
        _line(axes, (start, _height(last)), (left, _middle(lane)))
    box = Rectangle((left, _middle(lane) - HEIGHT / 2), cell * share, HEIGHT, label="tail", **TAIL)
    axes.add_patch(box)


def _line(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    bend = (start[0] + end[0]) / 2
    across, down = [start[0], bend, bend, end[0]], [start[1], start[1], end[1], end[1]]
    axes.plot(across, down, color=INK, linewidth=1, solid_joinstyle="round")


def _runs(axes: Axes, node: Node, lefts: dict[int, float], cell: float) -> None:
    """Above each stretch that the same prompts share: how many blocks, how many prompts."""
    for child in node.children.values():
        last = child
        while len(last.children) == 1 and not _parts(last, next(iter(last.children.values()))):
            last = next(iter(last.children.values()))
        if len(child.prompts) > 1:
            count = last.depth - child.depth + 1
            words = f"{len(child.prompts)} prompts"
            if count * cell > WORDS:
                words = f"{count} blocks, {words}"
            middle = (lefts[id(child)] + lefts[id(last)] + cell) / 2
            axes.text(middle, _height(child) - 0.19, words, ha="center", va="bottom", fontsize=8, color=INK)
        _runs(axes, last, lefts, cell)


def _bars(figure: Figure, prompts: Mapping[str, Served]) -> None:
    left = MARGIN + 0.06 + TREE + BETWEEN
    axes = place(figure, left, BELOW, WIDTH - left - BARS, ABOVE)
    longest = max(s.cold_s for s in prompts.values())
    axes.set(xlim=(0, longest), ylim=(LANE * len(prompts), 0))
    axes.axis("off")
    for lane, (name, one) in enumerate(prompts.items()):
        middle = _middle(lane)
        axes.text(0, middle - 0.15, name, fontsize=9, fontweight="bold", va="bottom")
        for top, seconds, look in (
            (middle - 0.12, one.cold_s, {"facecolor": PAPER, "edgecolor": INK, "label": "cold", "hatch": "...."}),
            (middle + 0.04, one.hit_s, {"facecolor": BLUE, "edgecolor": BLUE, "label": "hit"}),
        ):
            axes.add_patch(Rectangle((0, top), seconds, 0.13, linewidth=0.8, **look))
            axes.text(seconds + 0.015 * longest, top + 0.07, show_time(seconds), va="center", fontsize=8.2)
    height = figure.get_size_inches()[1]
    write(figure, left, height - 0.52, "time to first token", fontsize=9, color=MUTED, va="top")


def _legend(figure: Figure, words: str) -> None:
    width, _ = figure.get_size_inches()
    axes = place(figure, MARGIN + 0.06, 0.2, MARGIN, figure.get_size_inches()[1] - 0.2 - 0.24)
    axes.set(xlim=(0, width - 2 * MARGIN - 0.06), ylim=(0.24, 0))
    axes.axis("off")
    looks = {
        "shared": {"facecolor": SHARED, "edgecolor": BLUE},
        "of one prompt": {"facecolor": OWN, "edgecolor": MUTED},
        "not a full block": TAIL,
        "cold": {"facecolor": PAPER, "edgecolor": INK, "hatch": "...."},
        "hit": {"facecolor": BLUE, "edgecolor": BLUE},
    }
    x = 0.0
    for name, look in looks.items():
        axes.add_patch(Rectangle((x, 0.02), 0.24, 0.2, **{"linewidth": 0.8, **look}))
        axes.text(x + 0.32, 0.13, name, va="center", fontsize=8.5)
        x += 0.62 + 0.075 * len(name)
    axes.text(axes.get_xlim()[1], 0.13, words, va="center", ha="right", fontsize=8.5, color=MUTED)
