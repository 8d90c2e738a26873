"""K and V in eight bits on this processor: seconds of a decode step and a prefill, bytes of a token, error of logits.

Decode steps of a few batch sizes and prefills over the same pages in the model's dtype, int8 and fp8, in turns, so
that a slow moment hits all; times are medians, with the ratio to the model's dtype. The error is that of the logits
of every token of a text, against the same model with exact pages: the largest, as a share of the largest logit, and
the mean Kullback-Leibler divergence in nats per token.

How this could mislead: the rows of a decode are noise, computed again and again, so caches are as warm as they get;
where they are colder than here, fewer bytes count for more.

    OMP_NUM_THREADS=1 python -m benchmarks.kv_eight_bit

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

from minillm.attention.choose import choose_attention
from minillm.batch import Batch
from minillm.checkpoint import load
from minillm.kv_cache import KVCache, kv_bytes_per_block
from minillm.model import Transformer
from minillm.option_words import DTYPES
from minillm.perplexity import JARGON_FILE

BLOCK_SIZE = 16


@torch.inference_mode()
def main() -> None:
    options = parse()
    checkpoint = load(options.model)
    dtype = DTYPES[options.dtype]
    threads = torch.get_num_threads()
    kinds = {options.dtype: dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    bodies = {name: choose_attention("cpu", dtype, options.attention, kind)[0] for name, kind in kinds.items()}
    torch.set_num_threads(threads)  # numba sets it too when it starts
    model = Transformer(checkpoint.config, checkpoint.weights, dtype, "cpu", options.quantization)

    sizes = {name: kv_bytes_per_block(model.config, 1, kind) for name, kind in kinds.items()}
    result = vars(options) | {"threads": threads, "torch": torch.__version__, "bytes_per_token": sizes, "steps": []}
    print(f"{checkpoint.name}, {options.dtype}, {threads} threads")
    print("bytes per token:", ", ".join(f"{name} {size:,}" for name, size in sizes.items()))
    print(f"{'milliseconds':28}" + "".join(f"{name:>10}" for name in (*kinds, "", "ratio")))
    for label, sequences in steps(options):
        seconds = in_turns(model, bodies, kinds, sequences, options.repeats)
        ratios = {name: seconds[name] / seconds[options.dtype] for name in kinds}
        result["steps"].append({"step": label, "seconds": seconds, "ratios": ratios})
        told = "".join(f"{seconds[name] * 1e3:10.2f}" for name in kinds)
        print(f"{label:28}{told}{'':10}" + "".join(f"{ratios[name]:10.2f}" for name in list(kinds)[1:]))

    ids = checkpoint.tokenizer.encode(JARGON_FILE.read_text(encoding="utf-8"))[: options.error_tokens]
    result["errors"] = errors(model, bodies, kinds, ids)
    for name, error in result["errors"].items():
        print(f"{name}: largest logit error {error['largest']:.1%}, {error['nats']:.2e} nats per token, "
              f"{error['same_argmax']:.1%} of {len(ids)} tokens with the same likeliest next one")  # fmt: skip
    print(json.dumps(result))


def steps(options: argparse.Namespace):
    """(label, [(n, context), ...]) of each step."""
    for context in options.context:
        for batch in options.batch:
            yield f"decode {batch} at {context}", [(1, context)] * batch
        yield f"prefill {context}", [(context, context)]
        if context > options.chunk:
            yield f"last {options.chunk} of {context}", [(options.chunk, context)]


def in_turns(model: Transformer, bodies: dict, kinds: dict, sequences: list, repeats: int) -> dict[str, float]:
    """Median seconds of one forward pass, by kind of pages."""
    config = model.config
    blocks = -(-sequences[0][1] // BLOCK_SIZE)
    tokens = [torch.randint(0, config.vocab_size, (n,)).tolist() for n, _ in sequences]
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(len(sequences))]
    caches, batches, seconds = {}, {}, {name: [] for name in kinds}
    for name, kind in kinds.items():
        batches[name] = Batch.build(tokens, [context for _, context in sequences], tables, BLOCK_SIZE)
        caches[name] = cache = KVCache(config, blocks * len(sequences), BLOCK_SIZE, model.dtype, kv_dtype=kind)
        slots = torch.arange(cache.num_blocks * BLOCK_SIZE)
        for layer in cache.layers:
            rows = torch.randn(len(slots), config.num_key_value_heads, config.head_dim).to(model.dtype)
            layer.write(rows, rows, slots)
    for repeat in range(-2, repeats):
        for name in kinds:
            start = time.perf_counter()
            model.forward(batches[name], caches[name], bodies[name])
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(some) for name, some in seconds.items()}


def errors(model: Transformer, bodies: dict, kinds: dict, ids: list[int]) -> dict[str, dict[str, float]]:
    """How far the logits of every token of a text are from those over exact pages."""
    logits = {}
    for name, kind in kinds.items():
        cache = KVCache(model.config, -(-len(ids) // BLOCK_SIZE), BLOCK_SIZE, model.dtype, kv_dtype=kind)
        batch = Batch.build([ids], [len(ids)], [list(range(cache.num_blocks))], BLOCK_SIZE)
        logits[name] = model.lm_head(model.hidden(batch, cache, bodies[name]))
    exact = logits.pop(next(iter(kinds)))
    target = exact.log_softmax(-1)
    return {
        name: {
            "largest": float((some - exact).abs().max() / exact.abs().max()),
            "nats": float(F.kl_div(some.log_softmax(-1), target, log_target=True, reduction="batchmean")),
            "same_argmax": float((some.argmax(-1) == exact.argmax(-1)).float().mean()),
        }
        for name, some in logits.items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--batch", type=numbers, default=[1, 8], help="decode batch sizes, as in 1,8")
    parser.add_argument("--context", type=numbers, default=[256, 2048], help="tokens in the cache of each request")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a chunk that ends a long context")
    parser.add_argument("--error-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
