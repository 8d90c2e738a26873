"""Datasheet peaks of the GPUs that the course talks about, each row with the document it was read from.

Dense numbers: vendors also print doubled ones for 2:4 sparsity. A device that is not listed has to be
measured in place, which `machine.py` does. How the peaks are used is `roofline.py`'s business. Lesson 04.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from minillm.errors import ConfigError

TERA, GIGA = 1e12, 1e9
PCIE_BANDWIDTH = 31.5 * GIGA  # bytes per second each way at most: PCIe 4.0, 16 lanes of 16 GT/s, 128 bits in 130


@dataclass(frozen=True)
class Device:
    """Peaks of one device.

    flops          floating point operations per second by type: "float16" (also bfloat16 from 8.0 on), "float8"
    bandwidth      bytes per second to and from its memory
    memory         bytes
    num_sms        streaming multiprocessors: thread blocks that run at once if each fills one; a processor's threads
    shared_memory  bytes that one thread block may use; 0 where there is no such thing
    source         the document, or "measured here"
    """

    name: str
    compute_capability: tuple[int, int]
    flops: dict[str, float]
    bandwidth: float
    memory: float
    num_sms: int
    shared_memory: int
    source: str

    def peak(self, dtype: str = "float16") -> float:
        """FLOP/s in this type. Raises ConfigError when the device has no units for it."""
        if not self.has(dtype):
            raise ConfigError(f"{self.name} has no native {dtype}; it has {', '.join(self.flops)}")
        return self.flops.get(dtype) or self.flops["float16"]

    def has(self, dtype: str) -> bool:
        """Is there a peak for this type? From 8.0 on bfloat16 runs at the rate of float16."""
        same = dtype == "bfloat16" and self.compute_capability >= (8, 0) and "float16" in self.flops
        return dtype in self.flops or same

    def ridge(self, dtype: str = "float16") -> float:
        """FLOPs per byte at which arithmetic takes as long as memory: above it compute-bound, below it memory-bound."""
        return self.peak(dtype) / self.bandwidth


def _device(name, cc, fp16, fp8, bandwidth, memory, sms, shared, source) -> Device:
    flops = {"float16": fp16 * TERA} | ({"float8": fp8 * TERA} if fp8 else {})
    return Device(name, cc, flops, bandwidth * TERA, memory * GIGA, sms, shared, source)


# name, compute capability, fp16 and fp8 TFLOP/s, TB/s, GB, SMs, shared memory per block, source
DEVICES = {
    device.name: device
    for device in (
        _device("T4", (7, 5), 65, None, 0.320, 16, 40, 65_536, "NVIDIA T4 datasheet"),
        _device("L4", (8, 9), 121, 242, 0.300, 24, 58, 101_376, "NVIDIA L4 datasheet"),
        _device("A100-40GB", (8, 0), 312, None, 1.555, 40, 108, 166_912, "NVIDIA A100 datasheet (SXM)"),
        _device("A100-80GB", (8, 0), 312, None, 2.039, 80, 108, 166_912, "NVIDIA A100 datasheet (SXM)"),
        _device("RTX3090", (8, 6), 71, None, 0.936, 24, 82, 101_376, "NVIDIA GA102 whitepaper (fp32 accumulate)"),
        _device("RTX4090", (8, 9), 165, 330, 1.008, 24, 128, 101_376, "NVIDIA Ada whitepaper (fp32 accumulate)"),
        _device("H100", (9, 0), 989, 1979, 3.35, 80, 132, 232_448, "NVIDIA H100 datasheet (SXM)"),
        _device("H200", (9, 0), 989, 1979, 4.8, 141, 132, 232_448, "NVIDIA H200 datasheet (SXM)"),
        _device("B200", (10, 0), 2250, 4500, 8.0, 180, 148, 232_448, "NVIDIA DGX B200 datasheet"),
    )
}


GPU_NAMES = {  # what the driver calls them; other forms of the same chip (PCIe, NVL, laptop) have other peaks
    "T4": r"Tesla T4",
    "L4": r"NVIDIA L4",
    "A100-40GB": r"(NVIDIA )?A100-SXM4-40GB",
    "A100-80GB": r"(NVIDIA )?A100-SXM4?-80GB",
    "RTX3090": r"(NVIDIA )?GeForce RTX 3090",
    "RTX4090": r"(NVIDIA )?GeForce RTX 4090",
    "H100": r"NVIDIA H100 80GB HBM3",
    "H200": r"NVIDIA H200",
    "B200": r"NVIDIA B200",
}


def find_device(name: str) -> Device:
    """The row of this name, in any case. Raises ConfigError listing the known ones."""
    rows = {known.lower(): device for known, device in DEVICES.items()}
    if name.lower() not in rows:
        raise ConfigError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    return rows[name.lower()]


def by_gpu_name(gpu_name: str) -> Device | None:
    """The row of a GPU as its driver names it ("NVIDIA H100 80GB HBM3"), or None."""
    return next((DEVICES[name] for name, pattern in GPU_NAMES.items() if re.fullmatch(pattern, gpu_name)), None)


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that one thread block may use on every listed GPU of this compute capability."""
    return min(device.shared_memory for device in DEVICES.values() if device.compute_capability == capability)
