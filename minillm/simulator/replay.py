"""A trace through a scheduler, on a clock that a step-time model moves.

The loop is the engine's: schedule, compute (which here takes time and does nothing else), commit, append a token,
finish. A request that arrives while a step is computed is seen by the next one. Deterministic: no clock, no
threads, no hash that changes the order of anything.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from minillm.errors import PromptError, QueueFullError
from minillm.request import Request
from minillm.sampling_params import SamplingParams
from minillm.scheduler import Scheduler
from minillm.scheduler.speculative_prefill import Speculation
from minillm.simulator.records import RequestRecord, record
from minillm.simulator.step_time import StepTime
from minillm.simulator.tokens import NamedTokens
from minillm.simulator.traces import Arrival


@dataclass
class Event:
    """One step, ready to be drawn: who computed how many tokens from when to when."""

    start: float
    end: float
    scheduled: list[tuple[str, int]]  # (request id, tokens)
    padding: int = 0
    preempted: list[str] = field(default_factory=list)


@dataclass
class Simulation:
    """What happened.

    records        one for each request that was accepted, in order of arrival
    num_refused    requests that the queue or the pool could not take
    duration       seconds from the first arrival to the last token
    num_steps      forward passes, those on a guess included
    num_rows       rows computed, padding included
    busy_s         seconds spent in steps
    events         every step, if they were asked for
    longest_gap_tokens  most tokens computed between two tokens of one request
    speculation    tokens computed on guesses and used, under `speculative_prefill`
    """

    records: list[RequestRecord] = field(default_factory=list)
    num_refused: int = 0
    duration: float = 0.0
    num_steps: int = 0
    num_rows: int = 0
    busy_s: float = 0.0
    longest_gap_tokens: int = 0
    events: list[Event] = field(default_factory=list)
    speculation: Speculation | None = None


def simulate(
    trace: Iterable[Arrival], scheduler: Scheduler, step_time: StepTime, keep_events: bool = False
) -> Simulation:
    """Serve the whole trace. `scheduler` must be new: its counts and its cache are part of the answer."""
    collecting = gc.isenabled()
    gc.disable()  # millions of live objects and no cycles: looking through them takes a third of the time
    try:
        return _Replay(list(trace), scheduler, step_time, keep_events).run()
    finally:
        if collecting:
            gc.enable()


class _Replay:
    def __init__(self, trace: list[Arrival], scheduler: Scheduler, step_time: StepTime, keep_events: bool):
        self.trace = trace
        self.scheduler = scheduler
        self.step_time = step_time
        self.keep_events = keep_events
        self.result = Simulation()
        self.numbers: dict[Request, int] = {}  # place of its record, for every request that has not ended
        self.computed = 0  # tokens of all steps so far
        self.computed_at: dict[Request, int] = {}  # the same number when a request had its last token

    def run(self) -> Simulation:
        trace, scheduler = self.trace, self.scheduler
        now, arrived = 0.0, 0
        while arrived < len(trace) or scheduler.has_work:
            while arrived < len(trace) and trace[arrived].time <= now:
                self._add(trace[arrived], arrived)
                arrived += 1
            if scheduler.has_work or (arrived < len(trace) and scheduler.has_idle_work):
                now = self._step(now)
            elif arrived < len(trace):
                now = trace[arrived].time
        self.result.speculation = getattr(scheduler, "speculation", None)
        return self.result

    def _add(self, arrival: Arrival, number: int) -> None:
        name = f"{number}"
        request = Request(
            request_id=name,
            prompt_token_ids=range(arrival.prompt_len),
            params=_params(arrival.output_len, arrival.priority),
            arrival_time=arrival.time,
            token_ids=NamedTokens(arrival.prompt_len, name, arrival.prefix_id, arrival.prefix_len),
        )
        try:
            self.scheduler.add(request)
            self.numbers[request] = len(self.result.records)
            self.result.records.append(None)
        except (PromptError, QueueFullError):
            self.result.num_refused += 1

    def _step(self, now: float) -> float:
        """One step; returns the time at its end."""
        scheduler, result = self.scheduler, self.result
        step = scheduler.schedule(now)
        sequences, done = [], []
        for request, n in step.scheduled:
            context = request.num_computed_tokens + n
            sequences.append((n, context))
            if context == len(request.token_ids):
                done.append(request)
        padding = [(n, n) for n in step.padding]
        end = now + self.step_time(sequences + padding, len(done))
        if self.keep_events:
            work = [(request.request_id, n) for request, n in step.scheduled]
            preempted = [request.request_id for request in step.preempted]
            result.events.append(Event(now, end, work, sum(step.padding), preempted))
        result.num_steps += 1
        result.busy_s += end - now
        rows = sum(n for n, _ in sequences)
        self.computed += rows
        result.num_rows += rows + sum(step.padding)
        scheduler.commit(step)
        for request in done:
            self._append(request, end)
        for request in step.ended:
            self._note(request)
        return end

    def _append(self, request: Request, now: float) -> None:
        request.token_ids.append(0)
        times = request.token_times
        if times:
            gap = self.computed - self.computed_at[request]
            if gap > self.result.longest_gap_tokens:
                self.result.longest_gap_tokens = gap
        times.append(now)
        self.result.duration = now - self.trace[0].time
        if len(times) >= request.params.max_tokens:
            self._finish(request, "max_tokens")
        elif len(request.token_ids) >= self.scheduler.max_model_len:
            self._finish(request, "max_model_len")
        else:
            self.computed_at[request] = self.computed

    def _finish(self, request: Request, stop_reason: str) -> None:
        self.scheduler.finish(request, "length", stop_reason)
        self._note(request)

    def _note(self, request: Request) -> None:
        """Keep the record of a request that has ended, and nothing else of it."""
        self.computed_at.pop(request, None)
        self.result.records[self.numbers.pop(request)] = record(request)


@lru_cache(maxsize=10_000)
def _params(output_len: int, priority: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, priority=priority)
