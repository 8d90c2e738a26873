"""Checks attention of a chunk of new tokens against the cache: positions, what is written, what each query sees.

Where the mask is judged, queries are zero and take the mean of what they see; where it is not, the new keys are quiet,
the first two cached ones loud, and the last query alone counts, which sees those two under every mask. Rotations are
replaced by a factor that grows with the position. The oracle is float64 and goes head by head. Task 2 of exercise 05.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from minillm.course.checks.attention_inputs import LOUD, lookup
from minillm.course.grader.task import Case, Record, Verdicts, diagnose

LOOK_ITEMS = (
    "one token",
    "a prompt",
    "a prompt goes on",
    "itself",
    "scale",
    "grouped heads",
    "positions of queries",
    "positions of keys",
    "values",
    "window",
    "rows that left the window",
)
WRITTEN = {"positions of keys": "k", "values": "v"}  # items about what was written
LAST_ROW = ("scale", "grouped heads", "positions of queries")
D = 16


def look_cases(seed: int) -> list[Case]:
    g = torch.Generator().manual_seed(seed)
    n, start = (int(torch.randint(*bounds, (1,), generator=g)) for bounds in ((3, 6), (4, 8)))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    def case(item: str, n: int, start: int, window: int | None = None, turned: bool = False, **given) -> Case:
        """K and V [start + n, 1, D] in all; the first `start` rows are in the cache already, turned."""
        tensors = {"q": torch.zeros(n, 1, D), "k": noise(start + n, 1, D), "v": noise(start + n, 1, D), **given}
        tensors["v"] = noise(*tensors["k"].shape)
        return {"items": [item], **tensors, "start": start, "window": window, "turned": turned}

    def loud(rows: int) -> torch.Tensor:
        """Keys of which the first two score LOUD and a little more for a query of ones, and the others 0."""
        keys, more = torch.zeros(rows, 1, D), 0.3 + 0.7 * float(torch.rand(1, generator=g))
        keys[:2] = torch.tensor([LOUD, LOUD + more])[:, None, None] / math.sqrt(D)
        return keys

    asked, codes = lookup(2, 4, 4, 2, g)  # two queries of four heads ask for what two K/V heads hold in rows 2 and 3
    codes = codes.roll(2, dims=0)
    codes[2:] = 0
    ones = torch.ones(2, 1, D)
    itself = torch.eye(D)[:n, None]
    return [
        case("one token", 1, start),
        case("a prompt", n, 0),
        case("a prompt goes on", n, start),
        case("itself", 1, 0),
        case("itself", n, 0, q=LOUD * math.sqrt(D) * itself, k=itself),
        case("scale", 2, 2, q=ones, k=loud(4)),
        case("grouped heads", 2, 2, q=asked, k=codes),
        case("positions of queries", 2, 2, q=ones, k=loud(4), turned=True),
        case("positions of keys", n, start, turned=True),
        case("values", n, start, turned=True),
        case("window", n, start, window=3),
        case("window", 2, 1, window=n + 1),
        case("rows that left the window", 2, start, window=3),
    ]


def look_drive(look_back, case: Case) -> Record:
    start, n, window = case["start"], len(case["q"]), case["window"]
    memory = torch.full((2, start + n + 2, *case["k"].shape[1:]), math.nan)
    for rows, name in zip(memory, "kv", strict=True):
        rows[:start] = case[name][:start]
    if case["items"] == ["rows that left the window"]:
        memory[:, : start - window + 1] = math.nan
    written = {"k": torch.zeros(0), "v": torch.zeros(0), "times": 0, "start": -1}

    def write(k, v, start):
        written.update(k=k.clone(), v=v.clone(), times=written["times"] + 1, start=int(start))
        memory[0, start : start + len(k)], memory[1, start : start + len(v)] = k, v
        return memory[0, : start + len(k)], memory[1, : start + len(k)]

    def turn(heads, positions):
        return heads * (torch.as_tensor(positions)[:, None, None] + 1) if case["turned"] else heads * 1

    q, k, v = case["q"].clone(), case["k"][start:].clone(), case["v"][start:].clone()
    how = {} if window is None else {"window": window}
    out = look_back(q, k, v, start, SimpleNamespace(write=write), turn, **how)
    return {"out": out, **{f"written {name}": value for name, value in written.items()}}


def look_judge(case: Case, record: Record) -> Verdicts:
    (item,), start, n = case["items"], case["start"], len(case["q"])
    if record.get("written times") != 1 or record.get("written start") != start:
        times, where = record.get("written times"), record.get("written start")
        return {item: f"cache.write was called {times} times, last for row {where}; wanted is once, for row {start}"}
    if item in WRITTEN:
        return {item: _written_fault(case, record, WRITTEN[item])}
    got, rows = record.get("out"), slice(n - 1, n) if item in LAST_ROW else slice(0, n)
    wanted = _attend(case)
    if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
        return {item: diagnose(got, wanted, {}, "the output")}
    slips = {sentence: _attend(case, **slip)[rows] for sentence, slip in _slips(case).items()}
    return {item: diagnose(got[rows], wanted[rows], slips, "the output" if rows.start == 0 else "the last row")}


def _written_fault(case: Case, record: Record, name: str) -> str:
    raw = case[name][case["start"] :].double()
    rows = torch.arange(len(raw))[:, None, None]
    turned, counted = raw * (case["start"] + rows + 1), raw * (rows + 1)
    if name == "v":
        slips = {
            "the values in the cache are turned; only queries and keys carry a position": turned,
            "the keys were written in the place of the values": case["k"][case["start"] :].double(),
        }
        return diagnose(record.get("written v"), raw, slips, "what was written as values")
    slips = {
        "the keys are written as they came, and every later step would have to turn them again: turn, then write": raw,
        "the keys' positions are counted from 0; the chunk begins at position start": counted,
        "the keys' positions are off by one: the first new token stands at position start": turned + raw,
        "the keys are turned twice": turned * (case["start"] + rows + 1),
    }
    return diagnose(record.get("written k"), turned, slips, "what was written as keys")


def _slips(case: Case) -> dict[str, dict]:
    """Sentence -> what it changes about the oracle; those that no item's inputs show apart are left to the first."""
    start, window = case["start"], case["window"]
    slips = {
        "the mask is aligned at the top left: query i of the chunk stands at position start + i, not at i": {"at": 0},
        "every query sees the whole chunk: a token must not see those that come after it, cache or no cache": {
            "causal": False
        },
        "a token does not see itself: its own row is part of what it attends to": {"own": False},
        "only the chunk's own keys are seen; the cached ones in front of it are visible to all": {"cached": False},
        "the scores are not divided by sqrt(D)": {"divisor": 1.0},
        "query head h reads K/V head h // group, not h % Hkv": {"in_turn": True},
        "the queries are not turned": {"factor": lambda i: torch.ones_like(i)},
        "the queries' positions are counted from 0; the chunk begins at position start": {"factor": lambda i: i + 1},
        "the queries' positions are off by one": {"factor": lambda i: start + i + 2},
    }
    if window is not None:
        slips |= {
            "the window is off by one: it counts the query's own key, too": {"window": window + 1},
            "the window is off by one: it is one key short": {"window": window - 1},
            "the window is ignored": {"window": start + len(case["q"])},
            "the mask is skipped as soon as something is cached": {"window": start + len(case["q"]), "causal": False},
        }
    if case["items"] == ["rows that left the window"]:
        left = "rows that left the window hold NaN, and 0 times NaN is NaN: slice the keys, a mask is too late"
        slips = {left: {"stale": True}} | slips
    return slips


def _attend(
    case: Case,
    at: int | None = None,
    causal: bool = True,
    own: bool = True,
    cached: bool = True,
    divisor: float = math.sqrt(D),
    in_turn: bool = False,
    factor=None,
    window: int | None = None,
    stale: bool = False,
) -> torch.Tensor:
    """The right output [n, H, D] in float64, or the one of a slip."""
    start, (n, heads, _) = case["start"], case["q"].shape
    at, window = start if at is None else at, window or case["window"] or start + n
    rows, keys = torch.arange(n), torch.arange(start + n)
    distance = (at + rows)[:, None] - keys
    seen = ((distance >= (0 if own else 1)) | (not causal)) & (distance < window) & ((keys >= start) | cached)
    scale = torch.ones(n) if not case["turned"] else start + rows + 1 if factor is None else factor(rows)
    k = case["k"].double()
    if case["turned"]:
        k = torch.cat([k[:start], k[start:] * (start + rows + 1)[:, None, None]])
    q, kv_heads = case["q"].double() * scale[:, None, None], k.shape[1]
    out = []
    for h in range(heads):
        owner = h % kv_heads if in_turn else h // (heads // kv_heads)
        scores = (q[:, h] @ k[:, owner].T / divisor).masked_fill(~seen, -math.inf)
        out.append(scores.softmax(-1).nan_to_num(0) @ case["v"][:, owner].double())
    return torch.stack(out, dim=1) * (math.nan if stale else 1)
