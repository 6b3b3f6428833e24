"""Copies between a device and host memory, on two streams in parallel with compute.

    current stream   compute ── compute ────── compute ── compute
                            ╲ from_here              ╱ await_
    stream up                ╲── copy ── copy ──────╱               host to device
    stream down               ╲── copy ── copy ── ...               device to host

An accelerator has a copy engine for each direction. With a single stream, a copy to the device
would wait for all earlier copies to the host. If a copy must follow one in the other direction, for
example of the same memory, it gets the events that it must wait for.

The current stream is the one on which PyTorch queues work of the calling thread. If the host itself
needs the result of a copy, it waits for the copy's event with `event.synchronize()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardwise.tiers.host_memory import PAGE, mapped, padded
from shardwise.tiers.staging import StagingRing

BLOCKS = 2
"""Blocks of a ring: one in a copy, and one in use."""


class CopyStream:
    """The two streams for copies from and to `device`, an accelerator.

    Tests may use the CPU as the device. Its streams run everything immediately, and no memory is
    pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: ModuleType = torch.get_device_module(device)
        self._up, self._down = (self._streams.Stream(device) for _ in range(2))
        self._narrowing: StagingRing | None = None

    def memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate pinned host memory, (numel,), with arbitrary content."""
        return torch.empty(numel, dtype=dtype, pin_memory=self.device.type != "cpu")

    def memories(self, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Allocate pinned host memory for many tensors of the same lifetime, in a few blocks."""
        sizes, places = packed([numel * dtype.itemsize for numel in numels])
        blocks = [self.memory(size // dtype.itemsize, dtype) for size in sizes]
        starts = [(blocks[index], first // dtype.itemsize) for index, first in places]
        return [
            block[start : start + numel]
            for (block, start), numel in zip(starts, numels, strict=True)
        ]

    def pages(self, nbytes: int, count: int) -> list[Tensor]:
        """Allocate `count` tensors of `nbytes` (uint8, whole pages), each starting on a page.

        They are pinned, and suitable for direct transfers of a file as well.
        """
        sizes, places = packed([nbytes] * count)
        blocks = [self._on_a_page(size) for size in sizes]
        return [blocks[index][first : first + nbytes] for index, first in places]

    def ring(self, nbytes: int) -> StagingRing:
        """Return a ring of blocks of `nbytes`, made by `pages`."""
        return StagingRing(self.pages(padded(nbytes), BLOCKS))

    def _on_a_page(self, nbytes: int) -> Tensor:
        if self.device.type == "cpu":
            return mapped(nbytes)
        block = self.memory(nbytes, torch.uint8)
        if block.data_ptr() % PAGE:  # with no known driver, but nothing promises the alignment
            block = self.memory(nbytes + PAGE, torch.uint8)
            block = block[-block.data_ptr() % PAGE :][:nbytes]
        return block

    def from_here(self) -> AbstractContextManager[None]:
        """Return a context manager that makes the stream up the current one, in any thread.

        Work that is queued inside starts after all work that is on the current stream now.
        """
        return self._entered(self._up, [self.here()])

    @contextmanager
    def _entered(self, stream: Any, after: Iterable[Any]) -> Iterator[None]:
        # A new thread has device 0 selected. On leaving, `stream` alone would restore that device's
        # stream, which creates a CUDA context: every rank would have one on the host's first GPU.
        is_cpu = self.device.type == "cpu"
        scope = nullcontext() if is_cpu else self._streams.device(self.device)
        with scope, self._streams.stream(stream):
            for event in after:
                stream.wait_event(event)
            yield

    def here(self) -> Any:
        """Return an event after all work that is on the current stream now."""
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event

    def await_(self, event: Any) -> None:
        """Make the current stream wait for `event`, but not the host."""
        self._streams.current_stream(self.device).wait_event(event)

    def down(self, data: Tensor, memory: Tensor, after: Iterable[Any] = ()) -> Any:
        """Start to copy `data` to host `memory`, both (numel,); return the event of the copy's end.

        The copy waits for the work on the current stream and for the events `after`. Until it has
        ended, `data` may be freed but not written, and `memory` must not be touched.
        """
        event = self.start_down(data, memory, [self.here(), *after])
        self.hold(data, self._down)
        return event

    def up(self, memory: Tensor, after: Iterable[Any] = ()) -> tuple[Tensor, Any]:
        """Start to copy host `memory`, (numel,), to the device, after the events `after`.

        Returns the copy and the event of its end.
        """
        data, ready = self.room(memory.numel(), memory.dtype)
        return data, self.start_up(memory, data, [ready, *after])

    def room(self, numel: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Any]:
        """Allocate device memory for a copy up, and return it with the event that makes it usable.

        It may be freed before the copy has ended.
        """
        # The allocator may return memory that work on the current stream still uses.
        data = torch.empty(numel, dtype=dtype, device=self.device)
        self.hold(data, self._up)
        return data, self.here()

    def start_down(self, data: Tensor, memory: Tensor, after: Iterable[Any]) -> Any:
        """Start a copy as `down` does, but after the events `after` only, and from any thread.

        `data` must not be freed before the copy has ended.
        """
        return self._copy(self._down, data, memory, after)

    def start_up(self, memory: Tensor, data: Tensor, after: Iterable[Any]) -> Any:
        """Start to copy host `memory` to `data`, after the events `after` only."""
        return self._copy(self._up, memory, data, after)

    def _copy(self, stream: Any, source: Tensor, target: Tensor, after: Iterable[Any]) -> Any:
        with self._entered(stream, after):
            target.copy_(source, non_blocking=True)
            return self._recorded(stream)

    def _recorded(self, stream: Any) -> Any:
        """Return an event after all work that is on `stream` now."""
        # With a blocking event a host thread sleeps in `synchronize`. By default CUDA spins, which
        # takes a core away from training.
        is_cuda = self.device.type == "cuda"
        event = self._streams.Event(blocking=True) if is_cuda else self._streams.Event()
        event.record(stream)
        return event

    def send_narrowed(self, value: Tensor, into: Tensor) -> None:
        """Copy `value`, (numel,) on the host, `into` device memory of a narrower dtype.

        The cast runs on the host, the copy on the current stream. `value` may be written again as
        soon as this returns.
        """
        nbytes = into.numel() * into.element_size()
        if self._narrowing is None or self._narrowing.nbytes < nbytes:
            self._narrowing = self.ring(nbytes)
        # Through a ring, because the host must not write to a block whose copy is still running.
        block = self._narrowing.next()
        near = block.tensor[:nbytes].view(into.dtype)
        near.copy_(value)
        into.copy_(near, non_blocking=True)
        block.copies = [self._recorded(self._streams.current_stream(self.device))]

    def used_here(self, data: Tensor) -> None:
        """Tell the allocator that the current stream uses `data`, even if another allocated it.

        If `data` is freed, its memory is reused only after that use.
        """
        self.hold(data, self._streams.current_stream(self.device))

    def hold(self, data: Tensor, stream: Any) -> None:
        """Keep the allocator from reusing the memory of `data` before `stream` has finished."""
        if data.device.type != "cpu":
            data.record_stream(stream)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values`, a small new tensor on the host, to `device`, without waiting for the copy."""
    if device.type == "cpu":
        return values
    # Only a copy from pinned memory is asynchronous.
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Copy many small `values` to the CPU, and return them in order."""
    # One copy for all values of a device and dtype, because the host waits for every copy.
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        together.setdefault((value.device, value.dtype), []).append(place)
    copies = [value.detach() for value in values]
    for (device, _), places in together.items():
        if device.type == "cpu":
            continue
        parts = [copies[place].reshape(-1) for place in places]
        joined = torch.cat(parts).cpu().split_with_sizes([part.numel() for part in parts])
        for place, part in zip(places, joined, strict=True):
            # Cloned: a view would be pickled with all values.
            copies[place] = part.view(copies[place].shape).clone()
    return copies


def start_to_host(values: Tensor) -> tuple[Tensor, Any]:
    """Start to copy `values`, a small tensor on a device, to the CPU on the current stream.

    Returns the copy and the event of its end.
    """
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    module = torch.get_device_module(values.device)
    event = module.Event()
    event.record(module.current_stream(values.device))
    return copy, event


ALIGNED = 512
"""Alignment in bytes of intervals in one block, the same as of torch's allocations on a device."""


def packed(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Lay `sizes` (bytes) end to end into blocks whose sizes are powers of two.

    torch's allocator of pinned memory rounds up to powers of two, so a separate allocation for each
    interval could take twice its bytes. Returns the sizes of the blocks, and by interval the index
    of its block and its first byte there.
    """
    aligned = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    blocks: list[int] = []
    places: list[tuple[int, int]] = []
    used, left = 0, sum(aligned)
    for size in aligned:
        if not blocks or used + size > blocks[-1]:
            above = 1 << (max(left, ALIGNED) - 1).bit_length()
            # A block for everything that is left, if that wastes at most half an interval; else a
            # smaller one, which will be full.
            fits = above if above - left <= size // 2 else above // 2
            blocks.append(max(fits, 1 << (max(size, ALIGNED) - 1).bit_length()))
            used = 0
        places.append((len(blocks) - 1, used))
        used, left = used + size, left - size
    return blocks, places
