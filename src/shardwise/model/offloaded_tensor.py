"""Offloads a saved tensor to host memory or to a file, and copies it back.

accelerator, cpu      device -> pinned memory, and back, on a separate stream
accelerator, nvme     device -> pinned blocks -> file, and back, in separate threads
CPU, nvme             memory -> file, and back, in separate threads
CPU, cpu              the same memory: nothing is moved
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.device_spool import Coming, DeviceSpool
from shardwise.tiers.spool import Spool


class Offload(Protocol):
    """Interface of an offloaded tensor that is being copied out, stored, or being copied back.

    Its memory is freed together with this object.
    """

    def settle(self) -> None:
        """Wait until the source may be freed. Raises TierError if the copy failed."""

    def settled(self) -> bool:
        """Return whether `settle` would return immediately."""

    def fetch(self) -> None:
        """Start copying the bytes back. Call this only after `settle`."""

    def arrived(self) -> Tensor:
        """Wait for `fetch` to complete. Return the bytes (1-D, uint8) on their original device."""

    def drop(self) -> None:
        """Free the memory of the fetched copy. `fetch` may be called again."""


class OffloadTarget(Protocol):
    """Interface of a destination for offloaded tensors."""

    def send(self, data: Tensor) -> Offload:
        """Start offloading `data` (1-D, uint8), which must not change before `settle` returns."""


class DiskTarget:
    """Offloads CPU tensors to a spool on disk."""

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
    """Offloads accelerator tensors to pinned memory, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.copy_stream = CopyStream(device)

    def send(self, data: Tensor) -> Offload:
        return _HostOffload(self, data)

    def down(self, data: Tensor) -> tuple[Tensor, Any]:
        """Start copying `data` to the host. Return the copy, and an event that marks completion."""
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
        self._host.copy_stream.used_here(data)  # a different stream may have fetched it
        return data

    def drop(self) -> None:
        self._back = None


class StagedDiskTarget:
    """Offloads accelerator tensors to a spool on disk, through pinned blocks."""

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
