"""The `minillm` command. Every option of EngineConfig is a flag of the same name.

Answers go to stdout; progress and errors go to stderr. An error is one line and exit status 2; `--debug` shows the
traceback. Each file here adds its own commands.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys

from minillm.cli import course, measure, serve, talk
from minillm.errors import MinillmError


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
    finally:
        gc.unfreeze()  # what `open_llm` froze; a command may be one of several in a process


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minillm", description="A small LLM inference engine that can be read.")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in (talk, measure, serve, course):
        group.add_commands(commands)
    return parser
