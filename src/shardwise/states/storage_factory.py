"""Where a state rests: makes the memory, or the room on a disk, for what a rank holds of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from shardwise.collectives import Collectives
from shardwise.placement import Tier
from shardwise.states.on_host import OnHost
from shardwise.states.storage import Held, InMemory, on_disk, record_bytes
from shardwise.tiers.copy_stream import Beside
from shardwise.tiers.nvme import Store

Kind = tuple[torch.dtype, torch.device]


class Shelf:
    """A tier for one state of one rank.

    On a rank that computes on the CPU, the tier `cpu` is where the device's memory is anyway.
    """

    def __init__(self, tier: Tier, group: Collectives) -> None:
        self.tier = tier
        self._group = group
        self._stores: list[Store] = []
        self._besides: dict[torch.device, Beside] = {}

    @property
    def is_device(self) -> bool:
        """Whether the state rests where it is used, as far as the tier says."""
        return self.tier.kind == "device"

    @property
    def on_disk(self) -> bool:
        """Whether what is held takes no memory."""
        return self.tier.kind == "nvme"

    def is_apart(self, device: torch.device) -> bool:
        """Whether what rests here and is used on `device` is in other memory than that device's."""
        return not self.is_device and device.type != "cpu"

    def beside(self, device: torch.device) -> Beside | None:
        """What copies between here and `device`, if that is apart."""
        if not self.is_apart(device):
            return None
        if device not in self._besides:
            self._besides[device] = Beside(device)
        return self._besides[device]

    def make(
        self, label: str, lengths: Sequence[int], kinds: Sequence[Kind], *, width: int = 1
    ) -> list[Held]:
        """Room for intervals of `lengths` elements, with anything in it.

        `width` of them are in use at a time. Raises TierError where a disk cannot take them.
        """
        if not self.on_disk:
            return [
                self._in_memory(length, *kind) for length, kind in zip(lengths, kinds, strict=True)
            ]
        dtypes = [dtype for dtype, _ in kinds]
        records = [
            size
            for length, dtype in zip(lengths, dtypes, strict=True)
            for size in record_bytes([length], dtype.itemsize)
        ]
        store = Store(
            Path(self.tier.folder),
            label,
            records,
            rank=self._group.rank,
            in_flight=3 * width + 1,
        )
        self._stores.append(store)
        besides = [self.beside(device) for _, device in kinds]
        return list(on_disk(store, lengths, dtypes, besides))

    def _in_memory(self, length: int, dtype: torch.dtype, device: torch.device) -> Held:
        beside = self.beside(device)
        if beside is None:
            return InMemory(self._group.allocate(length, dtype, device))
        return OnHost(beside.memory(length, dtype), beside)

    def drain(self) -> None:
        """Wait until everything that was changed is on its disk."""
        for store in self._stores:
            store.drain()

    def close(self) -> None:
        """Give room on disks back."""
        while self._stores:
            self._stores.pop().close()
