"""The process that tokenises: `python -m minillm.pipeline.worker`, started by producer.py only. Loads no PyTorch.

Its standard input is lines of JSON: the tokenizer, then for each text its settings, its pieces (strings) and null.
Its standard output is a line for what has become certain, {"ids": [...], "from": when encoding began, "to": when it
ended}, the last one of a text with "last": true. It ends when its input does, which the system sees to even if the
parent is killed.
"""

from __future__ import annotations

import json
import os
import sys
import time

from minillm.tokenizer import StreamingEncoder
from minillm.tokenizer.as_json import loads

SLICE = 2048
"""Characters encoded at a time, about 500 tokens: a book that comes in one piece is still computed from its start."""


def main() -> None:
    lines = sys.stdin
    tokenizer = loads(lines.readline())
    for settings in lines:
        encoder = StreamingEncoder(tokenizer, **json.loads(settings))
        for line in lines:
            piece = json.loads(line)
            for start in range(0, len(piece or ""), SLICE):
                tell(encoder.push, piece[start : start + SLICE])
            if piece is None:
                tell(encoder.finish, last=True)
                break


def tell(encode, *text: str, **more) -> None:
    start = time.perf_counter()
    ids = encode(*text)
    print(json.dumps({"ids": ids, "from": start, "to": time.perf_counter(), **more}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the parent ended while it was told something
        os._exit(1)
