"""Thirty seconds of measured steps, fitted: what this machine takes for a step.

Steps of chosen shapes run through the real engine (prompts alone, chunks behind a long context, decodes of several
batch sizes and contexts), each a few times; the median counts. Then least squares, with no negative price:

    seconds = line(tokens) + pair_s * pairs + row_s * cache rows + sampled_s * (sampled rows - 1)

A busy machine gives a slow model of itself. Lesson 14.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import numpy as np

from minillm.config import EngineConfig
from minillm.model_config import ModelConfig
from minillm.sampling_params import SamplingParams
from minillm.simulator.step_time import FittedStepTime, Totals

KNOTS = (1, 2, 4, 8, 32, 128, 512)
"""Tokens of a step between which its time is taken to be straight; at 4 the form of the weights changes on a CPU."""
PROMPTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = ((32, 512), (128, 512), (256, 1024))  # (tokens, tokens in the cache before them)
DECODES = ((1, 32), (1, 512), (2, 64), (4, 64), (8, 64), (8, 512), (16, 64), (32, 64), (32, 256))  # (batch, context)
MIXES = ((7, 64, 57), (7, 256, 121))  # (decodes, their context, prompt tokens beside them)
Shape = tuple[list[tuple[int, int]], int]
"""([(n, context)], rows that are sampled) of a step."""


def calibrate(llm, seconds: float = 30.0, seed: int = 0) -> FittedStepTime:
    """Measure for about so long, at least two rounds, and fit."""
    measured = measure(llm, seconds, seed)
    return fit([(shape, statistics.median(times)) for shape, times in measured])


def calibrate_here(model: str, dtype: str, config: EngineConfig) -> tuple[ModelConfig, FittedStepTime, int]:
    """(shape, step time, KV blocks) of this model in an engine on this machine."""
    from minillm.llm import LLM

    with LLM(model, dtype=dtype, num_kv_blocks=config.num_kv_blocks, block_size=config.block_size) as llm:
        return llm.engine.model.config, calibrate(llm), llm.engine.scheduler.block_pool.num_blocks


def measure(llm, seconds: float, seed: int = 0) -> list[tuple[Shape, list[float]]]:
    """Rounds over all shapes until the time is over; the first round warms up and does not count."""
    steps = _Steps(llm, random.Random(seed))
    plans = [lambda n=n: steps.prompt(n) for n in PROMPTS]
    plans += [lambda n=n, before=before: steps.chunk(n, before) for n, before in CHUNKS]
    plans += [lambda b=b, context=context: steps.decode(b, context) for b, context in DECODES]
    plans += [lambda b=b, context=context, n=n: steps.decode(b, context, n) for b, context, n in MIXES]
    plans = [plan for plan in plans if plan() is not None]
    results: list[tuple[Shape, list[float]]] = [([], []) for _ in plans]
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 2 or time.perf_counter() < end:
        for i, plan in enumerate(plans):
            shape, times = plan()
            results[i] = (shape, results[i][1] + times)
        rounds += 1
    return results


def fit(measured: Sequence[tuple[Shape, float]], knots: Sequence[int] = KNOTS) -> FittedStepTime:
    """Least squares of the relative error; prices that come out negative are taken as 0 and the rest fitted again."""
    rows = np.array([_features(shape, knots) for shape, _ in measured])
    seconds = np.array([s for _, s in measured])
    weighted = rows / seconds[:, None]
    used = list(range(rows.shape[1]))
    while True:
        price = np.zeros(rows.shape[1])
        price[used] = np.linalg.lstsq(weighted[:, used], np.ones(len(seconds)), rcond=None)[0]
        if (price >= 0).all():
            break
        used = [i for i in used if price[i] >= 0]
    line = tuple((knot, float(p)) for knot, p in zip(knots, price, strict=False))
    return FittedStepTime(line, *(float(p) for p in price[len(knots) :]))


def _features(shape: Shape, knots: Sequence[int]) -> list[float]:
    """How far the step's tokens stand at each knot (two of them share them out), then pairs, rows, sampled rows."""
    sequences, num_sampled = shape
    total = Totals.of(sequences)
    units = np.eye(len(knots))
    tent = [
        FittedStepTime(tuple(zip(knots, unit, strict=True)), 0, 0, 0).line(total.tokens) for unit in units
    ]  # a broken line is linear in its heights
    return [*tent, total.pairs, total.kv_rows, max(0, num_sampled - 1)]


class _Steps:
    """Single steps of an engine, each of a chosen shape; None where the engine cannot make it."""

    def __init__(self, llm, rng: random.Random):
        self.llm, self.engine, self.rng = llm, llm.engine, rng

    def prompt(self, n: int):
        """One prompt of n tokens, alone."""
        return self._run([], n, 0)

    def chunk(self, n: int, before: int):
        """n tokens behind `before` cached ones."""
        return self._run([], n, before)

    def decode(self, batch: int, context: int, beside: int = 0):
        """A decode of `batch` sequences of about this context, with a prompt beside them if asked."""
        return self._run([context] * batch, beside, 0)

    def _run(self, contexts: list[int], n: int, before: int):
        scheduler = self.engine.scheduler
        longest = max([*contexts, n + before])
        needed = sum(scheduler.block_pool.blocks_for(c + 8) for c in [*contexts, n + before])
        fits = len(contexts) < scheduler.max_num_seqs and n + len(contexts) <= scheduler.max_num_batched_tokens
        if longest + 8 > self.engine.max_model_len or needed > scheduler.block_pool.num_blocks or not fits:
            return None
        self.llm.reset_prefix_cache()
        names = []
        prefix = self._ids(before)
        if before:
            self._add(prefix + self._ids(1), names)
            self._drain(names)
        for context in contexts:
            self._add(self._ids(context), names, max_tokens=8)
        while any(not r.token_times for r in [*scheduler.running, *scheduler.waiting]):
            self.engine.step()
        if n:
            self._add(prefix + self._ids(n), names)
        return self._time(names, repeats=1 if n else 4)

    def _time(self, names: list[str], repeats: int):
        """The shape of the next step, and the seconds of it and of its like that follow."""
        scheduler, times, shape = self.engine.scheduler, [], None
        schedule = scheduler.schedule

        def note(now):
            nonlocal shape
            step = schedule(now)
            sequences = [(n, r.num_computed_tokens + n) for r, n in step.scheduled]
            sampled = sum(r.num_computed_tokens + n == r.num_tokens for r, n in step.scheduled)
            shape = shape or (sequences, sampled)
            return step

        scheduler.schedule = note
        try:
            for _ in range(repeats):
                start = time.perf_counter()
                self.engine.step()
                times.append(time.perf_counter() - start)
        finally:
            del scheduler.schedule  # the class's own again
            for name in names:
                self.engine.abort(name)
        return shape, times

    def _add(self, ids: list[int], names: list[str], max_tokens: int = 1) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = self.engine.make_request(ids, params)
        self.engine.add(request)
        names.append(request.request_id)

    def _drain(self, names: list[str]) -> None:
        while any(self.engine.is_running(name) for name in names):
            self.engine.step()

    def _ids(self, n: int) -> list[int]:
        size = self.engine.model.config.vocab_size
        return [self.rng.randrange(1, size) for _ in range(n)]
