"""Sparse attention on this machine: what each method keeps, loses and costs, at two lengths of prompt.

    python benchmarks/sparse.py [--dtype bfloat16] [--repeats 3] [--out benchmarks/results/sparse.json]

The first table is that of `minillm bench --compare attention` with more methods. The second times a prompt of 3,000
tokens, of which windows and blocks read less, and is read for its times only. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from minillm import LLM
from minillm.compare_attention import METHODS, measure

MORE = ("sliding_window(64, sinks=4)", "dynamic_blocks(top=3, block=64)", "lsh(rounds=4, bucket=32)")
LONG = ("sliding_window(256, sinks=4)", "sliding_window(64, sinks=4)", "dynamic_blocks(top=5, block=64)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()

    with LLM(dtype=args.dtype, max_num_batched_tokens=4096) as llm:
        once = measure(llm, (*METHODS, *MORE), limit=2000, repeats=args.repeats)
        print("\n".join(once.lines()), "\n", flush=True)
        longer = measure(llm, LONG, limit=300, repeats=args.repeats, timed=3000)
        print("\n".join(longer.lines()), flush=True)
    text = json.dumps(
        {"command": shlex.join(["python", *sys.argv]), "text": once.as_dict(), "longer": longer.as_dict()}
    )
    if args.out:
        args.out.write_text(json.dumps(json.loads(text), indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
