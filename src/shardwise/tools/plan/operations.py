"""Predicts how long operations take, with a roofline model.

An operation takes as long as its arithmetic or its memory traffic, whichever is slower (Williams et
al., 2009). Both run at the fraction of the peak that the device reaches at that size. For
arithmetic, the size is the number of FLOPs. For memory traffic, it is the number of bytes. The host
also needs time to launch each operation. It launches operations ahead while the device works, so a
sequence takes the device's total time or the host's total time, whichever is longer.
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
    """An operation that is executed `count` times.

    `flops` and `bytes` are for one execution. `flops` is the number of FLOPs of a matrix product,
    or 0 for any other operation. `bytes` is the number of bytes that the operation reads and
    writes. `dtype` selects the peak rate: "bf16", "fp32", ... `unvectorised` is true for
    element-wise operations on tensors that differ in shape, strides or dtype.
    """

    flops: float
    bytes: float
    dtype: str = "bf16"
    count: int = 1
    unvectorised: bool = False


@dataclass(frozen=True)
class Busy:
    """Time in seconds of a sequence of operations, by bottleneck: matmul, memory or launches.

    `launch` includes only launch time that does not overlap with the other two.
    """

    matmul: float = 0.0
    memory: float = 0.0
    launch: float = 0.0

    @property
    def seconds(self) -> float:
        return self.matmul + self.memory + self.launch

    def __add__(self, other: Busy) -> Busy:
        return Busy(
            self.matmul + other.matmul, self.memory + other.memory, self.launch + other.launch
        )

    def times(self, factor: float) -> Busy:
        """Return a copy with all times multiplied by `factor`."""
        return Busy(self.matmul * factor, self.memory * factor, self.launch * factor)


def matmul_seconds(flops: float, dtype: str, device: Device) -> float:
    """Return the time in seconds of a matrix product of `flops` FLOPs."""
    # Without an efficiency curve for this dtype, use the general one.
    curve = device.curves.get(f"matmul_{dtype}") or device.curves["matmul"]
    return flops / (device.flops(dtype) * curve.at(flops / 1e9))


def memory_seconds(count: float, device: Device, *, unvectorised: bool = False) -> float:
    """Return the time in seconds to read and write `count` bytes of device memory."""
    # Without a measurement of such operations, assume that they are as fast as others.
    curve = (unvectorised and device.curves.get("memory_unvectorised")) or device.curves["memory"]
    return count / (device.bandwidth * curve.at(count / 1e6)) if count else 0.0


def busy(works: Iterable[Work], device: Device) -> Busy:
    """Return the time of operations that run one after another."""
    matmul = memory = 0.0
    launches = 0
    for work in works:
        arithmetic = matmul_seconds(work.flops, work.dtype, device) if work.flops else 0.0
        traffic = memory_seconds(work.bytes, device, unvectorised=work.unvectorised)
        # The device overlaps arithmetic and memory traffic, so only the longer of the two counts.
        if arithmetic >= traffic:
            matmul += work.count * arithmetic
        else:
            memory += work.count * traffic
        launches += work.count
    # The host launches ahead while the device works, so only launch time in excess of the device's
    # work counts.
    return Busy(matmul, memory, max(0.0, launches * device.launch - matmul - memory))
