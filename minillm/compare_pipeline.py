"""Three ways to pipeline a prefill, each beside the plain way: text that arrives, stages of layers, early exit (A17).

Text: what tokenising in another process hides when all of it is there, and what is left to wait for when it comes
slowly. Stages: the same prompt through two processes of one thread, in chunks of several sizes, beside one process.
Early exit: the time it saves at several layers, and how far the next token is from the whole model's. Lesson 17 reads
the table.
"""

from __future__ import annotations

import torch

from minillm.compare import Comparison, Ledger
from minillm.compare_pipeline_rows import SLOWNESS, STAGES, Sizes, characters, exit_rows, stage_rows, text_rows
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.llm import LLM
from minillm.perplexity import JARGON_FILE
from minillm.pipeline.growing import check_cuts
from minillm.scheduler import POLICIES

COLUMNS = {
    "TTFT ms": (".1f", "from the first piece of text, or from the ids, to the first token; median"),
    "TTFT x": (".2f", "as a multiple of the first row of its group, median over rounds"),
    "from-to": ("", "lowest and highest TTFT x of the rounds"),
    "ideal x": (
        ".2f",
        "with tokenising hidden; with equal stages and the bubble; with the weights still multiplied",
    ),
    "tokenise ms": (".1f", "text to ids, in whichever process"),
    "hidden ms": (".1f", "of that, while the engine computed"),
    "after text ms": (".1f", "from the end of the text to the first token"),
    "bubble": (".1%", "idle share of the stages if chunks took equally long: (stages - 1) / (chunks + stages - 1)"),
    "idle": (".1%", "share of all threads' time beyond what one thread needs: bubble, small products, shared memory"),
    "same first": (".0%", "prompts with the first token of the whole model"),
    "KL": (".3f", "of the next token's distribution from the whole model's, nats, mean over prompts"),
    "needles": ("", "facts put into a text whose first token is the most likely one when asked for at its end"),
}
AGREEING = 0.9  # share of first tokens
LEDGER = Ledger(
    invariant="text in pieces gives the tokens of the whole text, and stages the logits of one process in float32; "
    "early exit is exact there after the last layer but one and another model before",
    wins="text comes more slowly than it is computed, so that the wait after its end is a chunk or two; where a GPU "
    "computes a prompt faster than a CPU does, tokenising is a larger part; layers that do not fit one device lie on "
    "two, and only T x E values of a step cross the link",
    loses="all of the text is there: only tokenising can be hidden, and it is a small part; a prompt of few chunks "
    "leaves stages idle, and a decode passes all of them one after another; early exit gives up answers for its time",
    misleads="two threads of one process share a product and have no bubble, so on one machine they are what stages "
    "have to beat; between GPUs the link and the launches decide; a slow text is slow by a factor chosen here; few "
    "prompts, four needles and one small model that was never trained to exit",
)


QUICK = Sizes(tokens=200, prompt_tokens=32, num_prompts=4, needle_tokens=200, repeats=1, chunks=(64,))


@torch.inference_mode()
def compare(llm: LLM, quick: bool = False) -> Comparison:
    """The table for the engine's model and device. Raises ConfigError when the engine is pipelined already."""
    return measure(llm, QUICK if quick else Sizes())


@torch.inference_mode()
def measure(llm: LLM, sizes: Sizes) -> Comparison:
    """`compare` with other sizes."""
    check(llm.config)
    model = llm.engine.model
    text = JARGON_FILE.read_text(encoding="utf-8")
    window = characters(llm, text, min(sizes.tokens, llm.max_model_len - 2))
    ids = llm.tokenizer.encode(text[:window])
    groups = [text_rows(llm, text, window, sizes.repeats)]
    if model.device.type == "cpu" or torch.cuda.device_count() >= STAGES:
        groups.append(stage_rows(llm, ids, sizes))
    groups.append(exit_rows(llm, ids, text, sizes))
    setting = {
        "model": llm.model_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "tokens": len(ids),
        "repeats": sizes.repeats,
        "prompts compared": f"{sizes.num_prompts} of {sizes.prompt_tokens}",
    }
    rows = [dict.fromkeys(COLUMNS) | row for group in groups for row in group]
    notes = [note for group in groups for note in notes_of(group)]
    return Comparison("pipeline", setting, COLUMNS, rows, notes, LEDGER)


def check(config: EngineConfig) -> None:
    """Raises ConfigError for an engine that is pipelined already, or that computes a prompt in one step."""
    if config.num_ranks > 1 or config.early_exit_layer is not None:
        raise ConfigError(
            "the plain side is a whole model in one process; open it without early exit and with one rank"
        )
    check_cuts(POLICIES[config.scheduling_policy].cuts_prompts(config))


def notes_of(group: list[dict]) -> list[str]:
    """What the rows of a group say, in words."""
    first, *others = group
    if first["name"] == "whole text":
        streamed, awaited, slow = others
        share = first["tokenise ms"] / first["TTFT ms"]
        return [
            f"tokenising is {share:.1%} of this TTFT, so hiding it could give {1 - share:.2f} x; "
            f"{streamed['hidden ms']:.1f} of {streamed['tokenise ms']:.1f} ms were hidden and the first token came "
            f"after {streamed['TTFT x']:.2f} x ({streamed['from-to']})",
            f"when text takes {SLOWNESS} times its prefill to arrive, the first token comes "
            f"{slow['after text ms']:.0f} ms after its end instead of {awaited['after text ms']:.0f}",
        ]
    if "KL" in first:
        last = others[-1]
        agreeing = [row for row in others if row["same first"] >= AGREEING]
        words = (
            f"{last['name']} layers takes {last['TTFT x']:.2f} x the whole model's time for {last['same first']:.0%} "
        )
        words += f"of its first tokens and {last['KL']:.2g} nats, which is rounding: in float32 it is exact; "
        return [
            words
            + (
                f"the earliest exit with {AGREEING:.0%} is {agreeing[0]['name']}, {agreeing[0]['TTFT x']:.2f} x"
                if agreeing
                else f"no exit reaches {AGREEING:.0%}"
            )
        ]
    best = min((row for row in others if "bubble" in row), key=lambda row: row["TTFT x"])
    words = f"the best of the stages, {best['name']}, take {best['TTFT x']:.2f} x one thread's time"
    words += f": idle for {best['idle']:.1%} where the bubble alone would be {best['bubble']:.1%}"
    together = others[0]
    if "bubble" not in together:
        words += f"; {together['name'].removeprefix('1 process, ')} of one process take {together['TTFT x']:.2f} x"
    return [words]
