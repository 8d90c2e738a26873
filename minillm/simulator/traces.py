"""Who arrives when, with how many tokens: synthetic traces, and files.

A trace is a list of `Arrival`s in order of time. All makers are random in the same way for the same seed, with
lognormal lengths (most are short, a few are very long) around the medians given. Prompts that share a `prefix_id`
begin with the same text, so the prefix cache works as it would on real tokens.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from math import log
from pathlib import Path
from typing import NamedTuple

from minillm.errors import ConfigError

INPUT_SIGMA, OUTPUT_SIGMA = 0.8, 0.6  # of the logarithm: the 99th percentile is about 6 and 4 times the median
LONGEST = 8  # lengths are cut at this many times the median


class Arrival(NamedTuple):
    """One request of a trace.

    time        seconds
    prompt_len  tokens
    output_len  tokens that it generates
    prefix_id   name of the text that the prompt begins with, None: like no other
    prefix_len  tokens that are from that text, None: all of the prompt and its answer
    priority    smaller is served first
    """

    time: float
    prompt_len: int
    output_len: int
    prefix_id: str | None = None
    prefix_len: int | None = None
    priority: int = 0


def poisson(
    num_requests: int, rate: float, seed: int = 0, input_median: int = 256, output_median: int = 64
) -> list[Arrival]:
    """Independent arrivals, `rate` per second on average. Raises ConfigError for a number that is not positive."""
    rng = _random(seed, num_requests, rate, input_median, output_median)
    times = _poisson_times(rng, num_requests, rate)
    return [Arrival(t, *_lengths(rng, input_median, output_median)) for t in times]


def bursts(
    num_requests: int, rate: float, seed: int = 0, input_median: int = 256, output_median: int = 64, size: int = 16
) -> list[Arrival]:
    """The same rate, but `size` requests at a time."""
    rng = _random(seed, num_requests, rate, input_median, output_median, size)
    starts = _poisson_times(rng, -(-num_requests // size), rate / size)
    times = [t for t in starts for _ in range(size)][:num_requests]
    return [Arrival(t, *_lengths(rng, input_median, output_median)) for t in times]


def shared_prompt(
    num_requests: int,
    rate: float,
    seed: int = 0,
    input_median: int = 256,
    output_median: int = 64,
    prefix_len: int = 512,
    num_prompts: int = 4,
) -> list[Arrival]:
    """Every prompt begins with one of `num_prompts` system prompts of `prefix_len` tokens."""
    rng = _random(seed, num_requests, rate, input_median, output_median, prefix_len, num_prompts)
    arrivals = []
    for t in _poisson_times(rng, num_requests, rate):
        own, output = _lengths(rng, input_median, output_median)
        arrivals.append(Arrival(t, prefix_len + own, output, f"system-{rng.randrange(num_prompts)}", prefix_len))
    return arrivals


def conversations(
    num_requests: int,
    rate: float,
    seed: int = 0,
    input_median: int = 256,
    output_median: int = 64,
    turns: int = 4,
    think_s: float = 10.0,
) -> list[Arrival]:
    """Conversations of `turns` turns: each prompt is all that was said before it and something new.

    Between a prompt and the next one lie `think_s` seconds on average, the answer included.
    """
    rng = _random(seed, num_requests, rate, input_median, output_median, turns, think_s)
    arrivals = []
    for number, start in enumerate(_poisson_times(rng, -(-num_requests // turns), rate / turns)):
        t, length = start, 0
        for _ in range(turns):
            new, output = _lengths(rng, input_median, output_median)
            arrivals.append(Arrival(t, length + new, output, f"conversation-{number}"))
            t += rng.expovariate(1 / think_s)
            length += new + output
    return sorted(arrivals, key=lambda arrival: arrival.time)[:num_requests]


TRACES = {"poisson": poisson, "bursts": bursts, "shared_prompt": shared_prompt, "conversations": conversations}


# ---- files ---------------------------------------------------------------------------------------


def read_trace(path: str | Path) -> list[Arrival]:
    """A trace from JSON lines: {"arrival": seconds, "prompt_len": tokens, "output_len": tokens}, and if they apply
    "prefix_id", "prefix_len" and "priority". Raises ConfigError naming the line that is wrong."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"the trace {str(path)!r} cannot be read: {error.strerror}") from error
    arrivals = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    return sorted(arrivals, key=lambda arrival: arrival.time)


def write_trace(path: str | Path, trace: Iterable[Arrival]) -> None:
    """The lines that `read_trace` reads."""
    rows = ({"arrival": a.time, **{k: v for k, v in a._asdict().items() if k != "time"}} for a in trace)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _parse(line: str, where: str) -> Arrival:
    try:
        row = json.loads(line)
        time = row.pop("arrival")
        arrival = Arrival(time, **row)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: not an arrival ({error!r}); it needs arrival, prompt_len, output_len") from error
    lengths = (arrival.prompt_len, arrival.output_len, arrival.prefix_len or 0, arrival.priority)
    if not all(type(n) is int for n in lengths) or not isinstance(time, (int, float)):
        raise ConfigError(f"{where}: lengths and priority must be integers and arrival a number, got {line.strip()}")
    if not 0 <= time < math.inf or arrival.prompt_len < 1 or arrival.output_len < 1 or (arrival.prefix_len or 0) < 0:
        raise ConfigError(f"{where}: arrival must be a number from 0 on and lengths at least 1, got {line.strip()}")
    return arrival


# ---- helpers -------------------------------------------------------------------------------------


def _random(seed: int, *numbers: float) -> random.Random:
    for number in numbers:
        if not number > 0:  # NaN is not either
            raise ConfigError(f"a trace is made of positive numbers, not {number}")
    return random.Random(seed)


def _poisson_times(rng: random.Random, count: int, rate: float) -> Iterator[float]:
    t = 0.0
    for _ in range(count):
        t += rng.expovariate(rate)
        yield t


def _lengths(rng: random.Random, input_median: int, output_median: int) -> tuple[int, int]:
    """Lognormal (prompt, output), at least 1 and at most `LONGEST` medians."""
    drawn = (rng.lognormvariate(log(input_median), INPUT_SIGMA), rng.lognormvariate(log(output_median), OUTPUT_SIGMA))
    limits = (LONGEST * input_median, LONGEST * output_median)
    return tuple(min(limit, max(1, round(n))) for n, limit in zip(drawn, limits, strict=True))
