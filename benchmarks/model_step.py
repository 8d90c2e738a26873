"""Microseconds of one forward pass by part: decode steps of a few batch sizes, prefills of a few lengths.

A decode step reads every weight once to use it for a handful of rows, so memory bandwidth bounds it; a long
prefill uses each weight for every row, so arithmetic does. Both roofs are measured here, on this machine, and
each row prints how much of its own roof it reached. `whole` is measured without the profiler; `other` is what
the parts leave of it.

How this could mislead: the same rows are computed again and again, so small caches are warm; another program
on the machine widens the spread, which is why the fastest of many runs stands beside the median.

    python benchmarks/model_step.py --threads 2

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from minillm.attention.choose import choose_attention
from minillm.batch import Batch
from minillm.checkpoint import load
from minillm.costs import step_flops
from minillm.kv_cache import KVCache
from minillm.linear import INT4_MAX_ROWS
from minillm.model import Transformer
from minillm.option_words import DTYPES, QUANTIZATIONS
from minillm.profiler import PART_NAMES, Parts

BLOCK_SIZE = 16
PARTS = [*PART_NAMES[: PART_NAMES.index("sample")], "other"]
COLUMNS = ["whole", "fastest", *PARTS]


@torch.inference_mode()
def main() -> None:
    options = parse()
    checkpoint = load(options.model)
    dtype = DTYPES[options.dtype]
    attend, reason = choose_attention("cpu", dtype, options.attention)
    # Afterwards, because numba sets the number of threads too when it starts.
    torch.set_num_threads(options.threads or torch.get_num_threads())
    start = time.perf_counter()
    model = Transformer(checkpoint.config, checkpoint.weights, dtype, "cpu", options.quantization)
    build_s = time.perf_counter() - start

    roofs = {"flops": peak_flops(dtype), "bandwidth": peak_bandwidth()}
    print(f"{checkpoint.name}, {options.dtype}, {torch.get_num_threads()} threads; attention {reason}")
    print("weights:", ", ".join(f"{form} {size / 1e6:.0f} MB" for form, size in model.num_weight_bytes.items()))
    print(f"roofs: {roofs['flops'] / 1e9:.0f} GFLOP/s, {roofs['bandwidth'] / 1e9:.1f} GB/s; times in microseconds")
    print(f"{'':22}" + "".join(f"{name:>11}" for name in COLUMNS) + f"{'of roof':>11}")

    result = vars(options) | {"build_s": round(build_s, 2), "weight_bytes": model.num_weight_bytes, "roofs": roofs}
    result |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "steps": []}
    steps = [("decode", batch, options.context) for batch in options.batch]
    steps += [("prefill", 1, n) for n in options.prefill]
    for phase, requests, context in steps:
        n = context if phase == "prefill" else 1
        row = {"phase": phase, "requests": requests, "context": context}
        row |= measure(model, attend, [(n, context)] * requests, options.repeats)
        least = least_seconds(model, [(n, context)] * requests, roofs) * 1e6
        row["of_roof"] = round(least / row["whole"], 3)
        result["steps"].append(row)
        label = f"{phase} {requests} x {n} at {context}"
        print(f"{label:22}" + "".join(f"{row[name]:11,.0f}" for name in COLUMNS) + f"{row['of_roof']:11.0%}")
    print(json.dumps(result))


def measure(model: Transformer, attend, sequences: list[tuple[int, int]], repeats: int) -> dict[str, float]:
    """Microseconds: the median and the fastest unprofiled pass, and the median of each part of profiled ones."""
    config = model.config
    blocks = -(-sequences[0][1] // BLOCK_SIZE)
    cache = KVCache(config, blocks * len(sequences), BLOCK_SIZE, model.dtype)
    tokens = [torch.randint(0, config.vocab_size, (n,)).tolist() for n, _ in sequences]
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(len(sequences))]
    batch = Batch.build(tokens, [context for _, context in sequences], tables, BLOCK_SIZE)

    whole, profiled = [], []
    for _ in range(3):
        model.forward(batch, cache, attend)
    for _ in range(repeats):  # interleaved, so that a busy moment hits both
        start = time.perf_counter()
        model.forward(batch, cache, attend)
        whole.append(time.perf_counter() - start)
        parts = Parts(time.perf_counter)
        model.forward(batch, cache, attend, parts)
        profiled.append(parts.seconds)

    row = {"whole": statistics.median(whole) * 1e6, "fastest": min(whole) * 1e6}
    for name in PARTS[:-1]:
        row[name] = statistics.median(seconds[name] for seconds in profiled) * 1e6
    row["other"] = row["whole"] - sum(row[name] for name in PARTS[:-1])
    return {name: round(microseconds, 1) for name, microseconds in row.items()}


def least_seconds(model: Transformer, sequences: list[tuple[int, int]], roofs: dict[str, float]) -> float:
    """The time of this step if it ran exactly at the nearer roof: its FLOPs, or one read of its weights."""
    sizes = dict(model.num_weight_bytes)
    sizes.pop("embedding")  # looked up, not read
    head = sum(model.head.num_weight_bytes.values())
    rows = sum(n for n, _ in sequences)
    weight_bytes = sum(sizes.values())
    if model.forms.quantization == "auto" and "int4" in sizes:  # two copies of which a step reads one
        weight_bytes = sizes["int4"] + head if rows <= INT4_MAX_ROWS else weight_bytes - sizes["int4"]
    return max(step_flops(model.config, sequences) / roofs["flops"], weight_bytes / roofs["bandwidth"])


def peak_flops(dtype: torch.dtype, n: int = 1024) -> float:
    """FLOP/s of the best of ten n x n products."""
    a, b = torch.randn(2, n, n).to(dtype)
    return 2 * n**3 / best_seconds(lambda: a @ b)


def peak_bandwidth(num_bytes: int = 2**28) -> float:
    """Bytes per second of the best of ten sums over a tensor that no cache holds."""
    x = torch.ones(num_bytes // 4)
    return num_bytes / best_seconds(x.sum)


def best_seconds(run, repeats: int = 10) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--quantization", default="auto", choices=QUANTIZATIONS)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32], help="decode batch sizes, as in 1,8,32")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache of each decoding request")
    parser.add_argument("--prefill", type=numbers, default=[128, 512, 1024], help="prompt lengths")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="default: PyTorch's own choice")
    return parser.parse_args()


if __name__ == "__main__":
    main()
