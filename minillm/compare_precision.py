"""One model in several precisions: the bytes each takes, the time, and what is left of the quality (A16, A19).

Weights in 16, 8 or 4 bits, K and V in 8, and combinations. Quality is perplexity on the shipped text (of prefills) and
the logits of decode steps, both beside float32; time is that of a first token and of the tokens after it, in turns
with plain 16-bit weights. Each way is an engine like the one that was given, opened, measured and closed, so that only
the 16-bit one stands in memory beside it. Lesson 16 reads the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from minillm.compare import Comparison, Ledger, check_left_out, in_turns, ratio
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.llm import LLM
from minillm.perplexity import JARGON_FILE, Perplexity, perplexity
from minillm.sampling_params import SamplingParams

EXACT = "fp32"
HALVES = {"bf16": "bfloat16", "fp16": "float16"}
ROUNDED = {  # on top of the 16-bit type that this device multiplies
    "auto": {"quantization": "auto"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "KV int8": {"kv_cache_dtype": "int8"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
    "auto, KV int8": {"quantization": "auto", "kv_cache_dtype": "int8"},
    "int4, KV int8": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "fp8, KV fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
PLAIN = {"quantization": "none", "kv_cache_dtype": "auto"}
COLUMNS = {
    "weights MB": (".1f", "weights as they are held here, a matrix that is held twice counted twice"),
    "KV B/token": (".0f", "bytes that one token's K and V take in all layers, scales included"),
    "TTFT ms": (".0f", "time to the first token of a prompt that is not cached"),
    "TTFT x": (".2f", "the same as a multiple of the 16-bit row, in turns with it"),
    "token/s": (".1f", "tokens after the first one, one request alone"),
    "TPOT x": (".2f", "time per such token as a multiple of the 16-bit row, in turns with it"),
    "perplexity": (".3f", "of the text"),
    "±": (".3f", "its standard error: what another text of this kind would change"),
    "nats": ("+.4f", "mean loss of a token above fp32, window by window"),
    "± nats": (".4f", "standard error of that, far smaller because it is the same text"),
    "error": (
        ".3f",
        "largest difference of a logit from fp32's in decode steps, after a prefill in the same precision",
    ),
    "argmax": (".1%", "of those steps, the ones in which the most likely token is fp32's"),
}
LEDGER = Ledger(
    invariant="one checkpoint, one text, one engine: only the bits differ, so logits agree within the error shown, "
    "and greedy tokens may part where two are nearly equally likely",
    wins="decode reads every weight for each token, so fewer bytes make it faster as far as widening the codes "
    "keeps up with memory; K and V in 8 bits leave room for nearly twice the tokens",
    loses="a first token is arithmetic, which codes do not save: where they are widened for every few rows, as int4 "
    "is on a CPU, it comes later (auto holds a second copy, 16 bits wide, for prefill, and pays in bytes); rounding "
    "and restoring K and V costs time; on a GPU the balance may differ: its tensor cores may multiply fp8 "
    "themselves",
    misleads="of a file that came in 4 bits, as the embedded one, fp32 is not the model that was trained and int4 "
    "repeats the file's own codes; a random model's text means nothing; fp8 is emulated on a CPU; one small model, "
    "short contexts, one text: few windows give a rough standard error, and of nine rows one may pass two of them "
    "by chance",
)


@dataclass(frozen=True)
class Sizes:
    text: int | None = 8192  # tokens whose perplexity is measured; None: all
    window: int = 1024
    stride: int = 512
    steps: int = 256  # decode steps whose logits are compared
    prompt: int = 512  # tokens of the prompt whose TTFT is taken, and of the context of decode
    answer: int = 32  # tokens of a decode that is timed
    repeats: int = 5

    def within(self, limit: int) -> Sizes:
        """The same for a model that takes at most `limit` tokens."""
        window = min(self.window, limit)
        half = window // 2
        prompt = min(self.prompt, limit - self.answer)
        return replace(self, window=window, stride=min(self.stride, half), steps=min(self.steps, half), prompt=prompt)


QUICK = Sizes(text=300, window=128, stride=64, steps=16, prompt=64, answer=8, repeats=2)


@dataclass(frozen=True)
class Quality:
    of_text: Perplexity
    logits: torch.Tensor  # [steps, V]


def compare(llm: LLM, quick: bool = False) -> Comparison:
    """The table for the engine's model on its device."""
    return measure(llm, QUICK if quick else Sizes())


def check(config: EngineConfig) -> None:
    """Raises ConfigError for several ranks, and for a precision: the table has one in each row."""
    check_left_out("precision", config, tuple(PLAIN), "has a row for each precision")
    if config.dtype not in ("auto", *HALVES.values()):
        raise ConfigError(
            f"--compare precision has a row for float32 anyway, so dtype={config.dtype!r} would be left unheard; drop "
            f"it, or say which 16 bits stand beside it: {' or '.join(HALVES.values())}"
        )
    if config.num_ranks > 1:
        raise ConfigError("precisions are compared in one process; leave the two parallel sizes at 1")
    if config.early_exit_layer is not None:
        raise ConfigError(
            f"early_exit_layer={config.early_exit_layer} is another model, whose loss would stand beside that of "
            f"fewer bits; drop it"
        )


def measure(llm: LLM, sizes: Sizes, names: Collection[str] | None = None) -> Comparison:
    """`compare` with other sizes, or with some of the ways only; fp32 and the 16-bit row are always there."""
    sizes = sizes.within(llm.max_model_len)
    half = "fp16" if llm.engine.model.dtype is torch.float16 else "bf16"
    ways = {EXACT: {"dtype": "float32"}, half: {}}
    ways |= {name: {"dtype": dtype} for name, dtype in HALVES.items() if name != half} | ROUNDED
    if names is not None:
        ways = {name: options for name, options in ways.items() if name in (EXACT, half, *names)}
    ids = llm.tokenizer.encode(JARGON_FILE.read_text(encoding="utf-8"))[: sizes.text]

    rows, missing, exact = [], [], None
    with _open(llm, sizes, dtype=HALVES[half]) as plain:
        for name, options in ways.items():
            try:
                way = plain if name == half else _open(llm, sizes, **{"dtype": HALVES[half], **options})
            except ConfigError as error:
                missing.append(f"{name} does not run here: {error}")
                continue
            quality = _quality(way, ids, sizes, name)
            exact = exact or quality
            row, spread = _row(way, plain, quality, exact, ids, sizes)
            emulated = "emulated" in way.reasons["weights"]
            rows.append({"name": f"{name} (emulated)" if emulated else name, **row, "spread": spread})
            if way is not plain:
                way.close()
        setting = {
            "model": llm.model_name,
            "16 bits": HALVES[half],
            "device": str(plain.engine.model.device),
            "threads": torch.get_num_threads(),
            "tokens of text": exact.of_text.tokens,
            "windows": f"{len(exact.of_text.counts)} of {sizes.window}",
            "decode steps": len(exact.logits),
            "prompt": min(sizes.prompt, len(ids)),
            "repeats": sizes.repeats,
        }
    notes = [note(row, half) for row in rows if row["name"] not in (EXACT, half)] + missing
    table = [{"name": row["name"], **{heading: row[heading] for heading in COLUMNS}} for row in rows]
    return Comparison("precision", setting, COLUMNS, table, notes, LEDGER)


def note(row: dict, half: str) -> str:
    """What a row of the table says, in words; a time differs when all rounds agree, a loss beyond two errors."""
    if row["spread"] is None:
        words = "its times mean nothing where it is emulated"
    else:
        words = " and ".join(_speed(part, *row["spread"][part]) for part in ("first token", "decode"))
        words += f" than in {half}"
    if abs(row["nats"]) <= 2 * row["± nats"]:
        loss = "no loss that this text can show"
    else:
        loss = f"{'loses' if row['nats'] > 0 else 'gains'} {abs(row['nats']):.4f} nats per token"
    return f"{row['name']}: {words}; {loss} ({row['nats']:+.4f} ± {row['± nats']:.4f})"


def _speed(part: str, low: float, high: float) -> str:
    word = "sooner" if high < 1 else "later" if low > 1 else "now sooner, now later"
    return f"{part} {word} ({low:.2f}-{high:.2f} x)"


def _open(llm: LLM, sizes: Sizes, **options) -> LLM:
    """An engine like `llm` in another precision, with as many KV blocks as are needed here."""
    config = {field.name: getattr(llm.config, field.name) for field in fields(llm.config)}
    tokens = max(sizes.window, sizes.prompt + sizes.answer) + llm.config.block_size
    config |= {"num_kv_blocks": -(-tokens // llm.config.block_size), "kv_cache_memory_bytes": None}
    return LLM(**(config | PLAIN | options))


def _quality(llm: LLM, ids: list[int], sizes: Sizes, name: str) -> Quality:
    window = ids[: sizes.window]
    logits = [rows.cpu() for rows, _ in llm.logits(window, len(window) - sizes.steps, step=1)]
    return Quality(perplexity(llm, ids, sizes.window, sizes.stride, title=name), torch.cat(logits))


def _row(way: LLM, plain: LLM, quality: Quality, exact: Quality, ids: list[int], sizes: Sizes) -> tuple[dict, dict]:
    cache = way.engine.kv_cache
    nats, error = quality.of_text.nats_above(exact.of_text)
    row = dict.fromkeys(COLUMNS) | {
        "weights MB": sum(way.engine.model.num_weight_bytes.values()) / 1e6,
        "KV B/token": cache.num_bytes / (cache.num_blocks * cache.block_size),
        "perplexity": quality.of_text.value,
        "±": quality.of_text.standard_error,
        "nats": nats,
        "± nats": error,
        "error": float((quality.logits - exact.logits).abs().max()),
        "argmax": float((quality.logits.argmax(-1) == exact.logits.argmax(-1)).float().mean()),
    }
    if "emulated" in way.reasons["weights"]:
        return row, None
    ttft, row["TTFT x"], ttft_spread = _beside(way, plain, ids[: sizes.prompt], 1, sizes.repeats)
    tpot, row["TPOT x"], tpot_spread = _beside(way, plain, ids[: sizes.prompt], sizes.answer, sizes.repeats)
    return row | {"TTFT ms": 1e3 * ttft, "token/s": 1 / tpot}, {"first token": ttft_spread, "decode": tpot_spread}


def _beside(way: LLM, plain: LLM, ids: list[int], tokens: int, repeats: int) -> tuple[float, float, tuple]:
    """Seconds to the first token, or of one after it where there are more: (median, ratio to plain, its range)."""
    engines = {"way": way, "plain": plain}
    runs = {name: partial(_seconds, engine, ids, tokens) for name, engine in engines.items()}
    taken = in_turns(runs if way is not plain else {"way": runs["way"]}, repeats)
    ours, theirs = taken["way"], taken.get("plain", taken["way"])
    by_round = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ours), ratio(ours, theirs), (min(by_round), max(by_round))


def _seconds(llm: LLM, ids: list[int], tokens: int) -> float:
    """Of one request that finds nothing in the prefix cache."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    metrics = llm.generate([ids], params, use_tqdm=False)[0].metrics
    return metrics.ttft_s if tokens == 1 else metrics.tpot_s
