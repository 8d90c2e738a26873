"""From what happened to what is asked: one record per request, and a summary under the names of `vllm bench serve`.

Milliseconds where a name ends in `_ms`. TPOT is the mean gap of one request, ITL every single gap, E2EL arrival to
last token; a request of one token has neither of the first two. Goodput counts only requests that met every
limit of an SLO.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from minillm.errors import ConfigError
from minillm.request import Request


@dataclass(frozen=True)
class RequestRecord:
    """One request in numbers; seconds. `itl_s` holds every gap between consecutive tokens."""

    request_id: str
    arrival_s: float
    prompt_len: int
    output_len: int
    num_cached_tokens: int
    num_preemptions: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2el_s: float | None
    itl_s: Sequence[float]
    stop_reason: str | None


@dataclass(frozen=True)
class SLO:
    """Limits in milliseconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, limits: Sequence[str]) -> SLO:
        """From ["ttft:500", "tpot:50"], as `vllm bench serve --goodput` takes them. Raises ConfigError."""
        found: dict[str, float] = {}
        for limit in limits:
            name, _, value = limit.partition(":")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = 0.0
            if name not in ("ttft", "tpot", "e2el") or found[name] <= 0:
                raise ConfigError(f"{limit!r} is not a limit; write ttft:MS, tpot:MS or e2el:MS")
        return cls(**found)

    def met(self, record: RequestRecord) -> bool:
        measured = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
        limits = {name: getattr(self, name) for name in measured}
        return record.ttft_s is not None and all(
            limit is None or measured[name] * 1e3 <= limit for name, limit in limits.items()
        )


def record(request: Request) -> RequestRecord:
    """What there is to say about a request that has ended."""
    times, arrival = request.token_times, request.arrival_time
    gaps = array("d", (b - a for a, b in pairwise(times)))
    return RequestRecord(
        request_id=request.request_id,
        arrival_s=arrival,
        prompt_len=request.num_prompt_tokens,
        output_len=len(times),
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        queue_s=None if request.first_scheduled_time is None else request.first_scheduled_time - arrival,
        ttft_s=times[0] - arrival if times else None,
        tpot_s=(times[-1] - times[0]) / len(gaps) if gaps else None,
        e2el_s=times[-1] - arrival if times else None,
        itl_s=gaps,
        stop_reason=request.stop_reason,
    )


def summarize(records: Sequence[RequestRecord], duration: float, slo: SLO | None = None) -> dict:
    """Throughput and percentiles of these requests over `duration` seconds, JSON-ready."""
    completed = [r for r in records if r.ttft_s is not None]
    inputs, outputs = (sum(getattr(r, name) for r in completed) for name in ("prompt_len", "output_len"))
    over = duration or 1.0
    gaps = np.fromiter((gap for r in completed for gap in r.itl_s), dtype=np.float64)
    summary = {
        "duration": duration,
        "completed": len(completed),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(completed) / over,
        "request_goodput": sum(map(slo.met, completed)) / over if slo and slo != SLO() else None,
        "output_throughput": outputs / over,
        "total_token_throughput": (inputs + outputs) / over,
        **_spread("ttft", [r.ttft_s for r in completed]),
        **_spread("tpot", [r.tpot_s for r in completed if r.tpot_s is not None]),
        **_spread("itl", gaps),
        **_spread("e2el", [r.e2el_s for r in completed]),
        "longest_decode_gap_ms": float(gaps.max()) * 1e3 if gaps.size else None,
        "num_preemptions": sum(r.num_preemptions for r in completed),
        "num_cached_tokens": sum(r.num_cached_tokens for r in completed),
    }
    return summary


def _spread(name: str, seconds) -> dict[str, float | None]:
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    if not values.size:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "p99")}
    median, p99 = np.percentile(values, [50, 99])
    return {f"mean_{name}_ms": float(values.mean()), f"median_{name}_ms": float(median), f"p99_{name}_ms": float(p99)}
