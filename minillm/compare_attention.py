"""Dense attention beside windows, dynamic blocks and LSH: what is kept, what is lost, what it costs here (A12-A14).

Quality is measured on a text of the course in one prefill: the share of the causal matrix that is kept, the attention
that falls on it (and on as many random keys), the error of the output, perplexity, and whether facts put into the text
are found again. Cost is the choice of keys, attention alone, and TTFT through the engine. Lesson 15 reads the table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minillm.attention import choose_attention, naive
from minillm.attention.sparse import choosing, seen_keys
from minillm.batch import Batch
from minillm.compare import Comparison, Ledger, in_turns, ratio
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.kv_cache import KVCache
from minillm.sampling_params import SamplingParams
from minillm.sparse_options import Sparse, is_sparse, parse

METHODS = (
    "sliding_window(256, sinks=4)",
    "sliding_window(256)",
    "dynamic_blocks(top=5, block=64)",
    "dynamic_blocks(mass=0.9, block=64)",
    "lsh(rounds=4, bucket=32, sinks=1)",
)
QUICK_METHODS = ("sliding_window(128, sinks=4)", "dynamic_blocks(top=3, block=64)", "lsh(rounds=4, bucket=16, sinks=1)")
TEXT = Path(__file__).parent / "data" / "pell_rock.txt"
EVERY = 5  # layers whose attention is looked into: 0, 5, 10, ...
BLOCK_SIZE = 16
NEEDLES = (
    ("The harbour master of Saint Orrin plays the violin.", "The harbour master of Saint Orrin plays the", " violin"),
    ("Captain Reed was born in Lisbon.", "Captain Reed was born in", " Lisbon"),
    ("Ada's sister lives in Norway.", "Ada's sister lives in", " Norway"),
    ("The password of the harbour office is marble.", "The password of the harbour office is", " marble"),
)
DEPTHS = (0.1, 0.35, 0.6, 0.85)
COLUMNS = {
    "kept": (".1%", "share of the causal matrix that is computed"),
    "mass": (".1%", "attention that dense attention gives to the kept keys, mean over rows, heads and layers"),
    "random": (".1%", "the same for as many keys of each row drawn at random (expected value)"),
    "random+": (".1%", "the same where the first key and the row's own are kept and the others drawn"),
    "error": (".3f", "|output - dense output| / |dense output|, mean over layers"),
    "perplexity": (".2f", "of the text, each token given those before it"),
    "needles": ("", "facts put into the text whose first token is the most likely one when asked for at its end"),
    "choice ms": (".2f", "choosing the keys of one layer, part of what follows"),
    "attention x": (".2f", "time of one layer's attention as a multiple of dense attention's, this machine"),
    "TTFT x": (".2f", "time to the first token of the text through the engine, as a multiple of dense"),
    "from-to": ("", "lowest and highest TTFT x of the rounds"),
}
LEDGER = Ledger(
    invariant="each method is exact over the keys it keeps, and with a whole budget it is dense attention",
    wins="the prompt is several times longer than what is kept, and a kernel skips the rest (window: n W instead of "
    "n^2; decode reads W keys too)",
    loses="prompts are short, the answer lies outside what is kept, or the choice costs more than it saves; LSH in "
    "PyTorch copies the keys of every row and misses most of what untied queries look for",
    misleads="perplexity leans on near tokens and hides what needles show; attention's first key takes a large part "
    "of the mass, so compare with random+; one short text and one small model; attention x is not TTFT x",
)


@torch.inference_mode()
def compare(llm, quick: bool = False) -> Comparison:
    """The table for the engine's model and device; its own `attention` is the dense side and must be a dense body."""
    return measure(llm, QUICK_METHODS if quick else METHODS, limit=400 if quick else 2000, repeats=3)


@torch.inference_mode()
def measure(llm, methods: tuple[str, ...], limit: int, repeats: int, timed: int | None = None) -> Comparison:
    """`compare` with other methods, on the text's first `limit` tokens; times on `timed` tokens, the text repeated.

    Raises ConfigError when the engine itself was opened with a sparse method, or on several ranks.
    """
    check(llm.config)
    model = llm.engine.model
    text = TEXT.read_text(encoding="utf-8").strip()
    whole = llm.tokenizer.encode(text)
    ids = whole[: min(limit, llm.max_model_len - 1)]
    bodies = {"dense": llm.engine.attend}
    bodies |= {name: choose_attention(model.device, model.dtype, name)[0] for name in methods}

    look = Look([parse(name) for name in methods], llm.engine.attend)
    forward(model, ids, look)
    rows = {"dense": {"kept": 1.0, "mass": 1.0, "random": 1.0, "random+": 1.0, "error": 0.0, "choice ms": 0.0}}
    rows |= {name: dict(found) for name, found in zip(methods, look.means(), strict=True)}
    for name, attend in bodies.items():
        rows[name]["perplexity"] = perplexity(model, ids, attend)
        rows[name]["needles"] = needles(llm, text, attend, min(limit, llm.max_model_len))

    long = (whole * (1 + (timed or 0) // len(whole)))[:timed] if timed else ids
    inputs = Keep(llm.engine.attend, layer=model.config.num_hidden_layers // 2)
    forward(model, long, inputs)
    attention = in_turns({name: attention_clock(inputs.kept, attend) for name, attend in bodies.items()}, repeats)
    ttft = in_turns({name: ttft_clock(llm, long, attend) for name, attend in bodies.items()}, repeats)
    for name, row in rows.items():
        row["attention x"] = ratio(attention[name], attention["dense"])
        row["TTFT x"] = ratio(ttft[name], ttft["dense"])
        by_round = [ours / dense for ours, dense in zip(ttft[name], ttft["dense"], strict=True)]
        row["from-to"] = f"{min(by_round):.2f}-{max(by_round):.2f}"
    for name in methods:
        rows[name]["choice ms"] = 1e3 * seconds_to_choose(parse(name), inputs.kept, repeats)
    setting = {
        "model": llm.model_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "tokens": len(ids),
        "tokens timed": len(long),
        "repeats": repeats,
        "dense attention ms": round(1e3 * statistics.median(attention["dense"]), 2),
        "dense TTFT ms": round(1e3 * statistics.median(ttft["dense"]), 1),
    }
    table = [{"name": name, **{heading: row[heading] for heading in COLUMNS}} for name, row in rows.items()]
    return Comparison("attention", setting, COLUMNS, table, [note(row) for row in table[1:]], LEDGER)


def check(config: EngineConfig) -> None:
    """Raises ConfigError for several ranks, and for an engine that is sparse itself."""
    if config.num_ranks > 1:
        raise ConfigError("attention is compared on one rank, which has all heads; open the model on one")
    if is_sparse(config.attention):
        raise ConfigError(f"attention={config.attention!r} is sparse; compare with a dense body, such as 'auto'")


def note(row: dict) -> str:
    """What a row of the table says, in words."""
    if row["kept"] == 1:
        words = "keeps every key"
    elif row["mass"] <= row["random"]:
        words = "does not beat random keys"
    elif row["mass"] <= row["random+"]:
        words = "beats random keys, but not beside the same first and own key,"
    else:
        words = "beats random keys, also beside the same first and own key,"
    low, high = map(float, row["from-to"].split("-"))
    speed = "sooner than" if high < 1 else "later than" if low > 1 else "in some rounds sooner, in others later than"
    words += "" if row["kept"] == 1 else " in attention mass"
    return f"{row['name']} {words}; its first token comes {speed} dense attention's here"


@dataclass
class Look:
    """An attention body that passes dense results on and looks at every fifth layer on the way."""

    methods: list[Sparse]
    dense: Callable
    found: list[list[dict]] = field(default_factory=list)  # by layer, then by method
    layer: int = 0

    def __call__(self, q, k, v, kv_layer, batch) -> torch.Tensor:
        if self.layer % EVERY == 0:
            p = naive.probabilities(q, k, kv_layer.window)  # [H, n, n]
            self.found.append([kept_attention(p, v, seen_keys(m, q, k, kv_layer.window)) for m in self.methods])
        self.layer += 1
        return self.dense(q, k, v, kv_layer, batch)

    def means(self) -> list[dict]:
        """For each method the means over the layers that were looked at."""
        by_method = zip(*self.found, strict=True)
        return [{key: statistics.fmean(row[key] for row in rows) for key in rows[0]} for rows in by_method]


@dataclass
class Keep:
    """An attention body that keeps what one layer is called with."""

    dense: Callable
    layer: int
    calls: int = 0
    kept: tuple = ()

    def __call__(self, q, k, v, kv_layer, batch) -> torch.Tensor:
        if self.calls == self.layer:
            self.kept = (q.clone(), k.clone(), v.clone(), kv_layer, batch)
        self.calls += 1
        return self.dense(q, k, v, kv_layer, batch)


def kept_attention(p: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> dict:
    """What a mask [H, n, n] keeps of the probabilities p, and what it does to the output."""
    causal = torch.arange(1, p.shape[1] + 1, device=p.device)  # keys up to each row's own
    share = seen.sum(-1) / causal  # [H, n]
    kept = p.masked_fill(~seen, 0.0)
    mass = kept.sum(-1)
    ends = p[..., 0] + p.diagonal(dim1=1, dim2=2)  # [H, n]
    others = ((seen.sum(-1) - 2) / (causal - 2).clamp(min=1)).clamp(0, 1)  # chance of a key that is neither
    random_with_ends = torch.where(causal <= 2, 1.0, ends + others * (1 - ends))
    v = v.float().repeat_interleave(p.shape[0] // v.shape[1], 1)
    dense = torch.einsum("hns,shd->nhd", p, v)
    sparse = torch.einsum("hns,shd->nhd", kept / mass.clamp(min=1e-9)[..., None], v)
    return {
        "kept": float(seen.sum() / (causal.sum() * p.shape[0])),
        "mass": float(mass.mean()),
        "random": float(share.mean()),
        "random+": float(random_with_ends.mean()),
        "error": float((sparse - dense).norm() / dense.norm()),
    }


def forward(model, ids: list[int], attend: Callable) -> torch.Tensor:
    """The rows [n, E] before the LM head, in one prefill with a cache of its own."""
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    pages = KVCache(model.config, num_blocks, BLOCK_SIZE, model.dtype, model.device)
    batch = Batch.build([ids], [len(ids)], [list(range(num_blocks))], BLOCK_SIZE, device=model.device)
    return model.hidden(batch, pages, attend)


def perplexity(model, ids: list[int], attend: Callable) -> float:
    """exp of the mean negative log-probability of every token but the first."""
    targets = torch.tensor(ids[1:], device=model.device)
    total = 0.0
    for rows, wanted in zip(forward(model, ids, attend)[:-1].split(128), targets.split(128), strict=True):
        total += float(model.lm_head(rows).log_softmax(-1).gather(1, wanted[:, None]).sum())
    return float(torch.tensor(-total / len(targets)).exp())


def needles(llm, text: str, attend: Callable, limit: int) -> str:
    """Each fact put at its depth of the text and asked for behind it: "3 of 4"."""
    model = llm.engine.model
    found = 0
    for ids, answer in needle_prompts(llm.tokenizer.encode, text, limit):
        found += int(model.lm_head(forward(model, ids, attend)[-1:]).argmax()) == answer
    return f"{found} of {len(NEEDLES)}"


def needle_prompts(encode: Callable, text: str, limit: int) -> Iterator[tuple[list[int], int]]:
    """For each fact a prompt of at most `limit` tokens with it inside and its question at the end, and the answer."""
    for (fact, question, answer), depth in zip(NEEDLES, DEPTHS, strict=True):
        paragraphs = text.split("\n\n")
        while len(ids := encode("\n\n".join(_hide(paragraphs, fact, depth) + [question]))) > limit and paragraphs:
            paragraphs.pop()
        yield ids, encode(answer)[0]


def _hide(paragraphs: list[str], fact: str, depth: float) -> list[str]:
    at = round(depth * len(paragraphs))
    return [*paragraphs[:at], fact, *paragraphs[at:]]


def attention_clock(inputs: tuple, attend: Callable) -> Callable[[], float]:
    """Seconds of one layer's attention on the model's own q, k and v."""
    return lambda: clocked(lambda: attend(*inputs), inputs[0].device)


def seconds_to_choose(options: Sparse, inputs: tuple, repeats: int) -> float:
    """The choice of keys alone, a part of the time of attention; 0 for a window."""
    q, k, _, kv_layer, _ = inputs
    choose = choosing(options)
    if choose is None:
        return 0.0
    seconds = [clocked(lambda: choose(q, k, kv_layer.window), q.device) for _ in range(repeats + 1)]
    return statistics.median(seconds[1:])


def ttft_clock(llm, ids: list[int], attend: Callable) -> Callable[[], float]:
    """Seconds to the first token of a cold prompt, with `attend` in the engine's place for it."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

    def run() -> float:
        dense, llm.engine.attend = llm.engine.attend, attend
        try:
            llm.reset_prefix_cache()
            return llm.generate([ids], params, use_tqdm=False)[0].metrics.ttft_s
        finally:
            llm.engine.attend = dense

    return run


def clocked(run: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start
