"""Kernels run here as Python, through Triton's interpreter: it has to be asked for before triton is imported.

What the compiler says is tested in processes of their own, without the interpreter.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
if "triton" in sys.modules:
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(sys.modules["triton"].language.sum, InterpretedFunction), "triton was imported too early"
