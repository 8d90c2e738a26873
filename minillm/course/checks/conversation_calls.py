"""Checks a conversation over one cache: which tokens the model is given, and for which position.

The model is a sum: after token t it answers t + shift, whatever came before. So a wrong position shows in the calls
and spreads nowhere, and each item looks at the calls that are its business: pieces of a prompt, steps behind it,
the next turn. The oracle counts the rows that are in the cache. Task 3 of exercise 05.
"""

from __future__ import annotations

import random

import torch

from minillm.course.checks.answers import plain
from minillm.course.grader.task import MISSING, Case, Record, Verdicts

TALK_ITEMS = (
    "pieces",
    "a short last piece",
    "pieces of one token",
    "steps",
    "steps behind pieces",
    "stop token",
    "second turn",
    "third turn",
    "answers of one token",
)
VOCABULARY = 2000
OTHER_TOKENS = "the steps were given other tokens than the answer's, one after another"
Call = list  # [start, token, token, ...]


def talk_cases(seed: int) -> list[Case]:
    r = random.Random(seed)
    size, steps, shift = r.randint(3, 5), r.randint(3, 5), r.randint(40, 60)

    def case(item: str, lengths: list[int], max_tokens: int, budget: int, stops_after: int = 0) -> Case:
        """One turn of each length. The stop token is this one of the first answer; 0: none that comes."""
        turns = [r.sample(range(shift), length) for length in lengths]
        stop = _chain(turns[0][-1], shift, stops_after)[-1] if stops_after else -1
        rules = {"max_tokens": max_tokens, "budget": budget, "stop": stop, "shift": shift}
        return {"items": [item], "turns": turns, **rules}

    return [
        case("pieces", [2 * size], 1, size),
        case("a short last piece", [2 * size + 2], 1, size),
        case("pieces of one token", [size], 1, 1),
        case("steps", [size], steps, size),
        case("steps behind pieces", [2 * size + 1], steps, size),
        case("stop token", [size], 9, size, stops_after=3),
        case("second turn", [size, size - 1], steps, size),
        case("third turn", [size, size - 1, size - 1], steps, size),
        case("answers of one token", [size, size - 1], 1, size),
    ]


def _chain(token: int, shift: int, length: int) -> list[int]:
    """The tokens that follow this one."""
    return [token + shift * i for i in range(1, length + 1)]


def talk_drive(converse, case: Case) -> Record:
    calls: list[Call] = []

    def model(ids, start):
        ids = torch.as_tensor(ids).flatten().tolist()
        calls.append([int(start), *ids])
        if len(calls) > 200:
            raise RuntimeError("the model was called 200 times, and the conversation is not over")
        logits = torch.zeros(len(ids), VOCABULARY)
        for row, token in enumerate(ids):
            logits[row, (token + case["shift"]) % VOCABULARY] = 1.0
        return logits

    turns = [list(turn) for turn in case["turns"]]
    answers = converse(model, turns, case["max_tokens"], case["budget"], case["stop"])
    return {"answers": plain(answers), "calls": calls}


def expected(case: Case) -> tuple[list[list[Call]], list[list[list[Call]]], list[list[int]]]:
    """(calls that read each turn, calls that follow them one token at a time, answers)."""
    reading, stepping, answers, rows, owed = [], [], [], 0, []
    for turn in case["turns"]:
        ids, pieces = owed + turn, []
        for at in range(0, len(ids), case["budget"]):
            pieces.append([rows + at, *ids[at : at + case["budget"]]])
        rows += len(ids)
        answer = _chain(ids[-1], case["shift"], case["max_tokens"])
        if case["stop"] in answer:
            answer = answer[: answer.index(case["stop"]) + 1]
        steps = [[rows + i, token] for i, token in enumerate(answer[:-1])]
        rows, owed = rows + len(steps), answer[-1:]
        reading.append(pieces)
        stepping.append(steps)
        answers.append(answer)
    return reading, stepping, answers


def talk_judge(case: Case, record: Record) -> Verdicts:
    (item,), calls, answers = case["items"], record.get("calls"), record.get("answers")
    reading, stepping, wanted = expected(case)
    if answers is None:
        return {item: f"the result {MISSING}"}
    if not isinstance(calls, list) or not all(isinstance(call, list) for call in calls):
        return {item: "the model was not called as model(ids, start)"}
    if item in ("pieces", "a short last piece", "pieces of one token"):
        return {item: _reading_fault(calls[: len(reading[0])], reading[0], case)}
    if item == "steps behind pieces":
        return {item: _steps_fault(calls[len(reading[0]) :], stepping[0])}
    if item in ("steps", "stop token"):
        fault = _steps_fault(calls[1:], stepping[0])
        return {item: (fault if fault != OTHER_TOKENS else "") or _answer_fault(answers, wanted) or fault}
    return {item: _turn_fault(calls, reading[-1], case["turns"][-1], len(reading), not _answer_fault(answers, wanted))}


def _reading_fault(calls: list[Call], wanted: list[Call], case: Case) -> str:
    """What is wrong with the calls that read a prompt in pieces."""
    if calls == wanted:
        return ""
    longest = max((len(call) - 1 for call in calls), default=0)
    if longest > case["budget"]:
        return f"the model was given {longest} tokens in one call, the budget is {case['budget']}"
    if [call[1:] for call in calls] != [call[1:] for call in wanted]:
        return f"the pieces have {[len(call) - 1 for call in calls]} tokens, right are {[len(c) - 1 for c in wanted]}"
    starts, right = [call[0] for call in calls], [call[0] for call in wanted]
    why = ": each overwrites the one before it" if len(set(starts)) < len(starts) else ""
    return f"the pieces begin at positions {starts}, right are {right}{why}"


def _steps_fault(calls: list[Call], wanted: list[Call]) -> str:
    """What is wrong with the calls that run one token of the answer each."""
    if calls == wanted:
        return ""
    if any(len(call) != 2 for call in calls):
        return "behind the prompt the model needs one token a call, the newest: the others are in the cache"
    if len(calls) == len(wanted) + 1:
        return "the last token of the answer was run, and nobody asked what follows it: read it with the next turn"
    if len(calls) != len(wanted):
        why = "an answer ends with the stop token, or after max_tokens"
        return f"{len(calls)} calls followed the prompt, {len(wanted)} were wanted: {why}"
    starts, right = [call[0] for call in calls], [call[0] for call in wanted]
    wrong = [i for i, start in enumerate(starts) if start != right[i]]
    if not wrong:
        return OTHER_TOKENS
    off = starts[wrong[0]] - right[wrong[0]]
    since = f"after step {wrong[0]} the offset jumps, by {off} too much" if wrong[0] else f"off by {off} from the start"
    return f"the steps run at positions {starts}, right are {right}: {since}"


def _answer_fault(answers: object, wanted: list[list[int]]) -> str:
    """What is wrong with the answers themselves."""
    if not isinstance(answers, list) or not all(isinstance(answer, list) for answer in answers):
        return "the result is not a list with one list of token ids per turn"
    found = [[token if isinstance(token, int | float) else None for token in answer] for answer in answers]
    if found == wanted:
        return ""
    if found == [answer[:-1] for answer in wanted]:
        return "the last token of the answer is missing; a stop token belongs to it, too"
    return f"the answers are {found}, and the model said {wanted}: the last row of logits tells what comes next"


def _turn_fault(calls: list[Call], wanted: list[Call], ids: list[int], turn: int, answered: bool) -> str:
    """What is wrong with the rows of a later turn, the first of which is the last token of the answer before it."""
    rows = [[call[0] + i, token] for call in calls for i, token in enumerate(call[1:])]
    first, (_, owed, *_) = wanted[0][0], wanted[0]
    right = [[first + i, token] for i, token in enumerate([owed, *ids])]
    got = rows[first : first + len(right)]
    if got == right:
        return ""
    tokens, places = [token for _, token in got], [place for place, _ in got]
    if answered and owed not in [token for _, token in rows]:
        return f"token {owed}, the last of the answer before turn {turn}, was chosen and never run: no K and V of it"
    if tokens != [owed, *ids]:
        return f"turn {turn} puts tokens {tokens} into the cache, right are {[owed, *ids]}"
    return f"turn {turn} is put at positions {places}, and rows 0 to {first - 1} are there already: behind them"
