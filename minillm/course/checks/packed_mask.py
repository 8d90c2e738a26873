"""Checks the causal mask of one request, and of several that share a call: each is a block of its own.

What a query may not see is judged in three regions: other requests' keys, its own key, the rest of its block. So a
slip in one of them costs the items of that region. The oracle asks each token for its request and its place there
and lays no blocks. Task 2 of exercise 02.
"""

from __future__ import annotations

import random

import torch

from minillm.course.grader.task import Case, Record, Verdicts, difference

MASK_ITEMS = (
    "one request",
    "window",
    "own key",
    "fresh prompts",
    "cached tokens",
    "requests apart",
    "windows of several",
)


def mask_cases(seed: int) -> list[Case]:
    r = random.Random(seed)

    def fresh(count: int) -> list[int]:
        return [r.randint(2, 6) for _ in range(count)]

    def case(n: int | list[int], keys: int | list[int], *items: str, window: int | None = None) -> Case:
        return {"items": list(items), "n": n, "S": keys, "window": window}

    prompts, chunks, new = fresh(3), fresh(3), fresh(3)
    more, window = r.randint(7, 12), r.randint(2, 4)
    cached = [n + r.randint(1, 5) for n in chunks]
    return [
        case(3, 8, "one request"),
        case(1, more, "one request"),
        case(more, more, "window", window=window),
        case([2, 3], [2, 3], "own key", "fresh prompts", "requests apart"),
        case(prompts, prompts, "own key", "fresh prompts", "requests apart"),
        case([2, 1], [3, 4], "cached tokens", "requests apart"),
        case(chunks, cached, "cached tokens", "requests apart"),
        case(new, [n + 4 for n in new], "windows of several", window=window),
    ]


def mask_drive(causal_mask, case: Case) -> Record:
    n, keys = (list(value) if isinstance(value, list) else value for value in (case["n"], case["S"]))
    return {"mask": causal_mask(n, keys, case["window"])}


def mask_judge(case: Case, record: Record) -> Verdicts:
    got, window = record.get("mask"), case["window"]
    requests = [(n, keys) for n, keys in zip(_as_list(case["n"]), _as_list(case["S"]), strict=True)]
    rows, columns = (sum(sizes) for sizes in zip(*requests, strict=True))
    if isinstance(got, torch.Tensor) and got.dtype != torch.bool:
        return dict.fromkeys(case["items"], f"the mask holds {got.dtype}, not booleans: True where a query sees a key")
    if not isinstance(got, torch.Tensor) or got.shape != (rows, columns):
        return dict.fromkeys(case["items"], difference(got, torch.zeros(rows, columns).bool(), name="the mask"))
    distance, apart = _distances(requests)
    wanted = _seen(distance, apart, window)
    if rows > 1 and torch.equal(got, ~wanted):
        return dict.fromkeys(case["items"], "True and False are swapped: True means that the query sees the key")
    regions = {"own key": ~apart & (distance == 0), "requests apart": apart}
    return {
        item: _diagnosis(got, wanted, requests, window, item)
        if ((got != wanted) & regions.get(item, ~apart & (distance != 0))).any()
        else ""
        for item in case["items"]
    }


def _as_list(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


def _distances(requests: list[tuple[int, int]], top_left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """How far a key lies behind a query, [T, S of all], as if in one request, and whether they are of two requests."""
    queries = [(r, i + (0 if top_left else keys - n)) for r, (n, keys) in enumerate(requests) for i in range(n)]
    keys = [(r, j) for r, (_, num) in enumerate(requests) for j in range(num)]
    distance = torch.tensor([[place - at for _, at in keys] for _, place in queries])
    return distance, torch.tensor([[owner != other for other, _ in keys] for owner, _ in queries])


def _seen(distance: torch.Tensor, apart: torch.Tensor, window: int | None) -> torch.Tensor:
    return ~apart & (distance >= 0) & (distance < (window or distance.max() + 1))


def _diagnosis(
    got: torch.Tensor, wanted: torch.Tensor, requests: list[tuple[int, int]], window: int | None, item: str
) -> str:
    distance, apart = _distances(requests)
    inside = {"own key": ~apart & (distance == 0), "requests apart": apart}.get(item, ~apart & (distance != 0))
    crowded = torch.zeros_like(got)
    row = column = 0
    for n, keys in requests:  # a slip: the next request's keys are sought n columns further on
        block = wanted[row : row + n][~apart[row : row + n]].view(n, keys)
        crowded[row : row + n, column : column + keys] = block
        row, column = row + n, column + n
    slips = {
        "the keys of the second request begin behind all keys of the first, not behind its queries": crowded,
        "aligned at the top left: the queries are the last tokens of their request, not the first": _seen(
            _distances(requests, top_left=True)[0], apart, window
        ),
        "off by one: the window counts the query's own key, too": _seen(distance, apart, window and window + 1),
        "the window is ignored: keys further back than the window are still seen": _seen(distance, apart, None),
        "a query does not see its own key, which it has to": wanted & (distance != 0),
    }
    for sentence, mask in slips.items():
        same = (got == mask)[inside].all()
        if same and not torch.equal(mask[inside], wanted[inside]):
            return sentence
    row, key = ((got != wanted) & inside).nonzero()[0].tolist()
    if apart[row, key]:
        return f"row {row} sees column {key}, a key of another request: requests that share a call share nothing else"
    wrong = "sees key {}, and must not" if got[row, key] else "does not see key {}, and has to"
    return f"n = {[n for n, _ in requests]}, S = {[keys for _, keys in requests]}: row {row} {wrong.format(key)}"
