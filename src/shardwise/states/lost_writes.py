"""Detects writes into parameters while they are gathered for a forward, which would be lost.

A write by an operation on the parameter counts up its version; one through `.data` leaves no trace
but the values. So around some gathers sums of each parameter's bits are compared: around the first
ones of every bucket, since what a forward does it mostly does from the start, and then around one
in INTERVAL, so that it costs a step little. On an accelerator only around the first ones: there it
makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.states.sharded_bucket import ShardedBucket

FIRST = 9
INTERVAL = 31
"""Odd, so that the gathers for forwards and those for backwards take turns."""


class LostWrites:
    """Compares bits around some gathers; calls `found` with the number of a parameter that was
    written."""

    def __init__(self, found: Callable[[int], None]) -> None:
        self._found = found
        self._gathers: dict[ShardedBucket, int] = {}
        self._before: dict[ShardedBucket, list[int]] = {}

    def begin(self, bucket: ShardedBucket, flat: Tensor) -> None:
        """`bucket` is shown, whole in `flat`."""
        gathers = self._gathers[bucket] = self._gathers.get(bucket, 0) + 1
        on_host = flat.device.type == "cpu"
        if gathers <= FIRST or (on_host and gathers % INTERVAL == 0):
            self._before[bucket] = _sums(bucket, flat)

    def end(self, bucket: ShardedBucket, flat: Tensor) -> None:
        """`bucket` goes to rest: compare its bits with those of before."""
        before = self._before.pop(bucket, None)
        if before is not None:
            trios = zip(bucket.layout.slots, before, _sums(bucket, flat), strict=True)
            for slot, then, now in trios:
                if then != now:
                    self._found(slot.parameter)

    def forget(self) -> None:
        """Those that may write, the optimizer or a block that is there for it, have written."""
        self._before.clear()


def _sums(bucket: ShardedBucket, flat: Tensor) -> list[int]:
    """By slot, the sum of the parameter's bits as integers, modulo 2^64."""
    sums = [total(flat[slot.start : slot.end]) for slot in bucket.layout.slots]
    return torch.stack(sums).tolist() if sums else []


CHUNK = 1 << 20
"""Elements that are weighed at once."""

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
