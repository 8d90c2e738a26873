"""The server under Poisson load at half, once and three times its capacity, with a tenth of the clients leaving early.

    python -m benchmarks.serve_load [--model NAME] [--seconds 20] [--out FILE]

Loopback only, and bounded: it starts a server of its own, ends it, and takes about 4 x `--seconds` and the start.
Every answer is compared with the one that its prompt gets alone, so the model runs in float32, where they are equal.
Shown at each load: how requests ended, TTFT, TPOT, how long /health took, memory, and blocks left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import psutil

LOADS = (0.5, 1.0, 3.0)  # of capacity
LEAVING = 0.1  # share of clients that leave in the middle
SEATS = 16  # sequences that the server runs at once, and requests in flight while its capacity is measured
NUM_PROMPTS = 24
MAX_TOKENS = 24
HEALTH_EVERY_S = 0.1
MOST_IN_FLIGHT = 2000
WORDS = "the wait before first token is prefill and then decode reads every weight again for each next word".split()


@dataclass
class Phase:
    """What happened under one load. Times in seconds."""

    load: float
    requests_per_s: float
    sent: int = 0
    complete: int = 0
    left: int = 0  # clients that hung up in the middle, on purpose
    refused: int = 0  # 429
    failed: int = 0  # anything else: an error, a cut stream
    mixed_up: int = 0  # answers that differ from the prompt's own
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    rss_mb: float = 0.0
    blocks_left: int = 0
    drain_s: float = 0.0

    def summary(self) -> dict:
        row = {k: v for k, v in asdict(self).items() if not isinstance(v, list)}
        for name in ("ttft_s", "tpot_s", "health_s"):
            values = sorted(getattr(self, name)) or [float("nan")]
            row |= {f"median_{name}": statistics.median(values), f"p99_{name}": values[int(0.99 * (len(values) - 1))]}
        return row | {"max_health_s": max(self.health_s, default=float("nan"))}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load, default 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args(argv)
    # A small cache, all of which is soon in use: what memory grows by afterwards is a leak.
    options = ["--dtype", "float32", "--max-num-seqs", str(SEATS), "--max-queued-requests", str(2 * SEATS)]
    options += ["--num-kv-blocks", "300"]
    with server(args.model, *options) as (process, url):
        result = asyncio.run(measure(url, process.pid, args.seconds, args.seed))
    result = {"model": args.model, "options": options, "machine": platform.processor() or platform.machine(), **result}
    show(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if any(phase["failed"] or phase["mixed_up"] or phase["blocks_left"] for phase in result["loads"]) else 0


@contextlib.contextmanager
def server(model: str, *options: str):
    """A server in a process of its own: (process, address)."""
    command = [sys.executable, "-m", "minillm", "serve", "--model", model, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    try:
        line = next((line for line in process.stderr if "http://" in line), None)
        if line is None:
            raise SystemExit("the server did not start; run `minillm serve` by hand to see why")
        yield process, re.search(r"http://[\d.:]+", line).group()
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()


async def measure(url: str, pid: int, seconds: float, seed: int = 0, seats: int = SEATS) -> dict:
    """Capacity, then each load. Answers are compared with those that each prompt got while it was alone."""
    draw = random.Random(seed)
    prompts = [" ".join(draw.choices(WORDS, k=draw.randint(4, 120))) for _ in range(NUM_PROMPTS)]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        alone = {prompt: (await ask(client, prompt))["text"] for prompt in prompts}
        capacity = await measure_capacity(client, draw.choices(prompts, k=2 * seats), seats)
        loads = []
        for load in LOADS:
            loads.append((await run_load(client, pid, load, load * capacity, seconds, alone, draw)).summary())
    return {"seconds": seconds, "seed": seed, "capacity_requests_per_s": capacity, "loads": loads}


async def measure_capacity(client: httpx.AsyncClient, prompts: list[str], seats: int) -> float:
    """Requests per second with `seats` of them always in flight."""
    free = asyncio.Semaphore(seats)

    async def one(prompt: str) -> None:
        async with free:
            await ask(client, prompt)

    start = time.perf_counter()
    await asyncio.gather(*(one(prompt) for prompt in prompts))
    return len(prompts) / (time.perf_counter() - start)


async def run_load(client, pid: int, load: float, rate: float, seconds: float, alone: dict, draw) -> Phase:
    phase = Phase(load, rate)
    watching = asyncio.create_task(watch_health(client, phase))
    asking: set[asyncio.Task] = set()
    arrival = start = time.perf_counter()
    while (arrival := arrival + draw.expovariate(rate)) < start + seconds and phase.sent < MOST_IN_FLIGHT:
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        leave_after = draw.randint(1, MAX_TOKENS // 2) if draw.random() < LEAVING else None
        prompt = draw.choice(list(alone))
        asking.add(asyncio.create_task(one_client(client, prompt, alone[prompt], leave_after, phase)))
        phase.sent += 1
    await asyncio.gather(*asking)
    over = time.perf_counter()
    while (taken := await metric(client, "kv_blocks_used")) and time.perf_counter() < over + 5:
        await asyncio.sleep(0.01)
    phase.blocks_left, phase.drain_s = int(taken), time.perf_counter() - over
    watching.cancel()
    phase.rss_mb = psutil.Process(pid).memory_info().rss / 1e6
    return phase


async def one_client(client, prompt: str, expected: str, leave_after: int | None, phase: Phase) -> None:
    try:
        answer = await ask(client, prompt, leave_after)
    except httpx.HTTPStatusError as error:
        phase.refused += error.response.status_code == 429
        phase.failed += error.response.status_code != 429
        return
    except (httpx.HTTPError, ValueError):
        phase.failed += 1
        return
    phase.ttft_s.append(answer["ttft_s"])
    if leave_after is not None:
        phase.left += 1
        phase.mixed_up += not expected.startswith(answer["text"])
        return
    phase.complete += 1
    phase.mixed_up += answer["text"] != expected
    phase.tpot_s += answer["tpot_s"]


async def ask(client, prompt: str, leave_after: int | None = None) -> dict:
    """Stream one greedy answer; hang up after `leave_after` pieces. Raises ValueError for a stream that fails."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    start, first, text, pieces = time.perf_counter(), None, "", 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                end = time.perf_counter()
                return {"text": text, "ttft_s": first - start, "tpot_s": [(end - first) / max(1, pieces - 1)]}
            if line:
                data = json.loads(line.removeprefix("data: "))
                if "error" in data:  # the status line was 200, long before
                    raise ValueError(data["error"]["message"])
                text += data["choices"][0]["text"]
                first, pieces = first or time.perf_counter(), pieces + 1
                if pieces == leave_after:
                    return {"text": text, "ttft_s": first - start, "tpot_s": []}
    raise ValueError("the stream ended without [DONE]")


async def watch_health(client, phase: Phase) -> None:
    while True:
        start = time.perf_counter()
        (await client.get("/health")).raise_for_status()
        phase.health_s.append(time.perf_counter() - start)
        await asyncio.sleep(HEALTH_EVERY_S)


async def metric(client, name: str) -> float:
    text = (await client.get("/metrics")).text
    return float(re.search(rf"^minillm_{name} (\S+)$", text, re.MULTILINE).group(1))


def show(result: dict) -> None:
    print(f"capacity {result['capacity_requests_per_s']:.1f} requests/s with {SEATS} in flight")
    columns = ("load", "sent", "complete", "left", "refused", "failed", "mixed_up", "blocks_left", "rss_mb")
    times = ("median_ttft_s", "p99_ttft_s", "median_tpot_s", "median_health_s", "max_health_s")
    print("  ".join(f"{name:>{max(8, len(name))}}" for name in columns + times))
    for row in result["loads"]:
        cells = [f"{row[name]:g}" if name != "rss_mb" else f"{row[name]:.0f}" for name in columns]
        cells += [f"{row[name]:.3f}" for name in times]
        print("  ".join(f"{c:>{max(8, len(n))}}" for c, n in zip(cells, columns + times, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
