"""Times of operations: a roofline of peak and bandwidth, with the efficiency of their size.

An operation takes the longer of its arithmetic and its memory traffic (Williams et al., 2009), each
at the fraction of the peak that the device reaches at that size: matrix products by their FLOPs,
all else by its bytes. Beside that the host takes some time to launch each; a device works while the
host launches the next, so a row of operations takes the longer of the two sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.tools.plan.catalogue import Device

MATMUL = "matrix products"
MEMORY = "memory traffic"
LAUNCH = "launches"


@dataclass(frozen=True, slots=True)
class Work:
    """An operation, or `count` equal ones: FLOPs of its matrix products and bytes that it reads and
    writes, both of one. `dtype` names the peak: "bf16", "fp32", ...; `flops` is 0 where it is
    bound by memory."""

    flops: float
    bytes: float
    dtype: str = "bf16"
    count: int = 1


@dataclass(frozen=True)
class Busy:
    """Seconds of a row of operations by what bounds them: matrix products, memory traffic, or the
    host's launches where those take longer than both."""

    matmul: float = 0.0
    memory: float = 0.0
    launch: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.matmul + self.memory + self.launch

    def __add__(self, other: Busy) -> Busy:
        return Busy(
            self.matmul + other.matmul, self.memory + other.memory, self.launch + other.launch
        )

    def times(self, factor: float) -> Busy:
        """Each of them `factor` times."""
        return Busy(self.matmul * factor, self.memory * factor, self.launch * factor)


def matmul_seconds(flops: float, dtype: str, device: Device) -> float:
    """Seconds of a matrix product of so many FLOPs."""
    curve = device.curves.get(f"matmul_{dtype}") or device.curves["matmul"]
    return flops / (device.flops(dtype) * curve.at(flops / 1e9))


def memory_seconds(count: float, device: Device) -> float:
    """Seconds to read and write `count` bytes of the device's memory."""
    return count / (device.bandwidth * device.curves["memory"].at(count / 1e6)) if count else 0.0


def busy(works: Iterable[Work], device: Device) -> Busy:
    """The time of operations that follow each other."""
    matmul = memory = 0.0
    launches = 0
    for work in works:
        arithmetic = matmul_seconds(work.flops, work.dtype, device) if work.flops else 0.0
        traffic = memory_seconds(work.bytes, device)
        if arithmetic >= traffic:
            matmul += work.count * arithmetic
        else:
            memory += work.count * traffic
        launches += work.count
    return Busy(matmul, memory, max(0.0, launches * device.launch - matmul - memory))
