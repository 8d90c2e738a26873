"""What a learner's process may use: an environment without secrets, limits on memory, files and time, no network.

Best effort, in the order of what the machine offers. On Linux with user namespaces the process sees no network and
none of the other processes, and all that it started ends with it. Elsewhere sockets are refused in Python only. Memory
is limited on Linux, per process; time everywhere. This stops accidents and idle tricks. It is no sandbox against an
attack on the machine: the process reads and writes every file that its user may. Grade strangers' files in a container.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from pathlib import Path

TASK_SECONDS = 60.0
MEMORY_BYTES = 768 << 20  # beyond what PyTorch and the engine take before the first cell
FILE_BYTES = 64 << 20
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "MINILLM_MODEL")
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID = 0x10000000, 0x40000000, 0x20000000
PR_SET_DUMPABLE = 4
NAMESPACES = "blocked by a network namespace"
PYTHON_ONLY = "blocked in Python only: code that calls the system directly can reach it"


def environment(home: Path, source: Path, interpret: bool = True) -> dict[str, str]:
    """Variables of the learner's process: nothing of the caller's but what finds programs and the model.

    home       an empty folder, its working directory, where all that it writes goes
    source     the folder that holds the minillm package
    interpret  Triton interprets kernels there; else it compiles them
    """
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    folders = dict.fromkeys(("HOME", "TMPDIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "MPLCONFIGDIR"), str(home))
    return {
        **kept,
        **folders,
        **({"TRITON_INTERPRET": "1"} if interpret else {}),
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",  # the learner's process leaves no trace in the package
        "MINILLM_MINE": str(home / "my_minillm"),
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "USER": "learner",
        "TOKENIZERS_PARALLELISM": "false",
    }


def isolate() -> str:
    """Cut this process off from the network; says how. Call it before any thread starts: it may fork.

    With namespaces the rest of the program runs as the first process of a new one, and this one waits for it.
    """
    uid = os.getuid()
    if not sys.platform.startswith("linux") or not _unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID):
        _refuse_sockets()
        return PYTHON_ONLY
    try:
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
    except OSError:
        pass  # the name of the user is lost, nothing else
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    return NAMESPACES


def keep_secrets() -> None:
    """Close this process's memory, where the seed is, to other processes of the same user (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit_memory(more: int = MEMORY_BYTES) -> None:
    """Allow this process `more` bytes than it holds now, and no large files or core dumps."""
    import resource  # not on Windows, where `check` runs and this does not

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    if sys.platform.startswith("linux"):
        limit = _private_bytes() + more
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _private_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) << 10


def _unshare(flags: int) -> bool:
    try:
        return ctypes.CDLL(None).unshare(flags) == 0
    except (OSError, AttributeError):
        return False


def _refuse_sockets() -> None:
    def refused(*args, **kwargs):
        raise PermissionError("there is no network while grading")

    socket.socket.connect = socket.socket.connect_ex = socket.socket.sendto = refused
    socket.getaddrinfo = socket.create_connection = refused
