"""The `minillm` command: generate, chat, demo, doctor, bench, serve, kernels; grade and progress of the course.

Every option of EngineConfig is a flag of the same name. Answers go to stdout; progress and errors go to
stderr. An error is one line and exit status 2; `--debug` shows the traceback.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from minillm.errors import ConfigError, MinillmError

DEMO_QUESTION = "Name the capital of France."  # no step is a near tie, so rounding on no processor changes the answer
SAMPLING_FLAGS = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return args.run(args) or 0
    except MinillmError as error:
        if args.debug:
            raise
        print(f"minillm: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("minillm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader left, as in `minillm generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minillm", description="A small LLM inference engine that can be read.")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = _command(commands, "generate", run_generate, "complete one or more prompts")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT")
    generate.add_argument("--chat", action="store_true", help="send each prompt as a user message")
    generate.add_argument("--json", action="store_true", help="print one JSON list")
    _add_sampling(generate)
    generate.add_argument("--n", type=int, help="completions per prompt")

    chat = _command(commands, "chat", run_chat, "talk to the model, streaming; an empty line or Ctrl-D ends it")
    chat.add_argument("--system", help="system message")
    _add_sampling(chat)

    demo = _command(commands, "demo", run_demo, "one answer, and where its time to first token went")
    demo.add_argument("--question", default=DEMO_QUESTION)

    doctor = _command(commands, "doctor", run_doctor, "what this machine offers and what the engine chooses on it")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")

    bench = _command(commands, "bench", run_bench, "TTFT by prompt length, decode speed and an offline mix")
    bench.add_argument("--quick", action="store_true", help="fewer repeats and a shorter mix")
    bench.add_argument("--json", action="store_true", help="print the last line, one JSON object, alone")

    serve = _command(commands, "serve", run_serve, "an OpenAI-compatible HTTP server, on this machine only by default")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1, this machine only")
    serve.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    serve.add_argument("--api-key", help="callers must bring it; default: the environment's MINILLM_API_KEY, or none")
    serve.add_argument("--request-timeout-s", type=float, help="cut off requests that take longer")
    serve.add_argument("--max-body-bytes", type=int, default=4 * 2**20, help="default 4 MiB")
    serve.add_argument("--shutdown-timeout-s", type=float, default=30.0, help="time for open answers; default 30")

    grade = _course_command(commands, "grade", run_grade, "marks for one exercise notebook, or for a folder of them")
    grade.add_argument("file", nargs="?", type=Path, metavar="FILE.ipynb")
    grade.add_argument("--batch", type=Path, metavar="DIR", help="grade every notebook below this folder")
    grade.add_argument("-j", "--jobs", type=int, default=1, help="notebooks at a time; default 1")
    grade.add_argument("--json", type=Path, metavar="OUT", help="write the marks to this file")
    grade.add_argument("--gradescope", action="store_true", help="write OUT in the form that Gradescope reads")
    grade.add_argument("--csv", action="store_true", help="print one CSV row per task instead of text")
    grade.add_argument("--seed", type=int, help="of the random cases; without it a fresh one is drawn and reported")
    grade.add_argument("--extra", type=Path, metavar="DIR", help="an instructor's own cases, DIR/exNN.py")
    grade.add_argument("--checks", metavar="PACKAGE", help="another package of checks than the course's")

    progress = _course_command(commands, "progress", run_progress, "which tasks have passed their check here")
    progress.add_argument("--json", action="store_true", help="print one JSON list")

    kernels = commands.add_parser("kernels", help="what the compiler makes of every GPU kernel; needs no GPU")
    kernels.set_defaults(run=run_kernels)
    kernels.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    kernels.add_argument("--json", action="store_true", help="print one JSON object")
    only = "only such rows, e.g. compute_capability=9.0; two of one field: either"
    kernels.add_argument("--only", action="append", default=[], metavar="FIELD=VALUE", help=only)
    kernels.add_argument("--dump", metavar="FOLDER", help="also write each row's Triton IR and PTX there")

    estimate = _course_command(
        commands, "estimate", run_estimate, "what a model would cost on a device: time, memory, what fits"
    )
    estimate.add_argument("--model", default="8b", help="7b, 70b, 8b, ... or any model that can be loaded; default 8b")
    estimate.add_argument("--device", default="H100", help="a GPU's name, or `here` to measure this one; default H100")
    estimate.add_argument("--context", type=int, default=2048, help="tokens of each prompt; default 2048")
    estimate.add_argument("--batch", type=int, default=1, help="requests that decode together; default 1")
    estimate.add_argument("--dtype", help="float16, bfloat16, float8 or float32; default float16")
    estimate.add_argument("--block-size", type=int, default=16, help="tokens per KV block; default 16")
    estimate.add_argument("--rank-devices", action="store_true", help="all GPUs, fastest first, for prefill and decode")
    estimate.add_argument("--json", action="store_true", help="print one JSON object")

    from minillm.simulator.command import ENGINE_OPTIONS, add_arguments

    simulate = _course_command(
        commands, "simulate", run_simulate, "the scheduler on a virtual clock: any model, any GPU, any traffic"
    )
    add_arguments(simulate)
    _add_engine_options(simulate, ENGINE_OPTIONS)
    return parser


def _command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    parser = _course_command(commands, name, run, help)
    _add_engine_options(parser)
    return parser


def _course_command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    """A command that opens no engine."""
    parser = commands.add_parser(name, help=help, description=help)
    parser.set_defaults(run=run)
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return parser


def _add_engine_options(parser: argparse.ArgumentParser, names: tuple[str, ...] | None = None) -> None:
    """One flag for every field of EngineConfig, or for these; a flag that is not given leaves the field's default."""
    from minillm.config import EngineConfig

    group = parser.add_argument_group("engine options")
    hints = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        if names is not None and field.name not in names:
            continue
        flag, kind = "--" + field.name.replace("_", "-"), hints[field.name]
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, dest=f"engine_{field.name}")
            continue
        scalar = next(t for t in (int, float, str) if kind in (t, t | None))
        dest = "engine_seed" if field.name == "seed" else f"engine_{field.name}"
        flag = "--engine-seed" if field.name == "seed" else flag
        help = None if field.default is None else f"default {field.default}"
        group.add_argument(flag, type=scalar, default=None, dest=dest, metavar=scalar.__name__.upper(), help=help)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind in SAMPLING_FLAGS.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind)
    group.add_argument("--stop", action="append", help="end at this text; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", default=None)


def _engine_options(args) -> dict:
    options = {f.removeprefix("engine_"): v for f, v in vars(args).items() if f.startswith("engine_")}
    return {name: value for name, value in options.items() if value is not None}


def _open_llm(args):
    from minillm.llm import LLM

    return LLM(**_engine_options(args))


def _sampling(args, llm):
    names = [*SAMPLING_FLAGS, "stop", "ignore_eos", "n"]
    given = {name: getattr(args, name, None) for name in names}
    return llm.default_sampling_params.updated(**{k: v for k, v in given.items() if v is not None})


# ---- commands ------------------------------------------------------------------------------------


def run_generate(args) -> None:
    with _open_llm(args) as llm:
        params = _sampling(args, llm)
        if args.chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in args.prompts]
            outputs = llm.chat(conversations, params, use_tqdm=sys.stderr.isatty())
        else:
            outputs = llm.generate(args.prompts, params, use_tqdm=sys.stderr.isatty())
    rows = []
    for prompt, output in zip(args.prompts, outputs, strict=True):
        whole = output.to_dict()
        for completion in output.outputs:
            rows.append(
                {
                    "prompt": prompt,
                    "text": completion.text,
                    "token_ids": completion.token_ids,
                    "finish_reason": completion.finish_reason,
                    "num_cached_tokens": output.num_cached_tokens,
                    "metrics": whole["metrics"],
                }
            )
    if args.json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    for row in rows:
        print(row["text"] if len(rows) == 1 else f"--- {row['prompt']}\n{row['text']}")


def run_chat(args) -> None:
    with _open_llm(args) as llm:
        params = _sampling(args, llm)
        messages = [{"role": "system", "content": args.system}] if args.system else []
        while True:
            try:
                text = input("you: " if sys.stdin.isatty() else "")
            except EOFError:
                return
            if not text.strip():
                return
            messages.append({"role": "user", "content": text})
            answer = ""
            for chunk in llm.stream(messages, params):
                answer += chunk.text
                print(chunk.text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


def run_demo(args) -> None:
    from minillm.config import SamplingParams

    messages = [{"role": "user", "content": args.question}]
    with _open_llm(args) as llm:
        llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)  # warm up once
        llm.reset_prefix_cache()  # and do not let the prefix cache answer for it
        print(f"question  {args.question}\nanswer    ", end="", flush=True)
        output = None
        for chunk in llm.stream(messages, SamplingParams(temperature=0.0, max_tokens=64), profile=True):
            print(chunk.text, end="", flush=True)
            output = chunk.output or output
        metrics = output.metrics
        parts = " + ".join(f"{name.replace('_', ' ')} {s * 1e3:.1f}" for name, s in metrics.ttft_parts.items())
        rate = f"{1 / metrics.tpot_s:.1f} tok/s" if metrics.tpot_s else "a single token"
        print(f"\nTTFT      {metrics.ttft_s * 1e3:.1f} ms = {parts} (prompt: {len(output.prompt_token_ids)} tokens)")
        print(f"decode    {rate} after the first token")
        print(f"attention {llm.reasons['attention']}")


def run_doctor(args) -> None:
    from minillm.doctor import report

    with _open_llm(args) as llm:
        rows = report(llm)
    if args.json:
        print(json.dumps(rows))
        return
    for name, value in rows.items():
        print(f"{name:<14} {value if not isinstance(value, dict) else json.dumps(value)}")


def run_bench(args) -> None:
    from minillm.bench import run

    with _open_llm(args) as llm:
        result = run(llm, quick=args.quick, show=not args.json)
    print(json.dumps(result))


def run_serve(args) -> None:
    try:
        from minillm.server.app import ServerConfig
        from minillm.server.run import listen, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'minillm-course[serve]'") from error

    api_key = args.api_key if args.api_key is not None else os.environ.get("MINILLM_API_KEY")
    config = ServerConfig(api_key, args.request_timeout_s, args.max_body_bytes)
    with listen(args.host, args.port) as listener, _open_llm(args) as llm:
        serve(llm, config, listener, args.shutdown_timeout_s)


def run_grade(args) -> int:
    from minillm.course.grader.command import run_grade

    return run_grade(args)


def run_progress(args) -> None:
    from minillm.course.grader.command import run_progress

    run_progress(args)


def run_kernels(args) -> None:
    try:
        from minillm.kernels.report import as_json, lines, report
    except ModuleNotFoundError as error:
        raise ConfigError(f"kernels are compiled by {error.name}: pip install triton (Linux)") from error

    result = report(args.only, args.dump)
    print(as_json(result) if args.json else "\n".join(lines(result)))


def run_estimate(args) -> None:
    from minillm import estimate

    config = estimate.shape_of(args.model)
    if args.rank_devices:
        result = estimate.rank_devices(config, args.context, args.batch, args.dtype or "float16")
        print(json.dumps(result) if args.json else estimate.rank_table(result))
        return
    device, dtype = estimate.device_and_dtype(args.device, args.dtype)
    result = estimate.estimate(config, device, args.context, args.batch, dtype, args.block_size)
    print(json.dumps(result) if args.json else estimate.table(result))


def run_simulate(args) -> None:
    from minillm.simulator.command import run

    run(args, _engine_options(args))
