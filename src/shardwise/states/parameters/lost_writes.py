"""Detects writes into parameters while they are gathered for a forward, which would be lost.

A write by an operation on the parameter counts up its version; one through `.data` leaves no trace
but the values. So around some gathers sums of each parameter's bits are compared: around the first
ones of every bucket, since what a forward does it mostly does from the start, and then around one
in INTERVAL, so that it costs a step little. On an accelerator the host waits for the first ones
alone; what the others come to is looked at by later gathers, once it has come down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.tiers.copy_stream import start_to_host

FIRST = 9
INTERVAL = 31
"""Odd, so that the gathers for forwards and those for backwards take turns."""


class _Coming(NamedTuple):
    """Which parameters of `bucket` differ: on the host once `event` has happened."""

    bucket: ShardedBucket
    differ: Tensor
    event: Any


class LostWrites:
    """Compares bits around some gathers; calls `found` with the number of a parameter that was
    written."""

    def __init__(self, found: Callable[[int], None]) -> None:
        self._found = found
        self._gathers: dict[ShardedBucket, int] = {}
        self._before: dict[ShardedBucket, Tensor] = {}
        self._coming: deque[_Coming] = deque()

    def begin(self, bucket: ShardedBucket, flat: Tensor) -> None:
        """`bucket` is shown, whole in `flat`."""
        while self._coming and self._coming[0].event.query():
            self._tell_first()
        gathers = self._gathers[bucket] = self._gathers.get(bucket, 0) + 1
        if gathers <= FIRST or gathers % INTERVAL == 0:
            self._before[bucket] = _sums(bucket, flat)

    def end(self, bucket: ShardedBucket, flat: Tensor) -> None:
        """`bucket` goes to rest: compare its bits with those of before."""
        before = self._before.pop(bucket, None)
        if before is None:
            return
        differ = before != _sums(bucket, flat)
        if differ.device.type == "cpu" or self._gathers[bucket] <= FIRST:
            self._tell(bucket, differ.tolist())
        else:
            self._coming.append(_Coming(bucket, *start_to_host(differ)))

    def _tell(self, bucket: ShardedBucket, differ: Sequence[bool]) -> None:
        for slot, differs in zip(bucket.layout.slots, differ, strict=True):
            if differs:
                self._found(slot.parameter)

    def finish(self) -> None:
        """Wait for what has not come to the host yet: no gather may follow that would look."""
        while self._coming:
            if not self._coming[0].event.query():
                self._coming[0].event.synchronize()
            self._tell_first()

    def _tell_first(self) -> None:
        come = self._coming.popleft()
        self._tell(come.bucket, come.differ.tolist())

    def forget(self) -> None:
        """Those that may write, the optimizer or a block that is there for it, have written."""
        self._before.clear()


def _sums(bucket: ShardedBucket, flat: Tensor) -> Tensor:
    """By slot, the sum of the parameter's bits as integers, modulo 2^64."""
    sums = [total(flat[slot.start : slot.end]) for slot in bucket.layout.slots]
    return torch.stack(sums) if sums else torch.zeros(0)


CHUNK = 1 << 16
"""Elements that are weighed at once: copies of 512 KB. Of copies of 8 MB glibc kept 50 MB a rank,
with a model of 34M parameters."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their bytes."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, as a signed number."""


def integers(tensor: Tensor) -> Tensor:
    """The same memory as integers; of complex numbers two each, in a last dimension."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_INTEGERS[tensor.element_size()])


def total(tensor: Tensor) -> Tensor:
    """The sum of the bits as integers, modulo 2^64: quick, and blind to where they are.

    By chunks on the CPU, where torch copies what it sums as 64-bit integers: twice its bytes.
    """
    bits = integers(tensor)
    if bits.numel() <= CHUNK or bits.device.type != "cpu":
        return bits.sum()
    return torch.stack([part.sum() for part in torch.split(bits.reshape(-1), CHUNK)]).sum()


def fingerprint(tensor: Tensor) -> Tensor:
    """The same sum, each integer times a number that its place gives: another where elements are
    exchanged, or signs are turned."""
    flat = integers(tensor).reshape(-1)
    sums = [_weighed(part, CHUNK * number) for number, part in enumerate(torch.split(flat, CHUNK))]
    return torch.stack(sums).sum()


def _weighed(part: Tensor, start: int) -> Tensor:
    weights = torch.arange(start + 1, start + 1 + part.numel(), device=part.device).mul_(_ODD)
    weights.bitwise_xor_(weights >> 29).mul_(_ODD).bitwise_xor_(weights >> 32)
    return weights.mul_(part).sum()
