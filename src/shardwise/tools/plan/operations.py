"""Times of operations, by a roofline of peak and bandwidth.

An operation takes the longer of its arithmetic and its memory traffic (Williams et al., 2009), each
at the fraction of the peak that the device reaches at that size: matrix products by their FLOPs,
all others by their bytes. The host also needs time to launch each operation. It launches the next
one while the device works, so a sequence of operations takes the longer of the two sums.
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
    """An operation, or `count` equal ones.

    `flops` counts one matrix product, and is 0 for an operation limited by memory. `bytes` are read
    and written by one operation. `dtype` names the peak: "bf16", "fp32", ...
    """

    flops: float
    bytes: float
    dtype: str = "bf16"
    count: int = 1


@dataclass(frozen=True)
class Busy:
    """Seconds of a sequence of operations by their limit: matrix products, memory, or launches.

    Launches count as far as they take longer than the other two.
    """

    matmul: float = 0.0
    memory: float = 0.0
    launch: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of all kinds."""
        return self.matmul + self.memory + self.launch

    def __add__(self, other: Busy) -> Busy:
        return Busy(
            self.matmul + other.matmul, self.memory + other.memory, self.launch + other.launch
        )

    def times(self, factor: float) -> Busy:
        """Return all times multiplied by `factor`."""
        return Busy(self.matmul * factor, self.memory * factor, self.launch * factor)


def matmul_seconds(flops: float, dtype: str, device: Device) -> float:
    """Return the seconds of a matrix product of `flops` FLOPs."""
    # A dtype without a measured curve uses the general one.
    curve = device.curves.get(f"matmul_{dtype}") or device.curves["matmul"]
    return flops / (device.flops(dtype) * curve.at(flops / 1e9))


def memory_seconds(count: float, device: Device) -> float:
    """Return the seconds to read and write `count` bytes of the device's memory."""
    return count / (device.bandwidth * device.curves["memory"].at(count / 1e6)) if count else 0.0


def busy(works: Iterable[Work], device: Device) -> Busy:
    """Return the time of operations that run one after the other."""
    matmul = memory = 0.0
    launches = 0
    for work in works:
        arithmetic = matmul_seconds(work.flops, work.dtype, device) if work.flops else 0.0
        traffic = memory_seconds(work.bytes, device)
        # The device overlaps both, so an operation takes the longer one and counts under it.
        if arithmetic >= traffic:
            matmul += work.count * arithmetic
        else:
            memory += work.count * traffic
        launches += work.count
    # The host launches ahead while the device works: only what exceeds that work adds time.
    return Busy(matmul, memory, max(0.0, launches * device.launch - matmul - memory))
