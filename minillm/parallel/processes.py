"""Where the other ranks come from: children of this process, or the processes that torchrun started.

`Children` starts ranks 1 to N-1 on this machine, as `python -m minillm.parallel.worker`: a script needs no guard
around its main part, as it would with multiprocessing. A child reads its task from its standard input and ends when
that closes, so none is left behind however this process ends. `Torchrun` starts nothing; it is for several machines.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

import minillm
from minillm.config import EngineConfig
from minillm.errors import ConfigError, MinillmError, RankError

START_TIMEOUT_S = 600.0
"""Loading may take so long on the slowest rank."""
STOP_TIMEOUT_S = 5.0
"""Ranks that were told to stop, and have not after so long, are killed."""
POLL_S = 0.01


class Others:
    """The ranks besides this one, as far as they can be seen through the store in which they leave notes."""

    local = False  # are all of them on this machine?

    def __init__(self, store: dist.Store, rank: int, size: int, local_rank: int):
        self.store = store
        self.rank = rank
        self.size = size
        self.local_rank = local_rank

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """An error inside leaves a note for the other ranks, and is raised. The first note of all ranks stays."""
        try:
            yield
        except Exception as error:
            reason = str(error) if isinstance(error, MinillmError) else repr(error)
            self.store.compare_set("failed", "", f"rank {self.rank} of {self.size} failed: {reason}")
            raise

    def wait_until_ready(self) -> None:
        """Return when every rank holds its part. Raises RankError when one has failed, or takes too long."""
        self.store.set(f"ready/{self.rank}", "")
        deadline = time.monotonic() + START_TIMEOUT_S
        while waiting := [rank for rank in range(self.size) if not self.store.check([f"ready/{rank}"])]:
            if problem := self.missing():
                raise RankError(problem)
            if time.monotonic() > deadline:
                raise RankError(f"ranks {waiting} were not ready after {START_TIMEOUT_S:.0f} s; start all of them")
            time.sleep(POLL_S)

    def missing(self) -> str | None:
        """Which rank has failed and why, or None."""
        if not self.store.check(["failed"]):
            return None
        return f"{self.store.get('failed').decode()}; create a new LLM"

    def why(self, error: BaseException) -> str:
        """The reason for an error of a collective: what is missing, once that is known, else the error itself."""
        deadline = time.monotonic() + 1.0
        while (problem := self.missing()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return problem or f"a step on {self.size} ranks failed: {error!r}; create a new LLM"

    def stop(self) -> None:
        """They were told to stop."""

    def kill(self) -> None:
        """End them if they are ours."""


class Torchrun(Others):
    """The processes of one torchrun. When one of them fails, torchrun itself ends the others."""

    @classmethod
    def find(cls) -> Torchrun | None:
        """This process as a rank of torchrun, which says so in the environment; None if it is none."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in os.environ for name in names):
            return None
        rank, size, local_rank = (int(os.environ[name]) for name in names[:3])
        return cls(None, rank, size, local_rank)

    def start(self, config: EngineConfig) -> None:
        """Meet in torchrun's own store; every process has the options itself."""
        store, _, _ = next(iter(dist.rendezvous("env://", self.rank, self.size)))
        self.store = dist.PrefixStore("minillm", store)


class Children(Others):
    """Ranks 1 to size - 1 as children of this process. They share its processor cores."""

    local = True

    def __init__(self, size: int):
        super().__init__(None, 0, size, 0)
        self.processes: dict[int, subprocess.Popen] = {}
        self.threads = torch.get_num_threads()
        self.folder: str | None = None  # where the ranks meet, while there are any

    def start(self, config: EngineConfig) -> None:
        """Start them; they find everything else themselves, as this process does."""
        self.folder = tempfile.mkdtemp(prefix="minillm-ranks-")  # nobody else's: mode 0700
        self.store = dist.FileStore(os.path.join(self.folder, "store"), -1)
        share = max(1, self.threads // self.size)
        torch.set_num_threads(share)
        root = str(Path(minillm.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(share), "NUMBA_NUM_THREADS": str(share)}
        for rank in range(1, self.size):
            task = {"rank": rank, "size": self.size, "folder": self.folder, "config": asdict(config)}
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "minillm.parallel.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment,
                process_group=0,  # Ctrl-C in the terminal reaches this process alone, which decides
            )  # fmt: skip
            self.processes[rank] = process
            process.stdin.write(json.dumps(task, default=str).encode() + b"\n")
            process.stdin.flush()

    def missing(self) -> str | None:
        if problem := super().missing():
            return problem
        for rank, process in self.processes.items():
            if status := process.poll():
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                return f"rank {rank} of {self.size} {how}; create a new LLM"
        return None

    def stop(self) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self.kill()

    def kill(self) -> None:
        """End all of them now, and give back what they used."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
            process.stdin.close()
        self.processes = {}
        if self.folder is not None:
            torch.set_num_threads(self.threads)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def find_others(size: int, option: str) -> Torchrun | Children:
    """How this process comes to `size` ranks. Raises ConfigError when torchrun started another number of them."""
    torchrun = Torchrun.find()
    if torchrun is None:
        return Children(size)
    if torchrun.size != size:
        raise ConfigError(f"torchrun started {torchrun.size} processes and {option}={size}; make the two equal")
    return torchrun
