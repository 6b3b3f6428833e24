"""Stores a bucket's interval between steps, in memory or on a disk.

If an accelerator uses a state in host memory, `host_storage.py` stores it.

Storage is used span by span. In memory there is a single span, the full interval. On a disk the
interval is split into several spans, only a few of which are in memory at a time:

    take(0)   use   put(0)
      read_ahead(1)      take(1)   use   put(1)      `put` writes asynchronously
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Handle
from shardwise.layout.bucket_layout import Span
from shardwise.states.storage.squared_sums import squared_sum
from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.nvme import BufferLease, Store

SPAN = 4 * 2**20
"""Number of elements in a span on a disk: enough to use the disk's full bandwidth, but small
compared with any model."""


class Storage(ABC):
    """Stores a bucket's interval. `spans` are relative to the start of the interval."""

    spans: Sequence[Span]
    numel: int
    dtype: torch.dtype
    device: torch.device
    """Device of a span while it is in use."""
    memory: Tensor | None = None
    """The full interval if it is always in memory, else None."""
    is_on_disk = False
    """True if reading a span waits for a disk."""
    is_derived = False
    """True if the values are those of another storage, so that checkpoints leave them out."""
    copy_stream: CopyStream | None = None
    """Runs copies between host memory and the accelerator. None if no copies are needed."""

    @abstractmethod
    def read_ahead(self, index: int) -> None:
        """Start reading span `index`, which the caller will `take` soon."""

    @abstractmethod
    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Return span `index`, of shape (elements of the span,), to read and modify until `put`.

        If `fresh` is true, the caller will overwrite the span: nothing is read, and the content is
        arbitrary.
        """

    @abstractmethod
    def put(self, index: int, *, changed: bool) -> None:
        """Release span `index`. If `changed` is true, store its new values."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Size in bytes of the memory that the storage occupies between steps."""

    def read_spans(self) -> Iterator[tuple[int, Tensor]]:
        """Yield pairs (first element, span). A span is valid until the next one is requested."""
        for index, (first, _) in enumerate(self.spans):
            yield first, self.take(index)
            self.put(index, changed=False)

    def take_on(self, index: int, device: torch.device) -> Tensor:
        """Return span `index` on `device`, to read until `put`."""
        return self.take(index).to(device)

    def load(self, into: Tensor) -> None:
        """Copy the full interval to `into`, a tensor of the same length, on the current stream."""
        for index, (first, end) in enumerate(self.spans):
            if index + 1 < len(self.spans):
                self.read_ahead(index + 1)
            into[first:end].copy_(self.take(index))
            self.put(index, changed=False)

    def store(self, value: Tensor) -> None:
        """Set the full interval to `value`."""
        for index, (first, end) in enumerate(self.spans):
            self.take(index, fresh=True).copy_(value[first:end])
            self.put(index, changed=True)

    def send(self, index: int, value: Tensor, into: Tensor) -> None:
        """Copy `value` to `into`, a span of another storage.

        `value` is span `index` of this storage, as returned by `take`.
        """
        del index
        into.copy_(value)

    def add(self, part: Tensor, *, fresh: bool) -> tuple[Tensor | None, Handle]:
        """Add `part`, of shape (numel of the interval,), to the stored values.

        If `fresh` is true, `part` replaces them. Returns the sum of squares of the result (None if
        the storage does not compute it), and a handle whose `reusable` returns once `part` may be
        overwritten.
        """
        # Square the values now, because reading the disk again for the gradient norm would cost
        # more.
        squares = []
        for index, (first, end) in enumerate(self.spans):
            value = self.take(index, fresh=fresh)
            # Overwrite instead of adding to zeros, which saves clearing the storage after every
            # step.
            if fresh:
                value.copy_(part[first:end])
            else:
                value.add_(part[first:end].to(value.device))
            squares.append(squared_sum(value))
            self.put(index, changed=True)
        return torch.stack(squares).sum() if squares else None, Handle()

    def cut(self, spans: Sequence[Span]) -> Storage:
        """Return a view of this storage with the spans `spans`."""
        assert list(self.spans) == list(spans), "all spans on a disk are cut in the same way"
        return self

    def widened(self) -> Storage:
        """Return storage in fp32 with the same values."""
        raise AssertionError("a disk keeps 16-bit sums in fp32 from the start")

    def loaded(self, device: torch.device | None = None) -> Tensor:
        """Return the full interval, on `device` if given.

        The result may be the stored tensor itself, if that is on the right device.
        """
        value = torch.empty(self.numel, dtype=self.dtype, device=device or self.device)
        self.load(value)
        return value

    def is_apart(self, other: Tensor) -> bool:
        """Return whether copies between this storage and `other` are asynchronous.

        They are asynchronous if `other` is on the accelerator and this storage is not.
        """
        return self.copy_stream is not None and other.device == self.copy_stream.device

    @property
    def nbytes(self) -> int:
        """Size of the interval in bytes, in memory or on the disk."""
        return self.numel * self.dtype.itemsize


class MemoryStorage(Storage):
    """Storage in memory. It has one span, unless it is updated together with storage on a disk."""

    def __init__(self, tensor: Tensor, spans: Sequence[Span] | None = None) -> None:
        self.tensor = self.memory = tensor
        self.spans = [(0, tensor.numel())] if spans is None else spans
        self.numel, self.dtype, self.device = tensor.numel(), tensor.dtype, tensor.device

    def read_ahead(self, index: int) -> None:
        """No-op: the data is already in memory."""

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Return a view of span `index`."""
        del fresh
        first, end = self.spans[index]
        return self.tensor[first:end]

    def put(self, index: int, *, changed: bool) -> None:
        """No-op: the data stays in memory."""

    def add(self, part: Tensor, *, fresh: bool) -> tuple[Tensor | None, Handle]:
        """Add `part` in one call. Return None for the sum of squares, which is computed later."""
        # In memory the norm can be computed later, and costs nothing if it is skipped.
        if fresh:
            self.tensor.copy_(part)
        else:
            self.tensor.add_(part)
        return None, Handle()

    def cut(self, spans: Sequence[Span]) -> MemoryStorage:
        """Return storage in the same memory, with the spans `spans`."""
        return MemoryStorage(self.tensor, spans)

    def widened(self) -> MemoryStorage:
        """Return storage in fp32 with the same values: a copy, or itself if already in fp32."""
        return MemoryStorage(self.tensor.float())

    def loaded(self, device: torch.device | None = None) -> Tensor:
        """Return the tensor itself, or a copy on a different device."""
        return self.tensor if device is None else self.tensor.to(device)

    @property
    def memory_bytes(self) -> int:
        """Size of the full interval in bytes."""
        return self.nbytes


class DiskStorage(Storage):
    """Storage on a disk. Its spans are consecutive records of `store`, starting with `first`.

    With a copy stream, the store's buffers are in pinned memory, and copies between them and the
    accelerator are asynchronous. The host waits only for disk reads. The disk's threads wait for
    copies before they write or reuse a buffer.
    """

    is_on_disk = True

    def __init__(
        self,
        store: Store,
        first: int,
        numel: int,
        dtype: torch.dtype,
        copy_stream: CopyStream | None,
    ) -> None:
        self.copy_stream = copy_stream
        self._store = store
        self._first = first
        self.spans = spans_of(numel)
        self.numel, self.dtype, self.device = numel, dtype, torch.device("cpu")
        self._leases: dict[int, BufferLease] = {}

    def read_ahead(self, index: int) -> None:
        if index not in self._leases:
            self._leases[index] = self._store.read(self._first + index)

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Wait until span `index` has been read, and return it."""
        if index not in self._leases:
            start = self._store.blank if fresh else self._store.read
            self._leases[index] = start(self._first + index)
        return self._leases[index].wait().view(self.dtype)

    def put(self, index: int, *, changed: bool) -> None:
        """Release span `index`. If it changed, write it back asynchronously."""
        lease = self._leases.pop(index)
        # Both calls end the lease. Another record may get the buffer, so no view of it may be used.
        if changed:
            lease.write()
        else:
            lease.give_back()

    def take_on(self, index: int, device: torch.device) -> Tensor:
        """Wait until span `index` has been read, and return a copy on `device`."""
        if self.copy_stream is None or device != self.copy_stream.device:
            return super().take_on(index, device)
        # A lease that was just read has no earlier copies to wait for.
        value = self._taken(index).to(device, non_blocking=True)
        self._leases[index].add_copy(self.copy_stream.here())
        return value

    def load(self, into: Tensor) -> None:
        """Copy the interval to `into` on the current stream, reading one span at a time."""
        # Copies within host memory are not asynchronous.
        if not self.is_apart(into):
            super().load(into)
            return
        for index, (first, end) in enumerate(self.spans):
            if index + 1 < len(self.spans):
                self.read_ahead(index + 1)
            with self._copying(index, changed=False) as memory:
                into[first:end].copy_(memory, non_blocking=True)

    def store(self, value: Tensor) -> None:
        """Copy `value` to the host on the current stream, and write it to the disk."""
        if not self.is_apart(value):
            super().store(value)
            return
        for index, (first, end) in enumerate(self.spans):
            with self._copying(index, fresh=True, changed=True) as memory:
                memory.copy_(value[first:end], non_blocking=True)

    def send(self, index: int, value: Tensor, into: Tensor) -> None:
        """Copy `value` to `into`, a span of another storage.

        `value` is span `index` of this storage, as returned by `take`. If `into` is on the
        accelerator, the copy runs on the current stream.
        """
        if self.copy_stream is None or not self.is_apart(into):
            into.copy_(value)
        elif into.dtype != value.dtype:
            self.copy_stream.send_narrowed(value, into)
        else:
            into.copy_(value, non_blocking=True)
            self._leases[index].add_copy(self.copy_stream.here())

    def add(self, part: Tensor, *, fresh: bool) -> tuple[Tensor | None, Handle]:
        """Add `part` on its device, and start writing the sum to the disk. See `Storage.add`."""
        if not self.is_apart(part):
            return super().add(part, fresh=fresh)
        squares, read = [], Handle()
        for index, (first, end) in enumerate(self.spans):
            if not fresh and index + 1 < len(self.spans):
                self.read_ahead(index + 1)
            total, left = self._add(index, part[first:end], fresh=fresh)
            assert self.copy_stream is not None
            # A single stream runs all copies in order, so the last event covers all of them.
            read = Handle(partial(self.copy_stream.await_, left))
            squares.append(squared_sum(total))
        return torch.stack(squares).sum() if squares else None, read

    def _add(self, index: int, part: Tensor, *, fresh: bool) -> tuple[Tensor, Any]:
        """Add `part` to span `index`. Return the sum, and the event of its copy to the host."""
        copy_stream = self.copy_stream
        assert copy_stream is not None
        memory, lease = self._taken(index, fresh=fresh), self._leases[index]
        # Work on the device, which adds and squares faster than the host.
        if fresh:
            total = part.to(self.dtype)
        else:
            total, came = copy_stream.up(memory, lease.copies)
            copy_stream.await_(came)
            total.add_(part)
        left = copy_stream.down(total, memory, lease.copies)
        lease.add_copy(left)
        self.put(index, changed=True)
        return total, left

    def _taken(self, index: int, *, fresh: bool = False) -> Tensor:
        """Return span `index` once it has been read from the disk. Copies may still be pending."""
        if index not in self._leases:
            start = self._store.blank if fresh else self._store.read
            self._leases[index] = start(self._first + index)
        return self._leases[index].wait_for_disk().view(self.dtype)

    @contextmanager
    def _copying(self, index: int, *, fresh: bool = False, changed: bool) -> Iterator[Tensor]:
        """Context manager for a copy to or from span `index` on the current stream."""
        assert self.copy_stream is not None
        memory = self._taken(index, fresh=fresh)
        # An earlier copy may have run on a different stream, so order this copy after it.
        for event in self._leases[index].copies:
            self.copy_stream.await_(event)
        yield memory
        self._leases[index].add_copy(self.copy_stream.here())
        self.put(index, changed=changed)

    @property
    def memory_bytes(self) -> int:
        """Always 0, because all intervals share the store's few buffers."""
        return 0


def spans_of(numel: int) -> list[Span]:
    """Split `numel` elements into the spans used on a disk."""
    return [(first, min(first + SPAN, numel)) for first in range(0, numel, SPAN)]


def record_bytes(numels: Sequence[int], itemsize: int) -> list[int]:
    """Return the sizes in bytes of the records that store intervals of `numels` elements."""
    return [(end - first) * itemsize for numel in numels for first, end in spans_of(numel)]


def in_spans(storage: Storage, spans: Sequence[Span]) -> Storage:
    """Return a view of `storage` with the spans `spans`, or `storage` if it already has them."""
    return storage if list(storage.spans) == list(spans) else storage.cut(spans)


def on_disk(
    store: Store,
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    copy_streams: Sequence[CopyStream | None],
) -> list[DiskStorage]:
    """Return one storage in `store` for each interval, in order.

    `store` must have been created with the records of these intervals (`record_bytes`).
    """
    storages, first = [], 0
    for numel, dtype, copy_stream in zip(numels, dtypes, copy_streams, strict=True):
        storages.append(DiskStorage(store, first, numel, dtype, copy_stream))
        first += len(storages[-1].spans)
    return storages
