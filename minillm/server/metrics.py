"""Counters and histograms for Prometheus, under the names of `RequestMetrics` with the prefix `minillm_`.

Times of finished requests go into histograms; what runs, waits and lies in the cache is read from the scheduler when
somebody asks. Every server has a registry of its own, so that two of them can live in one process.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from minillm.outputs import RequestOutput
from minillm.scheduler import Scheduler

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TIMES = {
    "tokenize_s": "text to token ids",
    "queue_s": "arrival to the first step",
    "prefill_s": "first step to first token",
    "ttft_s": "arrival to first token",
    "tpot_s": "mean gap between tokens of a request",
    "e2e_s": "arrival to last token",
}


class Metrics:
    """Call `finished` with every RequestOutput; `text` is what GET /metrics answers."""

    def __init__(self, scheduler: Scheduler):
        self.registry = CollectorRegistry()
        options = {"namespace": "minillm", "registry": self.registry}
        self.times = {
            name: Histogram(name, f"Seconds, {text}", buckets=SECONDS, **options) for name, text in TIMES.items()
        }
        self.gaps = Histogram("itl_s", "Seconds, every gap between two tokens", buckets=SECONDS, **options)
        self.requests = Counter("requests", "Completions that ended, by reason", ["finish_reason"], **options)
        self.refused = Counter("requests_refused", "Requests answered with 429", **options)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", **options)
        self.cached_tokens = Counter("prompt_tokens_cached", "Tokens of prompts found in the prefix cache", **options)
        self.generated_tokens = Counter("generated_tokens", "Tokens generated", **options)
        self.preemptions = Counter("preemptions", "Times that a request lost its blocks", **options)
        pool = scheduler.block_pool
        for name, text, read in (
            ("requests_running", "Sequences that own blocks", lambda: len(scheduler.running)),
            ("requests_waiting", "Requests in the queue", lambda: len(scheduler.waiting)),
            ("kv_blocks", "Blocks of the KV cache", lambda: pool.num_blocks),
            ("kv_blocks_used", "Blocks that running sequences own", lambda: pool.num_blocks - pool.num_free),
        ):
            Gauge(name, text, **options).set_function(read)

    def finished(self, output: RequestOutput) -> None:
        for name, histogram in self.times.items():
            seconds = getattr(output.metrics, name)
            if seconds is not None:
                histogram.observe(seconds)
        for gap in output.metrics.itl_s:
            self.gaps.observe(gap)
        for completion in output.outputs:
            self.requests.labels(completion.finish_reason).inc()
            self.generated_tokens.inc(len(completion.token_ids))
        self.prompt_tokens.inc(len(output.prompt_token_ids))
        self.cached_tokens.inc(output.num_cached_tokens)
        self.preemptions.inc(output.metrics.num_preemptions)

    def text(self) -> bytes:
        return generate_latest(self.registry)
