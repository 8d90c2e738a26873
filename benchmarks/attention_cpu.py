"""Microseconds per layer of attention on a processor, body against body, in the situations of a real engine.

    python benchmarks/attention_cpu.py [--dtype bfloat16] [--threads 2] [--repeats 15]

The shape is SmolLM2-135M's (9 query heads, 3 K/V heads, head size 64). Pages of 30 layers are visited one
after another, as a model does, so that a layer's keys are not still in the nearest cache from the last call.
Bodies take turns within one run and the median is printed, so that what else the machine does hits all alike.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from minillm.attention import CPUAttention, PerRequest, sdpa
from minillm.batch import Batch
from minillm.kv_cache import KVLayer

H, HKV, D, LAYERS, BLOCK_SIZE, BLOCKS = 9, 3, 64, 30, 16, 640

# name: (query rows, context) of each request
CASES = {
    "decode 1 at 16": [(1, 16)],
    "decode 1 at 256": [(1, 256)],
    "decode 1 at 1024": [(1, 1024)],
    "decode 10 at 256": [(1, 256)] * 10,
    "decode 1 at 1100, 9 at 200": [(1, 1100)] + [(1, 200)] * 9,
    "decode 32 at 256": [(1, 256)] * 32,
    "2 rows at 256": [(2, 256)],
    "4 rows at 256": [(4, 256)],
    "8 rows at 256": [(8, 256)],
    "4 rows at 1024": [(4, 1024)],
    "prefill 128": [(128, 128)],
    "prefill 512": [(512, 512)],
    "prefill 1024": [(1024, 1024)],
    "chunk 256 at 1024": [(256, 1024)],
    "chunk 256 at 1024, 10 decodes at 256": [(256, 1024)] + [(1, 256)] * 10,
}


def batch_of(requests: list[tuple[int, int]]) -> Batch:
    blocks = torch.randperm(BLOCKS).tolist()
    tables = []
    for _, context in requests:
        needed = -(-context // BLOCK_SIZE)
        tables.append(blocks[:needed])
        blocks = blocks[needed:]
    tokens = [[0] * n for n, _ in requests]
    return Batch.build(tokens, [context for _, context in requests], tables, BLOCK_SIZE)


def microseconds_per_layer(attend, q, k, v, layers, batch) -> float:
    start = time.perf_counter()
    for layer in layers:
        attend(q, k, v, layer, batch)
    return (time.perf_counter() - start) / len(layers) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="run the cases whose name holds this text")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.set_num_threads(args.threads)

    bodies = {
        "cpu": CPUAttention(dtype),
        "cpu without numba": CPUAttention(dtype, use_numba=False),
        "sdpa": PerRequest(sdpa.attention, sdpa.output),
    }
    shape = (BLOCKS, BLOCK_SIZE, HKV, D)
    layers = [KVLayer(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(LAYERS)]
    print(f"microseconds per layer, {args.dtype}, {args.threads} threads; {bodies['cpu'].reason}")
    print(f"{'':38}" + "".join(f"{name:>20}" for name in bodies))

    results: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for case, requests in CASES.items():
            if args.only not in case:
                continue
            batch = batch_of(requests)
            qkv = torch.randn(batch.num_tokens, H + 2 * HKV, D).to(dtype)
            q, k, v = qkv.split([H, HKV, HKV], dim=1)
            times: dict[str, list[float]] = {name: [] for name in bodies}
            for repeat in range(args.repeats + 1):
                for name, attend in bodies.items():
                    taken = microseconds_per_layer(attend, q, k, v, layers, batch)
                    if repeat:  # the first round finds its pages unmapped and its plans unmade
                        times[name].append(taken)
            results[case] = {name: round(statistics.median(taken), 1) for name, taken in times.items()}
            print(f"{case:38}" + "".join(f"{us:20.1f}" for us in results[case].values()), flush=True)
    print(
        json.dumps({"unit": "microseconds per layer", "dtype": args.dtype, "threads": args.threads, "median": results})
    )


if __name__ == "__main__":
    main()
