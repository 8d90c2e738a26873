"""A task whose cell holds a Triton kernel and the Python function that launches it.

It is judged twice, in two processes, since a kernel is interpreted or compiled by the process that imports Triton.
Interpreted: float32, the cases of any task, at most 64 long because a program is Python then. Compiled, for GPUs that
need not be there: `compile_cases` give half-precision inputs, the launcher runs on them without running the kernel,
and what it would have launched is compiled. The interpreter accepts what the compiler rejects, so both have to pass.
In both the launcher may allocate and take views, and nothing else: the work belongs into the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from minillm.course.grader.task import Case, Record, Task, Verdicts

CAPABILITIES = ((8, 0), (9, 0))
NO_TRITON = "not gradable here: Triton is not installed, which runs on Linux"


@dataclass(frozen=True)
class KernelTask(Task):
    """A task with a kernel; `name` is the launcher.

    compile_cases  () -> cases for `drive` in float16, each with "items", which the compilation decides, and
                   "matrix": True where the compiled kernel has to hold matrix instructions (mma, wgmma)
    """

    compile_cases: Callable[[], list[Case]] = list


def is_gradable(task: Task) -> bool:
    return not isinstance(task, KernelTask) or find_spec("triton") is not None


def judge_compiled(case: Case, record: Record) -> Verdicts:
    """Verdicts on {"kernels": [...]}, one entry per kernel and compute capability; see kernel_child.py."""
    kernels = record.get("kernels")
    if not isinstance(kernels, list) or not kernels:
        return dict.fromkeys(case["items"], "the launcher launches no kernel")
    sentences = (_fault(kernel, case["matrix"]) for kernel in kernels)
    return dict.fromkeys(case["items"], next((sentence for sentence in sentences if sentence), ""))


def _fault(kernel: dict, matrix: bool) -> str:
    name = f"{kernel['name']} for compute capability {kernel['capability']}"
    if kernel["error"]:
        return f"{name} does not compile: {kernel['error']}"
    if kernel["shared_bytes"] > kernel["shared_limit"]:
        return f"{name} needs {kernel['shared_bytes']:,} bytes of shared memory, allowed are {kernel['shared_limit']:,}"
    if kernel["spill_bytes"]:
        return f"{name} spills {kernel['spill_bytes']:,} bytes of registers to memory: smaller tiles or more warps"
    if matrix and not kernel["matrix_instructions"]:
        return f"{name} holds no matrix instruction: does it use tl.dot, with a K of at least 16?"
    return ""
