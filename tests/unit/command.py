"""The `minillm` command in this process: its own entry point, without starting Python and PyTorch once more.

What only a process of its own shows (its start, what it logs, its standard input, its end) is left to test_cli.py.
"""

import io
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

from minillm.cli import main


def minillm(*args):
    """The exit status and both streams of `minillm args...`, by the names that a finished process has for them."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(list(args))
        except SystemExit as left:  # argparse
            status = left.code
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())
