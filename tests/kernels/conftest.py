"""Kernels run here as Python, through Triton's interpreter, which has to be asked for before triton is imported.

The variable is set while the kernels are imported and while a test of this folder runs, and at no other time: a
process that another test starts must not inherit it. What the compiler says is tested in processes of their own.
"""

import importlib
import os
import pkgutil
import sys
import warnings

import numpy as np
import pytest
import torch

VARIABLE = "TRITON_INTERPRET"


def _import_interpreted():
    if "triton" in sys.modules and not _interpreted():
        raise pytest.UsageError("triton was imported without the interpreter; run tests/kernels by itself")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    import minillm.kernels

    for module in pkgutil.iter_modules(minillm.kernels.__path__):
        importlib.import_module(f"minillm.kernels.{module.name}")
    if before is None:
        del os.environ[VARIABLE]


def _interpreted():
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(sys.modules["triton"].language.sum, InterpretedFunction)


_import_interpreted()


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """NumPy under the interpreter warns of what a GPU does silently: log2(0), the maximum of nothing but NaN."""
    monkeypatch.setenv(VARIABLE, "1")
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered")
        yield


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """What torch.empty returns is full of NaN here, so that an element that no kernel writes is noticed."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(scope="session")
def session_seed():
    """The seed of this session (see tests/conftest.py), for generators that outlive one test."""
    return int(os.environ["MINILLM_TEST_SEED"])
