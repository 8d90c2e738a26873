"""How fast our tokenizer is, as a ratio to the `tokenizers` library, on the embedded model's vocabulary.

    python benchmarks/tokenizer_speed.py [--tokens 1024] [--repeats 15]

Three things for a prompt of this many tokens, in milliseconds, medians with the quartiles: encode with an empty
word cache (the first prompt of a process), encode when most words were seen before (a server at work), decode token
by token. Ours and the library's take turns, so a busy machine slows both. Code and prose differ in how many
words repeat, so both are shown. The last line is one JSON object. A ratio of 2 means: ours takes twice as long.
"""

import argparse
import ast
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import minillm
from minillm.checkpoint import embedded
from minillm.tokenizer import IncrementalDecoder, Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()

    fields = vocabulary_fields()
    load_s = statistics.median(seconds(lambda: Tokenizer.from_gguf(fields)) for _ in range(5))
    print(f"building the tokenizer from {len(fields['tokenizer.ggml.tokens']):,} tokens: {load_s * 1e3:.0f} ms")
    results = {"tokens": options.tokens, "load_ms": round(load_s * 1e3, 1)}
    for name, text in texts().items():
        results[name] = measure(fields, text, options.tokens, options.repeats)
        for task, row in results[name].items():
            print(
                f"{name:6} {task:12} ours {row['ours_ms']:7.2f} ms ({row['ours_quartiles_ms'][0]:.2f} to "
                f"{row['ours_quartiles_ms'][1]:.2f})  library {row['library_ms']:7.2f} ms  ratio {row['ratio']:.2f}"
            )
    print(json.dumps(results))


def measure(fields: dict, text: str, num_tokens: int, repeats: int) -> dict:
    """{task: {ours_ms, library_ms, ratio, ...}} for the first `num_tokens` tokens of `text`."""
    library = library_tokenizer(fields)
    warm = Tokenizer.from_gguf(fields)
    prompt = warm.decode(warm.encode(text)[:num_tokens])
    ids = warm.encode(prompt)
    if ids != library.encode(prompt).ids:
        raise SystemExit("ours and the library disagree about the text; a speed would mean nothing")

    def stream_ours() -> None:
        decoder = IncrementalDecoder(warm)
        for token_id in ids:
            decoder.push(token_id)

    def stream_library() -> None:
        stream = decoders.DecodeStream()
        for token_id in ids:
            stream.step(library, token_id)

    times: dict[str, tuple[list, list]] = {task: ([], []) for task in ("encode cold", "encode warm", "stream")}
    for _ in range(repeats):
        fresh, fresh_library = Tokenizer.from_gguf(fields), library_tokenizer(fields)
        for task, ours, theirs in (
            ("encode cold", partial(fresh.encode, prompt), partial(fresh_library.encode, prompt)),
            ("encode warm", partial(warm.encode, prompt), partial(library.encode, prompt)),
            ("stream", stream_ours, stream_library),
        ):
            times[task][0].append(seconds(ours))
            times[task][1].append(seconds(theirs))
    return {task: summary(ours, theirs) for task, (ours, theirs) in times.items()}


def summary(ours: list[float], theirs: list[float]) -> dict:
    quartiles = statistics.quantiles(ours, n=4)
    return {
        "ours_ms": round(statistics.median(ours) * 1e3, 3),
        "ours_quartiles_ms": [round(quartiles[0] * 1e3, 3), round(quartiles[2] * 1e3, 3)],
        "library_ms": round(statistics.median(theirs) * 1e3, 3),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
    }


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def vocabulary_fields() -> dict:
    fields = gguf.GGUFReader(embedded.path()).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


def library_tokenizer(fields: dict) -> tokenizers.Tokenizer:
    """The same vocabulary in the library."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    library = tokenizers.Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(Tokenizer.from_gguf(fields).special_tokens))
    return library


def texts() -> dict[str, str]:
    """The engine's own source, and the prose in it: enough for several thousand tokens each."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(Path(minillm.__file__).parent.rglob("*.py"))]
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    prose = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    return {"code": "\n\n".join(sources), "prose": "\n\n".join(prose)}


if __name__ == "__main__":
    main()
