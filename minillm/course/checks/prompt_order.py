"""Checks the order in which waiting prompts are read, and how many tokens of each are computed.

Orders are judged by the work they make, against the least of all orders (a table over subsets); the counts of a plan
by the order it has chosen. So a slip in one costs nothing in the other. Task 2 of exercise 07.
"""

from __future__ import annotations

import functools
import random

from minillm.course.checks.answers import plain
from minillm.course.grader.task import MISSING, Case, Record, Verdicts

COUNT_ITEMS = ("whole blocks", "last token", "from the first token", "nothing to find", "after another")
ORDER_ITEMS = (
    *COUNT_ITEMS,
    "two documents",
    "chapters",
    "warm first",
    "nearest first",
    "short before long",
    "equal prompts",
    "any tree",
)
NUM_TREES = 12
FULL_BLOCKS = "only full blocks are kept, so only full blocks are found"


def order_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    size = r.randint(3, 5)
    ids = iter(r.sample(range(1000, 99_000), 4000))

    def new(blocks: float = 1) -> list[int]:
        """Tokens that stand nowhere else; half a block is 1 token."""
        return [next(ids) for _ in range(int(blocks) * size + (blocks % 1 > 0))]

    def pair(*blocks: float) -> list[list[int]]:
        """New texts of as many tokens each, in order of their first token."""
        return sorted(new(n) for n in blocks)

    def case(item: str, prompts: list[list[int]], warm: list[int] = ()) -> Case:
        return {"items": [item], "prompts": prompts, "warm": list(warm), "size": size}

    start, long = new(2), new(4)
    low, high = pair(2, 2)
    first, second = (low + chapter for chapter in pair(2, 2))
    documents = [low + new(1.5), high + new(1.5), low + new(1.5), high + new(1.5)]
    chapters = [second, high, first, low, second, first, high, first]
    one, other = (first, second) if r.random() < 0.5 else (second, first)
    whole = new(2)
    short = [new(1.5), whole + new(1.5), whole, new(2.5)]
    twice = new(2.5)
    equal = [new(1.5), twice, twice, twice, new(1.5)]
    return [
        case("whole blocks", [start + long[: size - 1] + new(3)], start + long),
        case("whole blocks", [start + new(1)], start + new(1)),
        case("last token", [long], long),
        case("last token", [long], long + new(1)),
        case("from the first token", [new(1) + long[size:]], long),
        case("nothing to find", [long[: size - 1]], long),
        case("nothing to find", [new(2.5)]),
        case("nothing to find", [long], long[: size - 1]),
        case("after another", [start + new(0.5), start + new(0.5)]),
        case("two documents", documents),
        case("chapters", [text + new(0.5) for text in chapters]),
        case("warm first", documents, high + new(1.5)),
        case("warm first", documents, low + new(1.5)),
        case("nearest first", [text + new(0.5) for text in (high, other, low, one)], first + new(0.5)),
        case("nearest first", [text + new(0.5) for text in (high, other, low, one)], second + new(0.5)),
        case("short before long", short),
        case("equal prompts", equal),
        *(case("any tree", _tree(r, new)) for _ in range(NUM_TREES)),
    ]


def _tree(r: random.Random, new) -> list[list[int]]:
    """Seven prompts out of one random tree, none of which is the whole beginning of another one's blocks."""
    nodes = [new(1), new(1)]
    while len(nodes) < 7:
        nodes.append(r.choice(nodes) + new(r.randint(1, 2)))
    prompts = [node + new(0.5) for node in [*nodes[2:], *r.sample(nodes[2:], 2)]]
    r.shuffle(prompts)
    return prompts


def order_drive(plan_prompts, case: Case) -> Record:
    prompts = [list(prompt) for prompt in case["prompts"]]
    return {"plan": plain(plan_prompts(prompts, list(case["warm"]), case["size"]))}


# ---- the oracle ----------------------------------------------------------------------------------


def common(a: list[int], b: list[int], size: int) -> int:
    """Whole blocks with which both begin."""
    blocks = 0
    while (blocks + 1) * size <= min(len(a), len(b)) and all(
        a[i] == b[i] for i in range(blocks * size, (blocks + 1) * size)
    ):
        blocks += 1
    return blocks


def work(prompt: list[int], before: list[int], size: int) -> int:
    """Tokens of the prompt to compute when the cache holds the blocks of the one before it; at least one."""
    found = common(prompt, before, size) * size
    return len(prompt) - found if found < len(prompt) else size


def least_work(prompts: list[list[int]], warm: list[int], size: int) -> int:
    """The sum of the best order, over all of them."""
    cost = [[work(prompt, before, size) for prompt in prompts] for before in [*prompts, warm]]

    @functools.cache
    def rest(done: int, last: int) -> int:
        left = [i for i in range(len(prompts)) if not done >> i & 1]
        return min((cost[last][i] + rest(done | 1 << i, i) for i in left), default=0)

    return rest(0, len(prompts))


# ---- verdicts ------------------------------------------------------------------------------------


def order_judge(case: Case, record: Record) -> Verdicts:
    (item,), prompts, warm, size = case["items"], case["prompts"], case["warm"], case["size"]
    fault = _form_fault(record["plan"], len(prompts))
    if fault:
        return {item: fault}
    order, told = ([int(entry[column]) for entry in record["plan"]] for column in (0, 1))
    before = [warm, *(prompts[i] for i in order)]
    if item in COUNT_ITEMS:
        faults = (_count_fault(prompts[i], before[k], size, told[k], k, warm) for k, i in enumerate(order))
        return {item: next(filter(None, faults), "")}
    if item == "equal prompts":
        equal = [i for i in order if prompts.count(prompts[i]) > 1]
        if equal != sorted(equal):
            return {item: f"prompts {sorted(equal)} are the same, and are read in the order {equal}: who came first?"}
    made = sum(work(prompts[i], before[k], size) for k, i in enumerate(order))
    least = least_work(prompts, warm, size)
    if made == least:
        return {item: ""}
    return {item: f"the order {order} computes {made} tokens, {least} are enough: {_reason(order, before, case)}"}


def _form_fault(found: object, count: int) -> str:
    """Why the plan is none, whatever its numbers are."""
    if found is None:
        return f"the plan {MISSING}"
    if not isinstance(found, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in found):
        return "the plan is not a list of pairs (index, computed)"
    if not all(
        isinstance(x, int | float) and not isinstance(x, bool) and x == x // 1 for entry in found for x in entry
    ):
        return "the pairs of the plan are not pairs of whole numbers (index, computed)"
    order, second = ([entry[column] for entry in found] for column in (0, 1))
    if sorted(order) != list(range(count)):
        turned = "; in a pair the index stands first" if sorted(second) == list(range(count)) else ""
        return f"the plan reads prompts {order}, and {count} wait: each has to be read once{turned}"
    return ""


def _count_fault(prompt: list[int], before: list[int], size: int, told: int, place: int, warm: list[int]) -> str:
    """What is wrong with the number of tokens that one prompt is said to compute."""
    right, length = work(prompt, before, size), len(prompt)
    if told == right:
        return ""
    same = [a == b for a, b in zip(prompt, before, strict=False)]
    equal = ([*same, False]).index(False)
    anywhere = sum(all(same[at : at + size]) for at in range(0, len(same) - size + 1, size)) * size
    slips = (
        (1 if right == size else None, "a block is found as a whole or not at all, and so is the last one"),
        (length - right, "that is what is found; wanted is what is left to compute"),
        (0, "nothing would run, and no logits would say what comes next"),
        (max(length - equal, 1), FULL_BLOCKS),
        (length - -(-equal // size) * size, FULL_BLOCKS),
        (length - anywhere, "behind the first difference nothing fits, even where the tokens are the same again"),
        (
            work(prompt, warm, size) if place else None,
            "what was read before it is in the cache now, and `warm` is gone",
        ),
    )
    why = next((sentence for number, sentence in slips if number == told), f"{right} is right")
    shares = f"of {length} tokens, the first {equal} as in the text before, {told} are computed (block size {size})"
    return f"{shares}: {why}"


def _reason(order: list[int], before: list[list[int]], case: Case) -> str:
    """The first place where another prompt should have come, as a clause."""
    prompts, size = case["prompts"], case["size"]
    for k, i in enumerate(order):
        last = f"prompt {order[k - 1]}" if k else "the warm one"
        shared = {j: common(prompts[j], before[k], size) for j in order[k:]}
        nearest = max(shared, key=shared.get)
        if shared[nearest] > shared[i]:
            return f"prompt {nearest} begins with {shared[nearest]} blocks of {last}, prompt {i} with {shared[i]}"
    for long, short in zip(order, order[1:], strict=False):
        if len(prompts[short]) == common(prompts[long], prompts[short], size) * size:
            return f"prompt {short} is the beginning of prompt {long}; read before it, none of its blocks is lost"
    return "a prompt comes back to a beginning that was left"
