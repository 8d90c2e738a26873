"""The learner's side of a kernel task: the launcher under its rules, kernels counted or compiled instead of run.

Imported only in a learner's process, after the environment has decided whether Triton interprets or compiles there.
"""

from __future__ import annotations

import contextlib
import re

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from minillm.course.grader.kernel_task import CAPABILITIES
from minillm.course.grader.marks import explain
from minillm.devices import shared_memory_limit
from minillm.kernels.compiler import compile_for

ALLOCATIONS = re.compile(r"aten\.(new_)?(empty|zeros|ones|full)(_like|_strided)?\.")
READERS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.item}
TYPES = {
    **{torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"},
    **{torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"},
    **{torch.uint8: "u8", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"},
}


class LaunchError(RuntimeError):
    """A launcher that does more than allocate, take views and launch."""


class Launcher:
    """The learner's launcher, as `drive` gets it. `launches` are the kernels of its calls, with their arguments.

    With `run` they are interpreted as well.
    """

    def __init__(self, function, run: bool):
        self.function = function
        self.launches: list[tuple[object, tuple, dict]] = []
        self.__code__ = getattr(function, "__code__", None)  # where its errors are looked for
        self._run = run

    def __call__(self, *args, **kwargs):
        rules = LaunchRules()
        with self._kernels_reach_us(rules), rules, rules.readers:
            return self.function(*args, **kwargs)

    @contextlib.contextmanager
    def _kernels_reach_us(self, rules: LaunchRules):
        """Kernel launches arrive here while a call lasts."""
        kind = InterpretedFunction if self._run else triton.JITFunction
        original = kind.run

        def launch(kernel, *args, grid, warmup, **kwargs):
            self.launches.append((kernel, args, kwargs))
            if self._run:
                with rules.suspended():
                    return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        kind.run = launch
        try:
            yield
        finally:
            kind.run = original


class LaunchRules(TorchDispatchMode):
    """Inside, PyTorch allocates and takes views; everything else is the kernel's work and raises LaunchError."""

    def __init__(self):
        super().__init__()
        self.in_kernel = False
        self.readers = ReaderRules(self)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.in_kernel and not ALLOCATIONS.match(f"{function}.") and not _is_view(function):
            raise LaunchError(f"the launcher computes with PyTorch ({function}): that is the kernel's work")
        return function(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def suspended(self):
        self.in_kernel = True
        try:
            yield
        finally:
            self.in_kernel = False


class ReaderRules(TorchFunctionMode):
    """What takes values out of a tensor without passing PyTorch's dispatcher."""

    def __init__(self, rules: LaunchRules):
        super().__init__()
        self._rules = rules

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READERS and not self._rules.in_kernel:
            raise LaunchError(f"the launcher reads values of a tensor ({function.__name__}): that is the kernel's work")
        return function(*args, **(kwargs or {}))


def compile_launches(launches: list[tuple[object, tuple, dict]]) -> list[dict]:
    """Each launch compiled for each compute capability, a second or two each: figures, or the error as a sentence."""
    return [_compile(*launch, capability) for launch in launches for capability in CAPABILITIES]


def _compile(kernel: triton.JITFunction, args: tuple, kwargs: dict, capability: tuple[int, int]) -> dict:
    figures = {"name": kernel.fn.__name__, "capability": "{}.{}".format(*capability), "error": ""}
    try:
        source, options = _source(kernel, args, kwargs)
        compiled = compile_for(source, capability, options)
    except Exception as error:
        return {**figures, "error": _cause(error)}
    return {
        **figures,
        "shared_bytes": compiled.shared_bytes,
        "shared_limit": shared_memory_limit(capability),
        "spill_bytes": compiled.spill_bytes,
        "matrix_instructions": sum(compiled.matrix_instructions.values()),
    }


def _source(kernel: triton.JITFunction, args: tuple, kwargs: dict) -> tuple[ASTSource, dict]:
    """(what Triton compiles for a launch, its options), as the launch itself would find them out."""
    named = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **named)
    bound.apply_defaults()
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = bound.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    return ASTSource(kernel, signature, constants, attributes), options


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel takes tensors and numbers, not {type(value).__name__}")


def _cause(error: BaseException) -> str:
    """The innermost error: Triton wraps it, with a picture of the source, in its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = getattr(error, "error_message", None)
    return message if isinstance(message, str) and message else explain(error)


def _is_view(function) -> bool:
    returns = function._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
