"""What the commands share: their flags, and an LLM and SamplingParams made from what was given."""

from __future__ import annotations

import argparse
import gc
from dataclasses import Field, fields
from typing import get_type_hints

SAMPLING_FLAGS = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int}


def engine_command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    """A command with a flag for every option of the engine. `run(args)` does it."""
    parser = plain_command(commands, name, run, help)
    add_engine_options(parser)
    return parser


def plain_command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    """A command that opens no engine, or only with options of its own."""
    parser = commands.add_parser(name, help=help, description=help)
    parser.set_defaults(run=run)
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return parser


def add_engine_options(parser: argparse.ArgumentParser, names: tuple[str, ...] | None = None) -> None:
    """One flag for every field of EngineConfig, or for these; a flag that is not given leaves the field's default."""
    from minillm.config import EngineConfig

    group = parser.add_argument_group("engine options")
    hints = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        if names is not None and field.name not in names:
            continue
        flag, kind = "--" + field.name.replace("_", "-"), hints[field.name]
        help = help_of(field)
        if kind is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=None, dest=f"engine_{field.name}", help=help)
            continue
        scalar = next(t for t in (int, float, str) if kind in (t, t | None))
        dest = "engine_seed" if field.name == "seed" else f"engine_{field.name}"
        flag = "--engine-seed" if field.name == "seed" else flag
        group.add_argument(flag, type=scalar, default=None, dest=dest, metavar=scalar.__name__.upper(), help=help)


def help_of(field: Field, default=None) -> str:
    """What an option is for, the words that it takes, the policies that it belongs to, and its default, or another."""
    from minillm.option_words import ATTENTION_BODIES, CHOICES, POLICIES_WITH
    from minillm.sparse_options import METHODS

    words = f"one of {', '.join(filter(None, CHOICES[field.name]))}" if field.name in CHOICES else ""
    if field.name == "attention":
        words = (
            f"one of {', '.join(ATTENTION_BODIES)}, or a sparse method like sliding_window(1024): {', '.join(METHODS)}"
        )
    policies = "only with scheduling policy " + " or ".join(POLICIES_WITH.get(field.name, ()))
    default = field.default if default is None else default
    said = "" if default in (None, ()) else f"default {default}"  # else the sentence itself says what comes then
    parts = [field.metadata["help"], words, policies if field.name in POLICIES_WITH else "", said]
    return "; ".join(filter(None, parts)).replace("%", "%%")


def add_sampling(parser: argparse.ArgumentParser, **more: type) -> None:
    """Flags for SAMPLING_FLAGS and `more` fields of SamplingParams; what is not given stays as the model has it."""
    from minillm.sampling_params import SamplingParams

    group = parser.add_argument_group("sampling", "what the model's own files say goes before these defaults")
    helps = {field.name: help_of(field, {"temperature": 0}.get(field.name)) for field in fields(SamplingParams)}
    for name, kind in (SAMPLING_FLAGS | more).items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=kind.__name__.upper(), help=helps[name])
    group.add_argument("--stop", action="append", metavar="TEXT", help=f"{helps['stop']}; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", default=None, help=helps["ignore_eos"])


def engine_config(args):
    """The EngineConfig of the options that were given, to look at before an engine is opened with them."""
    from minillm.config import EngineConfig

    return EngineConfig(**engine_options(args))


def engine_options(args) -> dict:
    """The engine options that were given."""
    options = {f.removeprefix("engine_"): v for f, v in vars(args).items() if f.startswith("engine_")}
    return {name: value for name, value in options.items() if value is not None}


def open_llm(args):
    """The LLM of the options that were given, if the sampling options are right, too: that is known before it loads.

    The garbage collector leaves alone what is there by now.

    Imports and model are some 260,000 objects: a full collection took 150 ms, in the middle of a request. Programs
    with an LLM of their own may do the same. `main` takes it back when the command ends.
    """
    from minillm.llm import LLM
    from minillm.sampling_params import SamplingParams
    from minillm.scheduler.books import check_completions

    check_completions(SamplingParams(**sampling_options(args)).n, engine_config(args).num_seats)
    llm = LLM(**engine_options(args))
    gc.collect()
    gc.freeze()
    return llm


def sampling(args, llm):
    """The model's own SamplingParams with what was given."""
    return llm.default_sampling_params.updated(**sampling_options(args))


def sampling_options(args) -> dict:
    """The fields of SamplingParams that were given."""
    given = {name: getattr(args, name, None) for name in (*SAMPLING_FLAGS, "stop", "ignore_eos", "n")}
    return {name: value for name, value in given.items() if value is not None}
