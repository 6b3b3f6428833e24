"""Finds writes into parameters while they are gathered for a forward, which would be lost.

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

from shardwise.states.bit_sums import total
from shardwise.states.sharded_bucket import Slab

FIRST = 9
INTERVAL = 31
"""Odd, so that the gathers for forwards and those for backwards take turns."""


class PassingWrites:
    """Looks at some gathers; `found` is called with the number of a parameter that was written."""

    def __init__(self, found: Callable[[int], None]) -> None:
        self._found = found
        self._gathers: dict[Slab, int] = {}
        self._before: dict[Slab, list[int]] = {}

    def begin(self, slab: Slab, flat: Tensor) -> None:
        """The bucket `slab` is shown, whole in `flat`."""
        gathers = self._gathers[slab] = self._gathers.get(slab, 0) + 1
        on_host = flat.device.type == "cpu"
        if gathers <= FIRST or (on_host and gathers % INTERVAL == 0):
            self._before[slab] = _sums(slab, flat)

    def end(self, slab: Slab, flat: Tensor) -> None:
        """It goes to rest."""
        before = self._before.pop(slab, None)
        if before is not None:
            trios = zip(slab.bucket.slots, before, _sums(slab, flat), strict=True)
            for slot, then, now in trios:
                if then != now:
                    self._found(slot.parameter)

    def forget(self) -> None:
        """Those that may write, the optimizer or a block that is there for it, have written."""
        self._before.clear()


def _sums(slab: Slab, flat: Tensor) -> list[int]:
    """By slot, the sum of the parameter's bits as integers, modulo 2^64."""
    sums = [total(flat[slot.start : slot.end]) for slot in slab.bucket.slots]
    return torch.stack(sums).tolist() if sums else []
