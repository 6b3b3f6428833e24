"""Stores a state in host memory if an accelerator uses it.

    gradients     device ── copied down in parallel with backward ──▶ host
    update        on the CPU, bucket by bucket, each once its gradient is on the host
    parameters    host ── copied up while the next bucket is updated ──▶ device

Callers need not keep track of copies: `take` waits for pending ones, and every method that starts
a copy orders it after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Handle
from shardwise.layout.bucket_layout import Span
from shardwise.states.storage.squared_sums import squared_sum
from shardwise.states.storage.storage import Storage
from shardwise.tiers.copy_stream import CopyStream


class HostStorage(Storage):
    """Storage in pinned host memory, `tensor`. Its spans are used on the CPU.

    `moving` holds the events of pending copies, shared by all storages in the same memory.
    """

    memory: Tensor
    copy_stream: CopyStream

    def __init__(
        self,
        tensor: Tensor,
        copy_stream: CopyStream,
        spans: Sequence[Span] | None = None,
        moving: list[Any] | None = None,
    ) -> None:
        self.memory = tensor
        self.copy_stream = copy_stream
        self.spans = [(0, tensor.numel())] if spans is None else spans
        self.numel, self.dtype, self.device = tensor.numel(), tensor.dtype, tensor.device
        self._moving: list[Any] = [] if moving is None else moving

    def read_ahead(self, index: int) -> None:
        """No-op: the data is already in memory, or is being copied there."""

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Wait until no copy reads or writes the span, and return it."""
        del fresh
        first, end = self.spans[index]
        return self._settled()[first:end]

    def put(self, index: int, *, changed: bool) -> None:
        """No-op: the data stays in memory."""

    def take_on(self, index: int, device: torch.device) -> Tensor:
        """Return span `index` on `device`: a copy or, on the CPU, the memory itself."""
        if device != self.copy_stream.device:
            return super().take_on(index, device)
        self._wait_here()
        first, end = self.spans[index]
        value = self.memory[first:end].to(device, non_blocking=True)
        self._moves(self.copy_stream.here())
        return value

    def loaded(self, device: torch.device | None = None) -> Tensor:
        """Return the memory itself, or a copy on a different device."""
        return self._settled() if device in (None, self.device) else super().loaded(device)

    def load(self, into: Tensor) -> None:
        """Copy the interval to the device on the current stream."""
        self._wait_here()
        into.copy_(self.memory, non_blocking=True)
        self._moves(self.copy_stream.here())

    def store(self, value: Tensor) -> None:
        """Copy the interval to the host on the current stream."""
        if not self.is_apart(value):
            super().store(value)
            return
        self._wait_here()
        self.memory.copy_(value, non_blocking=True)
        self._moves(self.copy_stream.here())

    def send(self, index: int, value: Tensor, into: Tensor) -> None:
        """Copy `value`, as returned by `take`, to device tensor `into` on the current stream."""
        del index
        if into.dtype != value.dtype and into.device != value.device:
            self.copy_stream.send_narrowed(value, into)  # cast on the host, to copy fewer bytes
            return
        into.copy_(value, non_blocking=True)
        self._moves(self.copy_stream.here())

    def add(self, part: Tensor, *, fresh: bool) -> tuple[Tensor, Handle]:
        """Add `part` to the stored values, on the accelerator. Start copying the sum to the host.

        If `fresh` is true, `part` replaces them. Returns the sum of squares of the result, and a
        handle whose `reusable` returns once `part` may be overwritten.
        """
        total = part
        # Add on the device: the host is slower, and would have to wait for `part`.
        if not fresh:
            total, came = self.copy_stream.up(self.memory, self._moving)
            self.copy_stream.await_(came)
            total.add_(part)
        left = self.copy_stream.down(total, self.memory, self._moving)
        self._moves(left)
        # `part` is in a borrowed buffer. If that buffer were overwritten before the event `left`,
        # the host would receive the new content.
        return squared_sum(total), Handle(partial(self.copy_stream.await_, left))

    def cut(self, spans: Sequence[Span]) -> HostStorage:
        """Return storage in the same memory, with the spans `spans`."""
        return HostStorage(self.memory, self.copy_stream, spans, self._moving)

    def widened(self) -> HostStorage:
        return HostStorage(self.copy_stream.memory(self.numel, torch.float32), self.copy_stream)

    @property
    def memory_bytes(self) -> int:
        """Size of the full interval in bytes."""
        return self.nbytes

    def _moves(self, event: Any) -> None:
        """Add a pending copy, which completes with `event`, and remove completed ones."""
        self._moving[:] = [other for other in self._moving if not other.query()]
        self._moving.append(event)

    def _wait_here(self) -> None:
        """Make the current stream wait for pending copies."""
        # A value must have reached the host before it is copied back to the device. A copy to the
        # device must have read a value before it is overwritten.
        for event in self._moving:
            self.copy_stream.await_(event)

    def _settled(self) -> Tensor:
        """Block the host until no copy is pending, and return the memory."""
        while self._moving:
            self._moving.pop().synchronize()
        return self.memory


class HostCopy(Storage):
    """A temporary copy of accelerator memory on the host, for an update on the CPU.

    A span is copied to the host only while it is in use. Changes to the copy are lost.
    """

    def __init__(self, tensor: Tensor, copy_stream: CopyStream, spans: Sequence[Span]) -> None:
        self.source = tensor
        self.spans = spans
        self.numel, self.dtype, self.device = tensor.numel(), tensor.dtype, torch.device("cpu")
        self._copy_stream = copy_stream
        self._copies: dict[int, tuple[Tensor, Any]] = {}
        """Span index -> copy, and the event that marks its completion."""

    def read_ahead(self, index: int) -> None:
        """Start copying span `index` to the host."""
        if index not in self._copies:
            first, end = self.spans[index]
            memory = self._copy_stream.memory(end - first, self.dtype)
            self._copies[index] = memory, self._copy_stream.down(self.source[first:end], memory)

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Wait for the copy of span `index`, and return it."""
        del fresh
        self.read_ahead(index)
        memory, event = self._copies[index]
        event.synchronize()
        return memory

    def put(self, index: int, *, changed: bool) -> None:
        """Free the copy of span `index`."""
        assert not changed, "changes to a copy would be lost"
        del self._copies[index]

    @property
    def memory_bytes(self) -> int:
        """Always 0, because copies exist only during an update."""
        return 0
