"""Storage in the host's memory of states that an accelerator computes with.

    gradients     sum ── down, beside backward ──▶ host
    update        on the CPU, bucket by bucket, each once its gradient has come down
    parameters    host ── up, while the next bucket is updated ──▶ device

Nothing else knows: a span that is taken is not in a copy any more, and a copy is ordered by whoever
asked for it.
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
    """Storage in `tensor`, pinned memory of the host. Its device is the CPU.

    `take` waits for copies to and from it that are under way.
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
        """`moving` are the events of copies, shared by all who use the same memory."""
        self.memory = tensor
        self.copy_stream = copy_stream
        self.spans = [(0, tensor.numel())] if spans is None else spans
        self.numel, self.dtype, self.device = tensor.numel(), tensor.dtype, tensor.device
        self._moving: list[Any] = [] if moving is None else moving

    def read_ahead(self, index: int) -> None:
        """No-op: the data is in memory, or a pending copy brings it."""

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Return the span, once no copy reads or writes it any more."""
        del fresh
        first, end = self.spans[index]
        return self._settled()[first:end]

    def put(self, index: int, *, changed: bool) -> None:
        """No-op: the data stays in memory."""

    def take_on(self, index: int, device: torch.device) -> Tensor:
        """A copy of the span on `device`; the memory itself for the host."""
        if device != self.copy_stream.device:
            return super().take_on(index, device)
        self._wait_here()
        first, end = self.spans[index]
        value = self.memory[first:end].to(device, non_blocking=True)
        self._moves(self.copy_stream.here())
        return value

    def loaded(self, device: torch.device | None = None) -> Tensor:
        """The memory itself; a copy on another device."""
        return self._settled() if device in (None, self.device) else super().loaded(device)

    def load(self, into: Tensor) -> None:
        """Copy the interval up on the present stream."""
        self._wait_here()
        into.copy_(self.memory, non_blocking=True)
        self._moves(self.copy_stream.here())

    def store(self, value: Tensor) -> None:
        """Copy the interval down on the present stream."""
        if not self.is_apart(value):
            super().store(value)
            return
        self._wait_here()
        self.memory.copy_(value, non_blocking=True)
        self._moves(self.copy_stream.here())

    def send(self, index: int, value: Tensor, into: Tensor) -> None:
        """Copy `value`, a span that was taken, up on the present stream."""
        del index
        if into.dtype != value.dtype and into.device != value.device:
            self.copy_stream.send_narrowed(value, into)  # here, so that less moves
            return
        into.copy_(value, non_blocking=True)
        self._moves(self.copy_stream.here())

    def add(self, part: Tensor, *, fresh: bool) -> tuple[Tensor, Handle]:
        """Add on the device, where `part` is and its squares are summed; then let the sum come
        down beside the work."""
        total = part
        if not fresh:
            total, came = self.copy_stream.up(self.memory, self._moving)
            self.copy_stream.await_(came)
            total.add_(part)
        left = self.copy_stream.down(total, self.memory, self._moving)
        self._moves(left)
        # `part` is the reducer's buffer: written again before `left`, the copy would be of that.
        return squared_sum(total), Handle(partial(self.copy_stream.await_, left))

    def cut(self, spans: Sequence[Span]) -> HostStorage:
        """The same memory, used in `spans`."""
        return HostStorage(self.memory, self.copy_stream, spans, self._moving)

    def widened(self) -> HostStorage:
        """Room for the same in fp32, with anything in it."""
        return HostStorage(self.copy_stream.memory(self.numel, torch.float32), self.copy_stream)

    @property
    def memory_bytes(self) -> int:
        """All of it."""
        return self.nbytes

    def _moves(self, event: Any) -> None:
        """Note a copy that is pending until `event`; forget those that have ended."""
        self._moving[:] = [other for other in self._moving if not other.query()]
        self._moving.append(event)

    def _wait_here(self) -> None:
        """Make the present stream wait for pending copies."""
        # A value must have arrived before it is copied up again, and a copy up must have read it
        # before it is overwritten.
        for event in self._moving:
            self.copy_stream.await_(event)

    def _settled(self) -> Tensor:
        while self._moving:
            self._moving.pop().synchronize()
        return self.memory


class HostCopy(Storage):
    """A copy on the host of what is in the accelerator's memory, for an update on the CPU.

    A span comes down for the time of its use. What is changed in it is forgotten.
    """

    def __init__(self, tensor: Tensor, copy_stream: CopyStream, spans: Sequence[Span]) -> None:
        self.source = tensor
        self.spans = spans
        self.numel, self.dtype, self.device = tensor.numel(), tensor.dtype, torch.device("cpu")
        self._copy_stream = copy_stream
        self._coming: dict[int, tuple[Tensor, Any]] = {}

    def read_ahead(self, index: int) -> None:
        """Let span `index` come down."""
        if index not in self._coming:
            first, end = self.spans[index]
            memory = self._copy_stream.memory(end - first, self.dtype)
            self._coming[index] = memory, self._copy_stream.down(self.source[first:end], memory)

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """A copy of span `index`, once it is here."""
        del fresh
        self.read_ahead(index)
        memory, came = self._coming[index]
        came.synchronize()
        return memory

    def put(self, index: int, *, changed: bool) -> None:
        """Forget the copy."""
        assert not changed, "what is here is a copy"
        del self._coming[index]

    @property
    def memory_bytes(self) -> int:
        """None of its own between steps."""
        return 0
