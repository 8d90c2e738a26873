"""Three measurements of a running engine: TTFT by prompt length, decode speed at batch 1, an offline mix.

Random token ids, greedy, end-of-text ignored, prefix cache emptied before every run, so that each number
is work and not memory. Each is a median over repeats, with its spread, after a warm-up; the first call
(which may compile) is shown apart. How this could mislead: random ids cost what text costs only because
nothing here depends on their meaning; a busy machine widens the spread.
"""

from __future__ import annotations

import random
import statistics
import time

from minillm.sampling_params import SamplingParams

PROMPT_LENGTHS = (128, 512, 1024)
DECODE_CONTEXTS = (16, 256)
DECODE_TOKENS = 64
FIRST_ID, LAST_ID = 100, 40_000  # ordinary words of a 49k vocabulary


def run(llm, quick: bool = False, show: bool = True) -> dict:
    """Measure and return one JSON-ready dict; `show` prints rows as they come. Seconds and tokens per second."""
    repeats = 3 if quick else 5
    rng = random.Random(0)
    result = {"model": llm.model_name, "dtype": str(llm.engine.model.dtype), "weights": llm.reasons["weights"]}
    result |= {"ttft_s": {}, "decode_tok_s": {}}
    result["first_call_s"] = _timed(llm, [_ids(llm, rng, 16)], [1])[0]
    if show:
        print(f"weights {result['weights']}", flush=True)

    for n in (n for n in PROMPT_LENGTHS if n < llm.max_model_len):
        seconds = [_timed(llm, [_ids(llm, rng, n)], [1])[1][0].metrics.ttft_s for _ in range(repeats)]
        result["ttft_s"][n] = _summary(seconds)
        _row(show, f"TTFT {n:>5} tokens", result["ttft_s"][n], "s")

    for n in DECODE_CONTEXTS:
        outputs = [_timed(llm, [_ids(llm, rng, n)], [DECODE_TOKENS])[1][0] for _ in range(repeats)]
        result["decode_tok_s"][n] = _summary([1 / o.metrics.tpot_s for o in outputs])
        _row(show, f"decode at {n:>4}", result["decode_tok_s"][n], "tok/s")

    prompts, lengths = mix(8 if quick else 32, limit=llm.engine.model.config.vocab_size)
    seconds, outputs = _timed(llm, prompts, lengths)
    generated = sum(len(o.outputs[0].token_ids) for o in outputs)
    result["mix"] = {"requests": len(prompts), "input_tokens": sum(map(len, prompts)), "output_tokens": generated}
    result["mix"] |= {"seconds": round(seconds, 3), "output_tok_s": round(generated / seconds, 1)}
    if show:
        print(f"mix of {len(prompts)} requests: {seconds:.2f} s, {generated / seconds:.1f} output tok/s", flush=True)
    return result


def mix(n: int, seed: int = 0, limit: int = LAST_ID) -> tuple[list[list[int]], list[int]]:
    """`n` prompts with lognormal lengths (median 148 in, 40 out), the same for every engine that is compared."""
    rng = random.Random(seed)
    prompts, lengths = [], []
    for _ in range(n):
        length = min(1024, max(16, int(rng.lognormvariate(5.0, 0.8))))
        prompts.append([rng.randrange(min(FIRST_ID, limit - 1), min(LAST_ID, limit)) for _ in range(length)])
        lengths.append(min(128, max(8, int(rng.lognormvariate(3.7, 0.5)))))
    return prompts, lengths


def _ids(llm, rng: random.Random, n: int) -> list[int]:
    size = llm.engine.model.config.vocab_size
    return [rng.randrange(min(FIRST_ID, size - 1), min(LAST_ID, size)) for _ in range(n)]


def _timed(llm, prompts: list[list[int]], max_tokens: list[int]):
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in max_tokens]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, outputs


def _summary(values: list[float]) -> dict:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def _row(show: bool, name: str, value: dict, unit: str) -> None:
    if show:
        print(f"{name}: {value['median']:.4g} {unit} (from {value['min']:.4g} to {value['max']:.4g})", flush=True)
