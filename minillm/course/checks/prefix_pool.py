"""Checks a block pool that finds prompts again: what it hands out, what it refuses, and what it forgets.

Each case is a short history of requests. The oracle (prefix_books.py) says how many tokens are found at each start; the
learner's block numbers may be any, as long as no block in use is handed out and each block that is called cached holds
what it should. Task 3 of exercise 07.
"""

from __future__ import annotations

import random

from minillm.course.checks.answers import plain
from minillm.course.checks.prefix_books import Books
from minillm.course.grader.task import Case, Record, Verdicts

POOL_ITEMS = (
    "found again",
    "whole prompt",
    "in use",
    "computed twice",
    "a hit is a use",
    "taken block",
    "tail first",
    "oldest first",
    "first piece only",
    "last token of an answer",
    "hits need room",
    "refused without a trace",
)
MISSED = {
    "found again": "what was computed stays findable until its block is given to somebody",
    "whole prompt": "all full blocks are there, and all but that of the last token are found",
    "in use": "b still uses these blocks, and nobody may have got them",
    "computed twice": "two blocks hold the same; the one published first is the one to find, and it was freed last",
    "a hit is a use": "they were used again and freed last, so others had to go first",
    "taken block": "nothing was taken from it",
    "tail first": "the head of it went first, and nothing behind a missing block is found; free the tail first",
    "oldest first": "others were freed before it, so others had to go first",
    "first piece only": "a full block of it has been computed",
    "last token of an answer": "the blocks whose last row has been computed are there, of prompt and answer",
    "hits need room": "they are there, and there is room for the rest",
    "refused without a trace": "a request that is refused takes nothing and changes nothing",
}

TAKEN = ()


class History:
    """Events of a case, by short calls."""

    def __init__(self, item: str, size: int, num_blocks: int):
        self.case = {"items": [item], "size": size, "num_blocks": num_blocks, "events": []}

    def start(self, who: str, tokens: list[int], room: int = 0) -> History:
        return self._add("start", who, tokens=list(tokens), room=room)

    def computed(self, who: str, tokens: list[int], n: int | None = None) -> History:
        return self._add("computed", who, tokens=list(tokens), n=len(tokens) if n is None else n)

    def end(self, who: str) -> History:
        return self._add("end", who)

    def run(self, who: str, tokens: list[int]) -> History:
        return self.start(who, tokens).computed(who, tokens).end(who)

    def _add(self, do: str, who: str, **more) -> History:
        self.case["events"].append({"do": do, "who": who, **more})
        return self


def pool_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    size = r.randint(3, 5)
    ids = iter(r.sample(range(1000), 800))

    def new(blocks: int, more: int = 0) -> list[int]:
        return [next(ids) for _ in range(blocks * size + more)]

    def history(item: str, num_blocks: int) -> History:
        return History(item, size, num_blocks)

    a, b, x = new(2, 1), new(2, 1), new(2, 1)  # three blocks each, two of them full
    whole, prompt, next_turn = new(2), new(1, 1), new(1)
    answered = prompt + new(0, size - 1)
    everything = new(3, 1)  # four blocks
    more, another = new(2, 1), a[: 2 * size] + new(0, 2)
    one = new(1, 1)
    turned = a[size : 2 * size] + a[:size] + new(0, 1)
    found = [
        history("found again", 8).run("a", a).run("b", turned),
        history("found again", 4).run("a", a).run("b", a).run("c", a).run("x", everything),
        history("whole prompt", 4).run("a", whole).run("b", whole).run("c", whole).run("x", everything),
        history("whole prompt", 8).run("a", whole).run("b", whole + next_turn),
        (
            history("in use", 6).run("old", a).start("a", a).computed("a", a).start("b", another).end("a")
            .run("x", x).start("y", b).end("y").run("c", a)
        ),
        (
            history("computed twice", 4).start("a", one).start("b", one).computed("a", one).computed("b", one)
            .end("b").end("a").start("x", new(1, 1)).run("c", one).end("x").run("y", everything)
        ),
        history("a hit is a use", 6).run("a", a).run("b", b).run("a", a).start("x", x).run("c", a).run("d", b),
        history("taken block", 3).run("a", a).run("b", b).run("c", a),
        history("tail first", 3).run("a", a).run("x", new(1, 1)).run("c", a),
        history("oldest first", 6).run("a", a).run("b", b).start("x", x).run("c", b).run("d", a),
        history("first piece only", 8).start("a", everything).computed("a", everything, size + 1).end("a")
        .run("b", everything),
        history("first piece only", 8).start("a", a).computed("a", a, size - 1).start("b", a),
        (
            history("last token of an answer", 8).start("a", prompt, size).computed("a", prompt)
            .computed("a", answered, 2 * size - 1).end("a").run("b", answered + next_turn)
        ),
        history("hits need room", 4).run("a", a).start("b", a[: 2 * size] + more),
        history("hits need room", 4).run("a", a).start("b", a[: 2 * size] + more[: size + 1]),
        history("refused without a trace", 4).run("a", a).start("b", a[: 2 * size] + more).run("x", everything),
        (
            history("refused without a trace", 6).run("a", a).run("b", b).start("c", a[: 2 * size] + new(5))
            .start("x", x).run("d", b)
        ),
    ]  # fmt: skip
    return [story.case for story in found]


def pool_drive(PrefixPool, case: Case) -> Record:
    pool, tables, starts = PrefixPool(case["num_blocks"], case["size"]), {}, []
    for event in case["events"]:
        who = event["who"]
        if event["do"] == "start":
            start = {"table": None, "cached": None, "error": "", "form": ""}
            starts.append(start)
            try:
                answer = pool.start(list(event["tokens"]), event["room"])
            except (NotImplementedError, AttributeError, TypeError):
                raise
            except Exception as error:
                start["error"] = f"{type(error).__name__}: {error}"
                break
            if answer is None:
                continue
            if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[0], tuple | list):
                start["form"] = _types(answer)
                break
            tables[who] = answer[0]
            start["table"], start["cached"] = plain(answer)
        elif who in tables and event["do"] == "computed":
            pool.computed(list(event["tokens"]), tables[who], event["n"])
        elif who in tables:
            pool.end(tables.pop(who))
    return {"starts": starts}


def _types(answer: object) -> str:
    """The type of an answer that is no pair of a table and a number, with those of its parts."""
    inside = ", ".join(type(x).__name__ for x in answer[:3]) if isinstance(answer, tuple | list) else ""
    return f"{type(answer).__name__} of {inside}" if inside else type(answer).__name__


# ---- verdicts ------------------------------------------------------------------------------------


def pool_judge(case: Case, record: Record) -> Verdicts:
    (item,), size, events = case["items"], case["size"], case["events"]
    books, starts = Books(case["num_blocks"], size), iter(record["starts"])
    tables: dict[str, list[int]] = {}
    holds: dict[int, tuple[int, ...]] = {}  # learner's block -> the text of which it holds the last rows
    for event in events:
        who = event["who"]
        if event["do"] == "start":
            wanted, start = books.start(who, event["tokens"], event["room"]), next(starts)
            fault = _start_fault(event, start, wanted, tables, holds, case)
            if fault:
                return {item: fault}
            if wanted is not None:
                tables[who] = start["table"]
                for block in holds.keys() & set(start["table"][wanted // size :]):
                    holds[block] = TAKEN
        elif event["do"] == "computed":
            books.computed(who, event["tokens"], event["n"])
            for i in range(event["n"] // size):
                holds[tables[who][i]] = tuple(event["tokens"][: (i + 1) * size])
        else:
            books.end(who)
            del tables[who]
    return {item: ""}


def _start_fault(event: dict, start: dict, wanted: int | None, tables: dict, holds: dict, case: Case) -> str:
    """What is wrong with the answer to one start, against what was wanted."""
    who, length, size, num_blocks = event["who"], len(event["tokens"]), case["size"], case["num_blocks"]
    needed = -(-(length + event["room"]) // size)
    free = num_blocks - len({block for table in tables.values() for block in table})
    request = f"{who} needs {needed} blocks"
    if start["form"]:
        return f"start returned {start['form']}; wanted are a list of blocks and a number of tokens, or None"
    if wanted is None:
        if start["error"] or start["table"] is not None:
            what = f"ends in {start['error']}" if start["error"] else "gets them"
            return f"{request}, {free} are free, and it {what}: a free block that is found again is free no more"
        return ""
    if start["error"]:
        return f"{request} of {free} free ones, and start raises {start['error']}"
    if start["table"] is None:
        return f"{request}, {free} of {num_blocks} are free, and it is refused: {MISSED[case['items'][0]]}"
    table, cached = start["table"], start["cached"]
    if any(type(block) is not int or not 0 <= block < num_blocks for block in table):
        return f"the table of {who} is {table}: wanted are numbers of blocks, 0 to {num_blocks - 1}"
    if len(set(table)) < len(table):
        return f"the table of {who} is {table}, one block twice: a block was free twice, or stayed free while in use"
    if len(table) != needed:
        return f"{request} for {length} tokens and room for {event['room']}, and the table has {len(table)}"
    if type(cached) is not int or cached % size:
        return f"{cached} tokens of {who} are called cached; only whole blocks of {size} are"
    return _cached_fault(event, table, cached, wanted, tables, holds, case)


def _cached_fault(
    event: dict, table: list[int], cached: int, wanted: int, tables: dict, holds: dict, case: Case
) -> str:
    """What is wrong with the blocks that are called cached, and with those that are not."""
    who, tokens, size = event["who"], event["tokens"], case["size"]
    if cached >= len(tokens):
        return f"all {len(tokens)} tokens of {who} are called cached: one has to run, or no logits say what comes next"
    used = {block: other for other, blocks in tables.items() for block in blocks}
    for i, block in enumerate(table):
        if i >= cached // size:
            if block in used:
                return f"block {block} is given to {who} as a new one while {used[block]} uses it"
        elif holds.get(block) != tuple(tokens[: (i + 1) * size]):
            held = holds.get(block)
            if held and list(held[-size:]) == tokens[i * size : (i + 1) * size]:
                what = "holds K and V of these tokens behind another beginning, and those are others"
            elif held is not None:
                what = "was taken for other tokens: forget what a block held when you hand it out as a new one"
            else:
                what = "has rows that nobody has computed: publish full blocks of the first n tokens, and no others"
            return f"block {block} is called cached for {who}, and it {what}"
    if cached != wanted:
        why = MISSED[case["items"][0]] if cached < wanted else "others were freed later; take the oldest first"
        return f"{cached} tokens of {who} are found, {wanted} are there: {why}"
    return ""
