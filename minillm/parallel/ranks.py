"""What the processes of one engine say to each other, and how many bytes that takes.

Rank 0 drives. It announces each step to the others over gloo, which waits without using a processor; the tensors of
the step travel over gloo between CPUs and over NCCL between GPUs. The groups belong to the object and are not
torch.distributed's global one, so several engines can live in one process. Only numbers are sent, never pickles.
NCCL wants a GPU for each rank; the tests have none, so that path is written after its documentation and not run there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from minillm.errors import ConfigError

STEP_TIMEOUT_S = 60.0
"""A rank that takes no part in a step for so long counts as dead. One that ends is noticed at once."""
TAG = 0  # of tensors between two ranks; one kind of them, so one number
IDLE = timedelta(days=365)  # how long a rank waits for the next step of a server that nobody asks


@dataclass
class Traffic:
    """What collectives moved, by kind: their number, and the bytes of the tensors that came out of them.

    A ring all-reduce of `b` bytes sends 2 (N - 1) / N x b from each rank; a gather (N - 1) / N x b in total.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, num_bytes: int) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += num_bytes


@dataclass
class Transfer:
    """A tensor on its way between two ranks."""

    tensor: torch.Tensor
    work: dist.Work


class Ranks:
    """`size` processes, of which this one is `rank`. Connect before anything is sent.

    traffic  of this rank, from the beginning of its latest step
    """

    def __init__(self, rank: int, size: int, device: torch.device | str = "cpu"):
        if not dist.is_available():
            raise ConfigError("this PyTorch was built without torch.distributed; use one process")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.traffic = Traffic()
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"

    def connect(self, store: dist.Store, loopback: bool = False, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Meet the other ranks. Blocks until all are there.

        store      where they find each other
        loopback   all of them run on this machine: listen to nothing outside it
        timeout_s  of each collective; a RuntimeError is raised when it has passed, or when a rank is gone
        """
        timeout = timedelta(seconds=timeout_s)
        self.control = _gloo(dist.PrefixStore("control", store), self.rank, self.size, timeout, loopback)
        self.data = self.control
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.data = dist.ProcessGroupNCCL(dist.PrefixStore("data", store), self.rank, self.size, options)

    def abort(self) -> None:
        """Give up the connections without waiting for anybody, also what a GPU still waits for."""
        self.data.abort()
        self.control.abort()

    # ---- tensors of the model --------------------------------------------------------------------

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x + x of every other rank, on every rank; in place."""
        dist.all_reduce(x, group=self.data)
        self.traffic.add("all_reduce", x.nbytes)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 the x of every rank, in their order; elsewhere nothing. All x have one shape."""
        options = dist.GatherOptions()
        options.rootRank = 0
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self.data.gather([parts] if parts else [], [x], options).wait()
        self.traffic.add("gather", x.nbytes * self.size)
        return parts

    def send(self, x: torch.Tensor, to: int) -> Transfer:
        """Begin to send x to another rank, which calls `receive`; x must stay as it is until it was waited for."""
        x = x.contiguous()
        self.traffic.add("send", x.nbytes)
        return Transfer(x, self.data.send([x], to, TAG))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Transfer:
        """Begin to receive a tensor of this shape. Between two ranks tensors arrive in the order they were sent."""
        x = torch.empty(shape, dtype=dtype, device=self.device)
        return Transfer(x, self.data.recv([x], source, TAG))

    def wait_for(self, transfer: Transfer) -> torch.Tensor:
        """The tensor, once it has arrived or may be overwritten. Raises RuntimeError when the other rank is gone."""
        transfer.work.wait()
        return transfer.tensor

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite x with that of rank 0."""
        _broadcast(self.data, x)
        self.traffic.add("broadcast", x.nbytes)
        return x

    # ---- numbers ---------------------------------------------------------------------------------

    def announce(self, numbers: torch.Tensor, idle: bool = False) -> torch.Tensor:
        """Overwrite int64 numbers on the CPU with those of rank 0. `idle`: wait for as long as it takes."""
        _broadcast(self.control, numbers, IDLE if idle else None)
        self.traffic.add("plan", numbers.nbytes)
        return numbers

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.control)
        return int(found)

    def agree(self, number: int) -> bool:
        """Has every rank called with the same number?"""
        least, most = self.least(number), -self.least(-number)  # both on every rank, whatever the first one says
        return least == most


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, loopback: bool):
    if not loopback:  # the interface that the host's name leads to, or GLOO_SOCKET_IFNAME
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _broadcast(group, x: torch.Tensor, timeout: timedelta | None = None) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    if timeout is not None:
        options.timeout = timeout
    group.broadcast([x], options).wait()
