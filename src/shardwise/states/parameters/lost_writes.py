"""Detects writes into gathered parameters, which would be lost when the parameters are resharded.

A torch operation that writes to the parameter increments its version. A write through `.data`
changes only the values. The sum of each parameter's bits is therefore compared before and after
some gathers:

    gathers 1 ... FIRST        all, because most code that writes does so from the start
    later gathers              one in INTERVAL, so that a step costs little more

On an accelerator, the host waits only for the results of the first gathers. Later results are
copied to the host asynchronously, and a later gather checks them.
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
"""Odd, so that both gathers for forward passes and gathers for backward passes are compared."""


class _PendingResult(NamedTuple):
    """For each slot, whether its parameter was written. Valid once `event` has completed."""

    bucket: ShardedBucket
    differ: Tensor
    event: Any


class LostWrites:
    """Compares parameters' bits before and after some gathers.

    Calls `report` with the index of each parameter to which user code has written.
    """

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._gathers: dict[ShardedBucket, int] = {}
        self._before: dict[ShardedBucket, Tensor] = {}
        self._pending: deque[_PendingResult] = deque()

    def begin(self, bucket: ShardedBucket, flat: Tensor) -> None:
        """Sum the bits of `bucket`, just gathered into `flat`, if this gather should be checked."""
        while self._pending and self._pending[0].event.query():
            self._report_first()
        gathers = self._gathers[bucket] = self._gathers.get(bucket, 0) + 1
        if gathers <= FIRST or gathers % INTERVAL == 0:
            self._before[bucket] = _sums(bucket, flat)

    def end(self, bucket: ShardedBucket, flat: Tensor) -> None:
        """Compare the bits of `bucket`, about to be resharded, with the sums from `begin`."""
        before = self._before.pop(bucket, None)
        if before is None:
            return
        differ = before != _sums(bucket, flat)
        if differ.device.type == "cpu" or self._gathers[bucket] <= FIRST:
            self._report_written(bucket, differ.tolist())
        else:
            self._pending.append(_PendingResult(bucket, *start_to_host(differ)))

    def finish(self) -> None:
        """Wait for all pending results and report them, because no later gather may do so."""
        while self._pending:
            if not self._pending[0].event.query():
                self._pending[0].event.synchronize()
            self._report_first()

    def _report_first(self) -> None:
        result = self._pending.popleft()
        self._report_written(result.bucket, result.differ.tolist())

    def _report_written(self, bucket: ShardedBucket, differ: Sequence[bool]) -> None:
        for slot, differs in zip(bucket.layout.slots, differ, strict=True):
            if differs:
                self._report(slot.parameter)

    def forget(self) -> None:
        """Discard the sums so far, because the optimizer or user code was allowed to write."""
        self._before.clear()


def _sums(bucket: ShardedBucket, flat: Tensor) -> Tensor:
    """Return the sum of the bits of each slot's parameter, as integers modulo 2^64."""
    sums = [total(flat[slot.start : slot.end]) for slot in bucket.layout.slots]
    return torch.stack(sums) if sums else torch.zeros(0)


CHUNK = 1 << 16
"""Number of elements that are summed at once, in copies of 512 KB. With copies of 8 MB, glibc kept
50 MB per rank for a model of 34M parameters."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size in bytes -> integer dtype of that size."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, as a signed number."""


def integers(tensor: Tensor) -> Tensor:
    """View `tensor` as integers. A complex number becomes two, in an additional last dim."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_INTEGERS[tensor.element_size()])


def total(tensor: Tensor) -> Tensor:
    """Return the sum of the bits as integers, modulo 2^64. Fast, but blind to reordering."""
    bits = integers(tensor)
    # Sum in chunks on the CPU, because torch first copies the summands to 64-bit integers, which
    # take twice the memory.
    if bits.numel() <= CHUNK or bits.device.type != "cpu":
        return bits.sum()
    return torch.stack([part.sum() for part in torch.split(bits.reshape(-1), CHUNK)]).sum()


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum of the bits as integers, each multiplied by a hash of its position.

    The sum is modulo 2^64. Unlike `total`, it changes if elements are swapped or signs are flipped.
    """
    sums = []
    flat, start = integers(tensor).reshape(-1), 0
    for part in torch.split(flat, CHUNK):
        weights = torch.arange(start + 1, start + 1 + part.numel(), device=part.device).mul_(_ODD)
        # Mix the bits, as hash functions do. With weights linear in the position, changes at
        # several positions could cancel.
        weights.bitwise_xor_(weights >> 29).mul_(_ODD).bitwise_xor_(weights >> 32)
        sums.append(weights.mul_(part).sum())
        start += part.numel()
    return torch.stack(sums).sum()
