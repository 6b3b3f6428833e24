"""Makes the storage of a state on its tier: in memory, on the host, or on a disk (NVMe)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from shardwise.comm import Collectives
from shardwise.errors import TierError
from shardwise.layout.placement import Tier
from shardwise.states.storage.host_storage import HostStorage
from shardwise.states.storage.storage import MemoryStorage, Storage, on_disk, record_bytes
from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.nvme import Store

TensorKind = tuple[torch.dtype, torch.device]


class StorageFactory:
    """Makes storage for one state of one rank on `tier`.

    On a rank that computes on the CPU, the tier `cpu` is where the device's memory is anyway.
    """

    def __init__(self, tier: Tier, group: Collectives) -> None:
        self.tier = tier
        self._group = group
        self._stores: list[Store] = []
        self._copy_streams: dict[torch.device, CopyStream] = {}

    @property
    def is_device(self) -> bool:
        """Whether the state rests where it is used, as far as the tier says."""
        return self.tier.kind == "device"

    @property
    def on_disk(self) -> bool:
        """Whether the state takes no memory between steps."""
        return self.tier.kind == "nvme"

    def is_apart(self, device: torch.device) -> bool:
        """Whether what rests here and is used on `device` is in other memory than that device's."""
        return not self.is_device and device.type != "cpu"

    def copy_stream(self, device: torch.device) -> CopyStream | None:
        """What copies between here and `device`, if that is apart."""
        if not self.is_apart(device):
            return None
        if device not in self._copy_streams:
            self._copy_streams[device] = CopyStream(device)
        return self._copy_streams[device]

    def make(
        self, label: str, lengths: Sequence[int], kinds: Sequence[TensorKind], *, width: int = 1
    ) -> list[Storage]:
        """Storage for intervals of `lengths` elements, with anything in it.

        `width` of them are in use at a time. Raises TierError where a disk cannot take them.
        """
        if not self.on_disk:
            return self._in_memory(lengths, kinds)
        dtypes = [dtype for dtype, _ in kinds]
        records = [
            size
            for length, dtype in zip(lengths, dtypes, strict=True)
            for size in record_bytes([length], dtype.itemsize)
        ]
        copy_streams = [self.copy_stream(device) for _, device in kinds]
        apart = next((each for each in copy_streams if each is not None), None)
        store = Store(
            Path(self.tier.folder),
            label,
            records,
            rank=self._group.rank,
            # One span of each in use, one read ahead, one written behind; and one to spare.
            in_flight=3 * width + 1,
            pages=None if apart is None else apart.pages,
        )
        self._stores.append(store)
        return list(on_disk(store, lengths, dtypes, copy_streams))

    def _in_memory(self, lengths: Sequence[int], kinds: Sequence[TensorKind]) -> list[Storage]:
        made: list[Storage | None] = [None] * len(kinds)
        for kind in dict.fromkeys(kinds):
            indices = [index for index, each in enumerate(kinds) if each == kind]
            for index, storage in zip(
                indices, self._of_kind([lengths[i] for i in indices], *kind), strict=True
            ):
                made[index] = storage
        return [storage for storage in made if storage is not None]

    def _of_kind(
        self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Iterator[Storage]:
        copy_stream = self.copy_stream(device)
        if copy_stream is None:
            for length in lengths:
                yield MemoryStorage(self._group.allocate(length, dtype, device))
        else:
            for memory in copy_stream.memories(lengths, dtype):
                yield HostStorage(memory, copy_stream)

    def close(self) -> None:
        """Give room on disks back, all of it also where one has failed; raises the first error."""
        failures = []
        while self._stores:
            try:
                self._stores.pop().close()
            except (RuntimeError, TierError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
