"""One model in several precisions on this machine: bytes, times, perplexity and logits, beside float32.

    python -m benchmarks.precision [--text 8192] [--repeats 5] [--out benchmarks/results/precision.json]

The table of `minillm bench --compare precision` with more or less text (0: all of it, 24,625 tokens for SmolLM2). Times
on a machine that is doing something else say little. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from minillm import LLM
from minillm.compare_precision import Sizes, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--text", type=int, default=Sizes.text, help="tokens of text; 0: all")
    parser.add_argument("--prompt", type=int, default=Sizes.prompt, help="tokens of the prompt that is timed")
    parser.add_argument("--repeats", type=int, default=Sizes.repeats)
    parser.add_argument("--only", action="append", help="a way, beside fp32 and 16 bits; may be given several times")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()

    sizes = replace(Sizes(), text=args.text or None, prompt=args.prompt, repeats=args.repeats)
    with LLM(args.model) as llm:
        table = measure(llm, sizes, args.only)
    print("\n".join(table.lines()), flush=True)
    text = json.dumps(
        {"command": shlex.join(["python", "-m", "benchmarks.precision", *sys.argv[1:]]), **table.as_dict()}
    )
    if args.out:
        args.out.write_text(json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
