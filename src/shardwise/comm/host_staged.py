"""Transport for ranks that share a GPU. It sends tensors through host memory.

Every collective copies its tensors to the host, runs there, and copies the result back:

    launch   device -> host; the inner collective starts
    wait     the inner collective ends; host -> device, on the current stream

A launch waits for the device, so collectives do not overlap with the backward pass. This transport
is meant for tests and experiments with several ranks per accelerator, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.comm.base import Collectives, Cuts, Handle, interval
from shardwise.comm.ordered_sums import PLAIN, Sum


class HostStaged(Collectives):
    """Sends tensors on `device` over the CPU transport `inner`, through host memory.

    Tensors on other devices are passed to `inner` unchanged. `gather_rows` uses vectors on the CPU.
    """

    def __init__(self, inner: Collectives, device: torch.device) -> None:
        super().__init__(inner.rank, inner.size, inner.status_server)
        self.name = f"{inner.name} through the host"
        self.inner = inner
        self.device = device

    def all_reduce(self, buffer: Tensor, how: Sum = PLAIN) -> Handle:
        if self._is_for_inner(buffer):
            return self.inner.all_reduce(buffer, how)
        host = self._down(buffer)
        handle = self.inner.all_reduce(host, how)
        return _then(handle, lambda: _up(host, buffer))

    def reduce_scatter(
        self, buffer: Tensor, cuts: Cuts, how: Sum = PLAIN, *, into: Tensor | None = None
    ) -> Handle:
        if self._is_for_inner(buffer):
            return self.inner.reduce_scatter(buffer, cuts, how, into=into)
        host, target = self._down(buffer), interval(buffer, cuts, self.rank)
        handle = self.inner.reduce_scatter(host, cuts, how)
        own = interval(host, cuts, self.rank)
        return _then(handle, lambda: _up(own, target if into is None else into))

    def all_gather(self, buffer: Tensor, cuts: Cuts) -> Handle:
        if self._is_for_inner(buffer):
            return self.inner.all_gather(buffer, cuts)
        host = self._blank(buffer)
        interval(host, cuts, self.rank).copy_(interval(buffer, cuts, self.rank))
        handle = self.inner.all_gather(host, cuts)
        first, end = cuts[self.rank], cuts[self.rank + 1]

        # Skip this rank's interval: its values are already correct, and the device may be reading
        # it.
        def copy_back() -> None:
            _up(host[:first], buffer[:first])
            _up(host[end:], buffer[end:])

        return _then(handle, copy_back)

    def broadcast(self, buffer: Tensor, source: int = 0) -> Handle:
        if self._is_for_inner(buffer):
            return self.inner.broadcast(buffer, source)
        host = self._down(buffer) if self.rank == source else self._blank(buffer)
        handle = self.inner.broadcast(host, source)
        return handle if self.rank == source else _then(handle, lambda: _up(host, buffer))

    def gather_rows(self, row: Tensor) -> Tensor:
        return self.inner.gather_rows(row.cpu()).to(row.device)

    def barrier(self) -> None:
        self.inner.barrier()

    def second_group(self) -> Collectives:
        return HostStaged(self.inner.second_group(), self.device)

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        return HostStaged(self.inner.split(groups), self.device)

    @property
    def small_device(self) -> torch.device:
        return self.inner.small_device

    def close(self) -> None:
        self.inner.close()

    def _is_for_inner(self, buffer: Tensor) -> bool:
        return buffer.device.type != self.device.type

    def _blank(self, buffer: Tensor) -> Tensor:
        pinned = self.device.type != "cpu"  # tests use the CPU in place of a GPU
        return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=pinned)

    def _down(self, buffer: Tensor) -> Tensor:
        return self._blank(buffer).copy_(buffer)


def _then(handle: Handle, copy_back: Callable[[], None]) -> Handle:
    """Return a handle that runs `copy_back` after `handle` completes."""

    def finish() -> None:
        handle.wait()
        copy_back()

    return Handle(finish, handle.advance)


def _up(host: Tensor, device: Tensor) -> None:
    # The caller may free `host` immediately, because torch reuses pinned memory only after the
    # copy.
    device.copy_(host, non_blocking=True)
