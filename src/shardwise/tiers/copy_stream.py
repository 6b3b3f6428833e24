"""Copies between a device and host memory on two streams, in parallel with compute.

    current stream   compute ── compute ────── compute ── compute
                            ╲ from_here              ╱ await_
    stream up                ╲── copy ── copy ──────╱               host to device
    stream down               ╲── copy ── copy ── ...               device to host

An accelerator has a copy engine for each direction. With a single stream, a copy to the device
would wait for all earlier copies to the host. If a copy must follow one in the other direction, for
example because both use the same memory, the caller passes the events that the copy must wait for.

The current stream is the one on which PyTorch queues the calling thread's work. If the host itself
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
"""Blocks per ring: one being copied and one in use."""


class CopyStream:
    """The two copy streams of `device`, an accelerator: host to device and device to host.

    Tests may use the CPU as the device. Its streams run everything immediately, and no memory is
    pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: ModuleType = torch.get_device_module(device)
        self._up, self._down = (self._streams.Stream(device) for _ in range(2))
        self._narrowing: StagingRing | None = None

    def memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate uninitialised pinned host memory of shape (numel,)."""
        return torch.empty(numel, dtype=dtype, pin_memory=self.device.type != "cpu")

    def memories(self, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Allocate pinned host memory for many tensors with the same lifetime, in a few blocks."""
        sizes, places = packed([numel * dtype.itemsize for numel in numels])
        blocks = [self.memory(size // dtype.itemsize, dtype) for size in sizes]
        starts = [(blocks[index], first // dtype.itemsize) for index, first in places]
        return [
            block[start : start + numel]
            for (block, start), numel in zip(starts, numels, strict=True)
        ]

    def pages(self, nbytes: int, count: int) -> list[Tensor]:
        """Allocate `count` page-aligned tensors of `nbytes` (uint8, a multiple of the page size).

        The memory is pinned and can also be used for direct file transfers.
        """
        sizes, places = packed([nbytes] * count)
        blocks = [self._on_a_page(size) for size in sizes]
        return [blocks[index][first : first + nbytes] for index, first in places]

    def ring(self, nbytes: int) -> StagingRing:
        """Return a ring of page-aligned pinned blocks of `nbytes`, rounded up to whole pages."""
        return StagingRing(self.pages(padded(nbytes), BLOCKS))

    def _on_a_page(self, nbytes: int) -> Tensor:
        if self.device.type == "cpu":
            return mapped(nbytes)
        block = self.memory(nbytes, torch.uint8)
        # no known driver does this, but nothing guarantees the alignment
        if block.data_ptr() % PAGE:
            block = self.memory(nbytes + PAGE, torch.uint8)
            block = block[-block.data_ptr() % PAGE :][:nbytes]
        return block

    def from_here(self) -> AbstractContextManager[None]:
        """Return a context manager that makes the host-to-device stream current, in any thread.

        Work queued in its body waits for all work queued so far on the caller's current stream.
        """
        return self._entered(self._up, [self.here()])

    @contextmanager
    def _entered(self, stream: Any, after: Iterable[Any]) -> Iterator[None]:
        # A new thread has device 0 selected. On exit, `stream` alone would restore that device's
        # stream, which creates a CUDA context: every rank would have one on the host's first GPU.
        is_cpu = self.device.type == "cpu"
        scope = nullcontext() if is_cpu else self._streams.device(self.device)
        with scope, self._streams.stream(stream):
            for event in after:
                stream.wait_event(event)
            yield

    def here(self) -> Any:
        """Return an event that completes after all work queued so far on the current stream."""
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event

    def await_(self, event: Any) -> None:
        """Make the current stream wait for `event`. The host does not wait."""
        self._streams.current_stream(self.device).wait_event(event)

    def down(self, data: Tensor, memory: Tensor, after: Iterable[Any] = ()) -> Any:
        """Start copying `data` to host `memory`, both of shape (numel,).

        Returns an event that marks completion. The copy waits for the work on the current stream
        and for the events `after`. Until it has completed, `data` may be freed but not written, and
        `memory` must not be accessed.
        """
        event = self.start_down(data, memory, [self.here(), *after])
        self.hold(data, self._down)
        return event

    def up(self, memory: Tensor, after: Iterable[Any] = ()) -> tuple[Tensor, Any]:
        """Start copying host `memory`, of shape (numel,), to the device after the events `after`.

        Returns the device tensor and an event that marks completion.
        """
        data, ready = self.room(memory.numel(), memory.dtype)
        return data, self.start_up(memory, data, [ready, *after])

    def room(self, numel: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Any]:
        """Allocate device memory for a host-to-device copy.

        Returns the memory, and an event that must complete before the copy starts. The memory may
        be freed before the copy has completed.
        """
        # The allocator may return memory that pending work on the current stream still uses.
        data = torch.empty(numel, dtype=dtype, device=self.device)
        self.hold(data, self._up)
        return data, self.here()

    def start_down(self, data: Tensor, memory: Tensor, after: Iterable[Any]) -> Any:
        """Start a copy as `down` does, but wait only for the events `after`.

        Any thread may call this. `data` must not be freed before the copy has completed.
        """
        return self._copy(self._down, data, memory, after)

    def start_up(self, memory: Tensor, data: Tensor, after: Iterable[Any]) -> Any:
        """Start copying host `memory` to `data`. The copy waits only for the events `after`."""
        return self._copy(self._up, memory, data, after)

    def _copy(self, stream: Any, source: Tensor, target: Tensor, after: Iterable[Any]) -> Any:
        with self._entered(stream, after):
            target.copy_(source, non_blocking=True)
            return self._recorded(stream)

    def _recorded(self, stream: Any) -> Any:
        """Return an event that completes after all work queued so far on `stream`."""
        # With a blocking event, a host thread sleeps in `synchronize`. By default CUDA spins, which
        # takes a core away from training.
        is_cuda = self.device.type == "cuda"
        event = self._streams.Event(blocking=True) if is_cuda else self._streams.Event()
        event.record(stream)
        return event

    def send_narrowed(self, value: Tensor, into: Tensor) -> None:
        """Copy host tensor `value` to device tensor `into`, which has a narrower dtype.

        Both have shape (numel,). The cast runs on the host and the copy on the current stream.
        `value` may be overwritten as soon as this returns.
        """
        nbytes = into.numel() * into.element_size()
        if self._narrowing is None or self._narrowing.nbytes < nbytes:
            self._narrowing = self.ring(nbytes)
        # Copy through a ring, because the host must not write to a block that is still being
        # copied.
        block = self._narrowing.next()
        near = block.tensor[:nbytes].view(into.dtype)
        near.copy_(value)
        into.copy_(near, non_blocking=True)
        block.copies = [self._recorded(self._streams.current_stream(self.device))]

    def used_here(self, data: Tensor) -> None:
        """Tell the allocator that the current stream uses `data`.

        Needed if `data` was allocated on a different stream. If `data` is freed, its memory is then
        reused only after the current stream has finished with it.
        """
        self.hold(data, self._streams.current_stream(self.device))

    def hold(self, data: Tensor, stream: Any) -> None:
        """Prevent reuse of the memory of `data` until `stream` has finished with it."""
        if data.device.type != "cpu":
            data.record_stream(stream)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values`, a small new host tensor, to `device` without waiting for the copy."""
    if device.type == "cpu":
        return values
    # Only a copy from pinned memory is asynchronous.
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Copy many small `values` to the CPU. Return the copies in the same order."""
    # Use one copy per device and dtype, because the host waits for every copy.
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
            # Clone each part: pickling a view would store the joined tensor with it.
            copies[place] = part.view(copies[place].shape).clone()
    return copies


def start_to_host(values: Tensor) -> tuple[Tensor, Any]:
    """Start copying `values`, a small device tensor, to the CPU on the current stream.

    Returns the copy and an event that marks completion.
    """
    # Only a copy to pinned memory is asynchronous.
    copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    copy.copy_(values, non_blocking=True)
    module = torch.get_device_module(values.device)
    event = module.Event()
    event.record(module.current_stream(values.device))
    return copy, event


ALIGNED = 512
"""Alignment in bytes of intervals in a block, the same as for torch's device allocations."""


def packed(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack intervals of `sizes` bytes end to end into blocks whose sizes are powers of two.

    torch's pinned-memory allocator rounds sizes up to powers of two, so allocating each interval
    separately could take twice its size. Returns the block sizes, and for each interval the index
    of its block and its first byte in that block.
    """
    aligned = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    blocks: list[int] = []
    places: list[tuple[int, int]] = []
    used, left = 0, sum(aligned)
    for size in aligned:
        if not blocks or used + size > blocks[-1]:
            above = 1 << (max(left, ALIGNED) - 1).bit_length()
            # Use one block for all remaining intervals if that wastes at most half an interval.
            # Otherwise use a smaller block, which will be full.
            fits = above if above - left <= size // 2 else above // 2
            blocks.append(max(fits, 1 << (max(size, ALIGNED) - 1).bit_length()))
            used = 0
        places.append((len(blocks) - 1, used))
        used, left = used + size, left - size
    return blocks, places
