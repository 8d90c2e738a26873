"""Checks the key of a block: another prefix has another key, and the same prefix the same one on every machine.

Each item is a pair of texts that one careless way to mix numbers cannot tell apart. No key is compared with one of
ours: any digest will do. Two plain blocks in each case see to it that a constant passes nothing. Task 1 of
exercise 07.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from minillm.course.grader.task import MISSING, Case, Record, Verdicts

KEY_ITEMS = (
    "order",
    "large ids",
    "digits",
    "ids apart",
    "parent",
    "swapped blocks",
    "all of the parent",
    "64 bits",
    "lists",
    "every process",
    "the same again",
)
BITS = 64
MANY = 60  # keys among which each bit is 0 once and 1 once, but for one seed in 10**15
BASES = (31, 33, 101, 256, 257, 1000, 10_000, 65_536, 65_537, 100_000)  # of sums that somebody might use
BLOCKS = 100_000  # of a large cache, for the sentence about short keys
ALIKE = ("lists", "the same again")  # items whose texts must get the same key


def key_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    size, parent = r.randint(4, 6), r.getrandbits(BITS)

    def text(*blocks: list[int], parent: int = 0, form: str = "tuple") -> dict:
        return {"parent": parent, "blocks": list(blocks), "form": form}

    def case(item: str, *texts: dict) -> Case:
        """The first text is compared with each of the others."""
        low, high = ([text(sorted(r.sample(ids, size)))] for ids in (range(30, 60), range(150, 250)))
        return {"items": [item], "plain": low + high, "texts": list(texts)}

    a, b, c = r.sample(range(1, 10), 3)
    block, other = (r.sample(range(20, 200), size) for _ in range(2))
    turned, rest = [*block[:-2], block[-1], block[-2]], block[2:]
    high = r.randint(1000, 9000)
    return [
        case("order", text(block), text(block[::-1]), text(turned)),
        case("large ids", text(block), *(text([block[0] + (1 << bits), *block[1:]]) for bits in (8, 16))),
        case("digits", text([a, 10 * b + c, *rest]), text([10 * a + b, c, *rest])),
        case("ids apart", text([high, 110_000, *rest]), *(text([high + 1, 110_000 - m, *rest]) for m in BASES)),
        case("parent", text(block), text(block, parent=parent)),
        case("swapped blocks", text(block, other), text(other, block)),
        case(
            "all of the parent",
            text(block, parent=parent % 2**60),
            *(text(block, parent=parent % 2**60 ^ 1 << bit) for bit in (0, 15, 16, 31, 32, 47, 48, 63)),
            text(block, parent=parent % 2**60 + 2**61 - 1),
        ),
        case("64 bits", text(*(r.sample(range(50_000), size) for _ in range(MANY)))),
        case("lists", text(block, parent=parent), text(block, parent=parent, form="list")),
        case("every process", text(block, other)),
        case("the same again", text(block, other), text(other), text(block, other)),
    ]


def key_drive(hash_block, case: Case) -> Record:
    asked: list[str] = []

    def python_hash(value):
        asked.append(type(value).__name__)
        return hash(value)

    names = getattr(hash_block, "__globals__", {})  # what a learner's code calls `hash` is looked up here first
    watched = "hash" not in names
    if watched:
        names["hash"] = python_hash
    try:
        plain_keys, keys = ([_keys(hash_block, text) for text in case[name]] for name in ("plain", "texts"))
    finally:
        if watched:
            del names["hash"]
    return {"plain": plain_keys, "keys": keys, "hashed": asked[:1]}


def _keys(hash_block: Callable, text: dict) -> list:
    """The keys of a text's blocks, each the parent of the next."""
    key, keys = text["parent"], []
    for block in text["blocks"]:
        key = hash_block(key, tuple(block) if text["form"] == "tuple" else list(block))
        keys.append(key)
    return keys


def key_judge(case: Case, record: Record) -> Verdicts:
    (item,) = case["items"]
    for key in (key for name in ("plain", "keys") for keys in record[name] for key in keys):
        if key is None:
            return {item: f"the key {MISSING}"}
        if type(key) is not int:
            return {item: f"the key is {type(key).__name__}, wanted is an int of Python's own"}
    first, second = (keys[-1] for keys in record["plain"])
    if first == second:
        blocks = " and ".join(str(text["blocks"][0]) for text in case["plain"])
        return {item: f"blocks {blocks} both have the key {first}"}
    if item == "64 bits":
        return {item: _width_fault(record["keys"][0])}
    if item == "every process":
        return {item: PROCESS if record["hashed"] else ""}
    texts, last = case["texts"], [keys[-1] for keys in record["keys"]]
    if item in ALIKE:
        return {item: "" if last[0] == last[-1] else f"{texts[0]['blocks']} {SENTENCES[item]}: {last[0]}, {last[-1]}"}
    same = next((text for text, key in zip(texts[1:], last[1:], strict=True) if key == last[0]), None)
    return {item: "" if same is None else f"{_told(texts[0], same)} get the same key: {SENTENCES[item]}"}


PROCESS = (
    "the key comes from Python's hash(), which differs between versions, and between two starts for strings and bytes: "
    "a cache that another process filled is never hit"
)
SENTENCES = {
    "order": "a sum or a set does not know which token comes first",
    "large ids": "vocabularies have more than 256 ids, and more than 65,536; all bits of an id must enter",
    "digits": "the digits of two ids run together; give each id the same number of bytes",
    "ids apart": "a larger id makes up for the one before it; give each id bytes of its own",
    "parent": "what stands before a block decides what K and V it holds",
    "swapped blocks": "mixed by ^ or +, parent and block can change places; let the parent enter the digest itself",
    "all of the parent": "a part of the parent's bits is dropped",
    "lists": "has one key as a tuple and another as a list",
    "the same again": "has another key when it is asked for again",
}


def _told(text: dict, other: dict) -> str:
    """Two texts, with their parents where these differ."""
    if text["parent"] == other["parent"]:
        return " and ".join(
            str(each["blocks"] if len(each["blocks"]) > 1 else each["blocks"][0]) for each in (text, other)
        )
    return f"{text['blocks'][0]} behind parent {text['parent']:#x} and behind {other['parent']:#x}"


def _width_fault(keys: list[int]) -> str:
    """Why these are not keys of 64 bits."""
    if min(keys) < 0 or max(keys) >> BITS:
        wrong = min(keys) if min(keys) < 0 else max(keys)
        return f"a key is {wrong}: it has to lie from 0 to 2**{BITS} - 1, so that 8 bytes hold it"
    ever, always = 0, -1
    for key in keys:
        ever, always = ever | key, always & key
    used = (ever & ~always).bit_count()
    if used == BITS:
        return ""
    chance = 1 - math.exp(-(BLOCKS**2) / 2 / 2**used)
    return (
        f"of {len(keys)} keys only {used} bits ever change: among {BLOCKS:,} blocks, two have the same key with "
        f"probability {chance:.2g}"
    )
