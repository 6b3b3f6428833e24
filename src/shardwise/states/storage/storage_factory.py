"""Creates the storage of a state on its tier: device memory, host memory, or a disk (NVMe)."""

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
    """Creates the storage of one state of one rank on `tier`.

    On a rank that computes on the CPU, the tier `cpu` is the device's own memory.
    """

    def __init__(self, tier: Tier, group: Collectives) -> None:
        self.tier = tier
        self._group = group
        self._stores: list[Store] = []
        self._copy_streams: dict[torch.device, CopyStream] = {}

    @property
    def is_device(self) -> bool:
        """True if the tier is the device's memory."""
        return self.tier.kind == "device"

    @property
    def on_disk(self) -> bool:
        """True if the tier is a disk, so that the state occupies no memory between steps."""
        return self.tier.kind == "nvme"

    def is_apart(self, device: torch.device) -> bool:
        """Return whether this tier's memory is separate from that of `device`."""
        return not self.is_device and device.type != "cpu"

    def copy_stream(self, device: torch.device) -> CopyStream | None:
        """Return the copy stream between this tier and `device`, or None if they share memory."""
        if not self.is_apart(device):
            return None
        if device not in self._copy_streams:
            self._copy_streams[device] = CopyStream(device)
        return self._copy_streams[device]

    def make(
        self, label: str, lengths: Sequence[int], kinds: Sequence[TensorKind], *, width: int = 1
    ) -> list[Storage]:
        """Create storage with arbitrary content for intervals of `lengths` elements.

        `width` is the number of intervals used at the same time. Raises TierError if there is too
        little space on the disk.
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
            # Per interval: one span in use, one being read and one being written. Plus one in
            # total.
            in_flight=3 * width + 1,
            pages=None if apart is None else apart.pages,
        )
        self._stores.append(store)
        return list(on_disk(store, lengths, dtypes, copy_streams))

    def _in_memory(self, lengths: Sequence[int], kinds: Sequence[TensorKind]) -> list[Storage]:
        storages: list[Storage | None] = [None] * len(kinds)
        # One kind at a time, because pinned memory is allocated in one block for all intervals of a
        # kind.
        for kind in dict.fromkeys(kinds):
            indices = [index for index, each in enumerate(kinds) if each == kind]
            for index, storage in zip(
                indices, self._of_kind([lengths[i] for i in indices], *kind), strict=True
            ):
                storages[index] = storage
        return [storage for storage in storages if storage is not None]

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
        """Free all disk space, even if closing a store fails. Then raise the first error."""
        failures = []
        # Pop first, so that a second `close` after an error does not try the same store again.
        while self._stores:
            try:
                self._stores.pop().close()
            except (RuntimeError, TierError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
