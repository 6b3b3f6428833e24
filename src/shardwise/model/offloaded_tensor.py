"""Offloads one saved tensor and brings it back: to the host's memory, to a file, or by both.

accelerator, cpu      device -> pinned memory, and back, on a stream beside the work
accelerator, nvme     device -> pinned blocks -> file, and back, in threads beside the work
CPU, nvme             memory -> file, and back, in threads beside the work
CPU, cpu              the same place: nothing moves
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.device_spool import Coming, DeviceSpool
from shardwise.tiers.spool import Spool


class Offload(Protocol):
    """The offload of one tensor: its bytes leave, are away, or come back.

    The memory that it takes is freed with it.
    """

    def settle(self) -> None:
        """Wait until the source may be freed. Raises TierError where it cannot be."""

    def settled(self) -> bool:
        """Whether `settle` would return at once."""

    def fetch(self) -> None:
        """Start bringing the bytes back; they have settled."""

    def arrived(self) -> Tensor:
        """Wait for the bytes that `fetch` brings: 1-D, uint8, on the device they came from."""

    def drop(self) -> None:
        """Forget what `fetch` brought; it can be fetched again."""


class OffloadTarget(Protocol):
    """Where saved tensors are offloaded to."""

    def send(self, data: Tensor) -> Offload:
        """Start to offload `data` (1-D, uint8), which must stay as it is until that has settled."""


class DiskTarget:
    """Offloads tensors of the CPU to a spool on a disk."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def send(self, data: Tensor) -> Offload:
        return _DiskOffload(self._spool, data)


class _DiskOffload:
    def __init__(self, spool: Spool, data: Tensor) -> None:
        self._spool = spool
        self._record = spool.write(data)
        self._memory: Tensor | None = None

    def settle(self) -> None:
        self._record.wait()

    def settled(self) -> bool:
        return self._record.last.done()

    def fetch(self) -> None:
        self._memory = self._spool.read(self._record)

    def arrived(self) -> Tensor:
        self.settle()
        assert self._memory is not None
        return self._memory

    def drop(self) -> None:
        self._memory = None


class HostTarget:
    """Offloads tensors of an accelerator to pinned memory, on a copy stream beside the work."""

    def __init__(self, device: torch.device) -> None:
        self.copy_stream = CopyStream(device)

    def send(self, data: Tensor) -> Offload:
        return _HostOffload(self, data)

    def down(self, data: Tensor) -> tuple[Tensor, Any]:
        """Copy `data` to the host; the copy, and the event of its end."""
        memory = self.copy_stream.memory(data.numel(), data.dtype)
        return memory, self.copy_stream.down(data, memory)


class _HostOffload:
    def __init__(self, host: HostTarget, data: Tensor) -> None:
        self._host = host
        self._memory, self._left = host.down(data)
        self._back: tuple[Tensor, Any] | None = None

    def settle(self) -> None:
        self._left.synchronize()

    def settled(self) -> bool:
        return bool(self._left.query())

    def fetch(self) -> None:
        self._back = self._host.copy_stream.up(self._memory)

    def arrived(self) -> Tensor:
        assert self._back is not None
        data, event = self._back
        self._host.copy_stream.await_(event)
        self._host.copy_stream.used_here(data)  # another node, on its stream, may have fetched it
        return data

    def drop(self) -> None:
        self._back = None


class StagedDiskTarget:
    """Offloads tensors of an accelerator to a spool on a disk, by way of pinned blocks."""

    def __init__(self, spool: DeviceSpool) -> None:
        self._spool = spool

    def send(self, data: Tensor) -> Offload:
        return _StagedDiskOffload(self._spool, data)


class _StagedDiskOffload:
    def __init__(self, spool: DeviceSpool, data: Tensor) -> None:
        self._spool = spool
        self._record = spool.write(data)
        self._coming: Coming | None = None

    def settle(self) -> None:
        self._record.wait()

    def settled(self) -> bool:
        return self._record.last.done()

    def fetch(self) -> None:
        self._coming = self._spool.read(self._record)

    def arrived(self) -> Tensor:
        self.settle()
        assert self._coming is not None
        return self._coming.arrived()

    def drop(self) -> None:
        self._coming = None
