"""How the bytes of one saved tensor leave the device and come back: to memory, to a file, or both.

accelerator, cpu      device -> pinned memory, and back, on a stream beside the work
accelerator, nvme     device -> pinned memory -> file; pinned memory is read ahead of need
CPU, nvme             memory -> file, and back, in threads beside the work
CPU, cpu              the same place: nothing moves
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.tiers.copy_stream import Beside
from shardwise.tiers.spool import Spool


class Parcel(Protocol):
    """Bytes on their way out, away, or on their way back. What it holds is freed with it."""

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


class Place(Protocol):
    """Where parcels go."""

    def send(self, data: Tensor) -> Parcel:
        """Start moving `data` (1-D, uint8) off; it stays as it is until the parcel has settled."""


class Disk:
    """A spool, for tensors of the CPU."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def send(self, data: Tensor) -> Parcel:
        return _OnDisk(self._spool, data)


class _OnDisk:
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


class Host:
    """Pinned memory, for tensors of an accelerator; copies run on a stream beside the work."""

    def __init__(self, device: torch.device) -> None:
        self.beside = Beside(device)

    def send(self, data: Tensor) -> Parcel:
        return _OnHost(self, data)

    def down(self, data: Tensor) -> tuple[Tensor, Any]:
        """Copy `data` to the host; the copy, and the event of its end."""
        memory = self.beside.memory(data.numel(), data.dtype)
        return memory, self.beside.down(data, memory)


class _OnHost:
    def __init__(self, host: Host, data: Tensor) -> None:
        self._host = host
        self._memory, self._left = host.down(data)
        self._back: tuple[Tensor, Any] | None = None

    def settle(self) -> None:
        self._left.synchronize()

    def settled(self) -> bool:
        return bool(self._left.query())

    def fetch(self) -> None:
        self._back = self._host.beside.up(self._memory)

    def arrived(self) -> Tensor:
        assert self._back is not None
        data, event = self._back
        self._host.beside.await_(event)
        return data

    def drop(self) -> None:
        self._back = None


class DiskBehindHost:
    """A spool, for tensors of an accelerator."""

    def __init__(self, host: Host, spool: Spool) -> None:
        self._host = host
        self._spool = spool

    def send(self, data: Tensor) -> Parcel:
        return _BehindHost(self._host, self._spool, data)


class _BehindHost(_OnDisk):
    def __init__(self, host: Host, spool: Spool, data: Tensor) -> None:
        self._host = host
        self._spool = spool
        self._memory = None
        memory, left = host.down(data)
        self._left = left
        self._record = spool.write(memory, ready=left.synchronize)

    def arrived(self) -> Tensor:
        data, event = self._host.beside.up(super().arrived())
        self._host.beside.await_(event)
        return data
