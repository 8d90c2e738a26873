"""The rows of `minillm bench --compare pipeline`: each way to pipeline a prefill timed in turns with the plain way.

Text that arrives through `LLM.generate_from`, stages in engines of their own, early exit in the engine's own model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import torch

from minillm.batch import Batch
from minillm.compare import in_turns, ratio
from minillm.compare_attention import BLOCK_SIZE, NEEDLES, TEXT, needle_prompts, ttft_clock
from minillm.kv_cache import KVCache
from minillm.llm import LLM
from minillm.pipeline.early_exit import EarlyExit
from minillm.sampling_params import SamplingParams

STAGES = 2
SLOWNESS = 1.5  # a slow text takes so many times the prefill to arrive
PIECES = 40
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Sizes:
    """Tokens of the timed prompt and of those whose next token is compared, numbers of those and of rounds, chunks."""

    tokens: int = 1000
    prompt_tokens: int = 128
    num_prompts: int = 32
    needle_tokens: int = 600
    repeats: int = 5
    chunks: tuple[int, ...] = (64, 128, 256, 1024)


def timed(name: str, seconds: list[float], base: list[float]) -> dict:
    by_round = [a / b for a, b in zip(seconds, base, strict=True)]
    return {
        "name": name,
        "TTFT ms": 1e3 * statistics.median(seconds),
        "TTFT x": ratio(seconds, base),
        "from-to": f"{min(by_round):.2f}-{max(by_round):.2f}",
    }


# ---- text that arrives -----------------------------------------------------------------------------


def text_rows(llm: LLM, text: str, window: int, repeats: int) -> list[dict]:
    """A text that is there and one that comes slowly, each waited for and computed as it comes; fresh in each round."""
    seen: dict[str, list[dict]] = {}

    def run(name: str, slow: bool, streamed: bool) -> Callable[[], float]:
        def once() -> float:
            past = seen.setdefault(name, [])
            start = len(past) * window % (len(text) - window)
            part = text[start : start + window]
            pieces = slowly(part, SLOWNESS * whole_s) if slow else iter([part])
            llm.reset_prefix_cache()
            began = time.perf_counter()
            prompt = pieces if streamed else "".join(pieces)
            arrived = 0.0 if streamed else time.perf_counter() - began
            output = llm.generate_from(prompt, FIRST) if streamed else llm.generate([prompt], FIRST, use_tqdm=False)[0]
            m = output.metrics
            told = m.arrival or {"tokenize_s": m.tokenize_s, "hidden_s": 0.0, "ttft_after_text_s": m.ttft_s}
            past.append(told)
            return arrived + m.ttft_s

        return once

    whole_s = 0.0
    run("warm-up", False, True)()
    run("warm-up", False, False)()
    whole_s = run("warm-up", False, False)()
    ways = {
        "whole text": (False, False),
        "whole text, streamed": (False, True),
        "slow text, awaited": (True, False),
        "slow text, streamed": (True, True),
    }
    taken = in_turns({name: run(name, *how) for name, how in ways.items()}, repeats)
    rows = []
    for name, (slow, streamed) in ways.items():
        base = "slow text, awaited" if slow else "whole text"
        row = timed(name, taken[name], taken[base])
        for heading, key in (
            ("tokenise ms", "tokenize_s"),
            ("hidden ms", "hidden_s"),
            ("after text ms", "ttft_after_text_s"),
        ):
            row[heading] = 1e3 * statistics.median(told[key] for told in seen[name][1:])
        if streamed and not slow:
            row["ideal x"] = 1 - rows[0]["tokenise ms"] / rows[0]["TTFT ms"]
        rows.append(row)
    return rows


def slowly(text: str, seconds: float) -> Iterator[str]:
    """The text in equal pieces, one after another over so many seconds."""
    began, size = time.perf_counter(), -(-len(text) // PIECES)
    for number, start in enumerate(range(0, len(text), size), start=1):
        time.sleep(max(0.0, began + number * seconds / PIECES - time.perf_counter()))
        yield text[start : start + size]


def characters(llm: LLM, text: str, tokens: int) -> int:
    """How many characters of this text make about so many tokens, rather fewer."""
    sample = text[:8000]
    return int(0.9 * tokens * len(sample) / len(llm.tokenizer.encode(sample)))


# ---- stages ----------------------------------------------------------------------------------------


def stage_rows(llm: LLM, ids: list[int], sizes: Sizes) -> list[dict]:
    """One process with one thread and with all, and two of one thread each; on a GPU, one GPU beside two."""
    threads = torch.get_num_threads()
    needed = -(-(len(ids) + 1) // llm.config.block_size)
    options = asdict(llm.config) | {"num_kv_blocks": needed, "pipeline_parallel_size": STAGES}
    with torch_threads(threads), ExitStack() as opened:
        runs = {"1 process, 1 thread": on_threads(1, ttft_clock(llm, ids, llm.engine.attend))}
        if threads > 1:
            runs[f"1 process, {threads} threads"] = on_threads(threads, ttft_clock(llm, ids, llm.engine.attend))
        chunk_of = {}
        for chunk in sizes.chunks:
            name = f"{STAGES} stages, chunks of {chunk}"
            torch.set_num_threads(STAGES)  # which they share
            staged = opened.enter_context(LLM(**options | {"pipeline_chunk_size": chunk}))
            chunk_of[name], runs[name] = chunk, on_threads(1, ttft_clock(staged, ids, staged.engine.attend))
        taken = in_turns(runs, sizes.repeats)
    alone = taken["1 process, 1 thread"]
    rows = []
    for name, seconds in taken.items():
        row = timed(name, seconds, alone)
        if name in chunk_of:
            chunks = -(-len(ids) // chunk_of[name])
            row["bubble"] = (STAGES - 1) / (chunks + STAGES - 1)
            row["ideal x"] = 1 / (STAGES * (1 - row["bubble"]))
        if name != "1 process, 1 thread":
            row["idle"] = 1 - 1 / ((STAGES if name in chunk_of else threads) * row["TTFT x"])
        rows.append(row)
    return rows


def on_threads(count: int, run: Callable[[], float]) -> Callable[[], float]:
    def counted() -> float:
        torch.set_num_threads(count)
        return run()

    return counted


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    try:
        yield
    finally:
        torch.set_num_threads(count)


# ---- early exit ------------------------------------------------------------------------------------


def exit_rows(llm: LLM, ids: list[int], text: str, sizes: Sizes) -> list[dict]:
    """The whole model, and prompt tokens that leave after some of its layers."""
    whole = llm.engine.model
    num_layers = whole.config.num_hidden_layers
    layers = sorted({num_layers * i // 8 for i in (2, 4, 6, 7)} | {num_layers - 2, num_layers - 1})
    models = {"whole model": whole}
    models |= {f"exit after {k} of {num_layers}": EarlyExit(whole, k) for k in layers if k > 0}

    taken = in_turns({name: ttft_with(llm, ids, model) for name, model in models.items()}, sizes.repeats)
    tokens = llm.tokenizer.encode(text)
    starts = range(0, sizes.num_prompts * sizes.prompt_tokens, sizes.prompt_tokens)
    prompts = [tokens[start : start + sizes.prompt_tokens] for start in starts]
    facts = list(needle_prompts(llm.tokenizer.encode, TEXT.read_text(encoding="utf-8"), sizes.needle_tokens))
    rows, expected = [], None
    for name, model in models.items():
        logits = torch.stack([next_logits(model, prompt, llm.engine.attend) for prompt in prompts])
        expected = logits if expected is None else expected
        row = timed(name, taken[name], taken["whole model"])
        row["ideal x"] = 1 - getattr(model, "saved_share", 0.0)
        row["same first"] = float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
        row["KL"] = float(nats_from(expected, logits).mean())
        found = sum(int(next_logits(model, ids, llm.engine.attend).argmax()) == answer for ids, answer in facts)
        rows.append(row | {"needles": f"{found} of {len(NEEDLES)}"})
    return rows


def ttft_with(llm: LLM, ids: list[int], model) -> Callable[[], float]:
    """`ttft_clock` with another model in the engine's place for it."""
    run = ttft_clock(llm, ids, llm.engine.attend)

    def swapped() -> float:
        whole, llm.engine.model = llm.engine.model, model
        try:
            return run()
        finally:
            llm.engine.model = whole

    return swapped


def next_logits(model, ids: list[int], attend: Callable) -> torch.Tensor:
    """[V] for the token behind a prompt, computed in one step with a cache of its own."""
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    pages = KVCache(model.config, num_blocks, BLOCK_SIZE, model.dtype, model.device)
    batch = Batch.build([ids], [len(ids)], [list(range(num_blocks))], BLOCK_SIZE, device=model.device)
    return model.forward(batch, pages, attend)[0]


def nats_from(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """[n] Kullback-Leibler divergences of distributions given as logits [n, V]."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)
