"""A trace through a scheduler, on a clock that a step-time model moves.

The loop is the engine's: schedule, compute (which here takes time and does nothing else), commit, append a token,
finish. A request that arrives while a step is computed is seen by the next one. Deterministic: no clock, no
threads, no hash that changes the order of anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from minillm.config import SamplingParams
from minillm.errors import PromptError, QueueFullError
from minillm.request import Request
from minillm.scheduler import Scheduler
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
    """

    records: list[RequestRecord] = field(default_factory=list)
    num_refused: int = 0
    duration: float = 0.0
    num_steps: int = 0
    num_rows: int = 0
    busy_s: float = 0.0
    longest_gap_tokens: int = 0
    events: list[Event] = field(default_factory=list)


def simulate(
    trace: Iterable[Arrival], scheduler: Scheduler, step_time: StepTime, keep_events: bool = False
) -> Simulation:
    """Serve the whole trace. `scheduler` must be new: its counts and its cache are part of the answer."""
    return _Replay(list(trace), scheduler, step_time, keep_events).run()


class _Replay:
    def __init__(self, trace: list[Arrival], scheduler: Scheduler, step_time: StepTime, keep_events: bool):
        self.trace = trace
        self.scheduler = scheduler
        self.step_time = step_time
        self.keep_events = keep_events
        self.result = Simulation()
        self.requests: list[Request] = []
        self.computed = 0  # tokens of all steps so far
        self.computed_at: dict[Request, int] = {}  # the same number when a request had its last token

    def run(self) -> Simulation:
        trace, scheduler, result = self.trace, self.scheduler, self.result
        now, arrived, last_token = 0.0, 0, 0.0
        while arrived < len(trace) or scheduler.has_work:
            while arrived < len(trace) and trace[arrived].time <= now:
                self._add(trace[arrived], arrived)
                arrived += 1
            if not scheduler.has_work and not (arrived < len(trace) and scheduler.has_idle_work):
                if arrived < len(trace):
                    now = trace[arrived].time
                continue
            now = self._step(now)
            last_token = now if scheduler.running or result.records else last_token
        result.records = [record(request) for request in self.requests]
        ends = [r.token_times[-1] for r in self.requests if r.token_times]
        result.duration = max(ends, default=0.0) - (trace[0].time if trace else 0.0)
        return result

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
            self.requests.append(request)
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
        return end

    def _append(self, request: Request, now: float) -> None:
        request.token_ids.append(0)
        times = request.token_times
        if times:
            gap = self.computed - self.computed_at[request]
            if gap > self.result.longest_gap_tokens:
                self.result.longest_gap_tokens = gap
        times.append(now)
        if len(times) >= request.params.max_tokens:
            self._finish(request, "max_tokens")
        elif len(request.token_ids) >= self.scheduler.max_model_len:
            self._finish(request, "max_model_len")
        else:
            self.computed_at[request] = self.computed

    def _finish(self, request: Request, stop_reason: str) -> None:
        self.computed_at.pop(request, None)
        self.scheduler.finish(request, "length", stop_reason)


@lru_cache(maxsize=10_000)
def _params(output_len: int, priority: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, priority=priority)
