"""Copies between a device and memory of the host, on two streams beside the work, one each way.

    present stream   compute ── compute ────── compute ── compute
                            ╲ from_here              ╱ await_
    stream up                ╲── copy ── copy ──────╱
    stream down               ╲── copy ── copy ── ...

An accelerator has an engine for each direction, and on one stream a copy up would wait for all that
comes down before it. Where one way must come after the other, as for memory that was brought down
and goes up again, the copy is given the events that it comes after.

The present stream is the one that PyTorch gives work to in the calling thread. Where the process
itself needs a copy, it waits for the copy's event: `event.synchronize()`.
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
"""Of a ring: one on its way, and one in use."""


class CopyStream:
    """The two streams for copies of `device`, which is an accelerator.

    The CPU does in its place, in tests: its streams do everything at once, and nothing is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: ModuleType = torch.get_device_module(device)
        self._up, self._down = (self._streams.Stream(device) for _ in range(2))
        self._narrowing: StagingRing | None = None

    def memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies go to and from without a stop, with anything in it."""
        return torch.empty(numel, dtype=dtype, pin_memory=self.device.type != "cpu")

    def memories(self, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """As `memory`, for many tensors that live equally long, in a few blocks."""
        sizes, places = packed([numel * dtype.itemsize for numel in numels])
        blocks = [self.memory(size // dtype.itemsize, dtype) for size in sizes]
        starts = [(blocks[index], first // dtype.itemsize) for index, first in places]
        return [
            block[start : start + numel]
            for (block, start), numel in zip(starts, numels, strict=True)
        ]

    def pages(self, nbytes: int, count: int) -> list[Tensor]:
        """`count` tensors of `nbytes` (uint8, whole pages) of such memory, each starting on a page:
        a file's direct transfers go to and from them, too."""
        sizes, places = packed([nbytes] * count)
        blocks = [self._on_a_page(size) for size in sizes]
        return [blocks[index][first : first + nbytes] for index, first in places]

    def ring(self, nbytes: int) -> StagingRing:
        """A few such blocks of `nbytes`, to be used in turn."""
        return StagingRing(self.pages(padded(nbytes), BLOCKS))

    def _on_a_page(self, nbytes: int) -> Tensor:
        if self.device.type == "cpu":
            return mapped(nbytes)
        block = self.memory(nbytes, torch.uint8)
        if block.data_ptr() % PAGE:  # no driver that we know of does that
            block = self.memory(nbytes + PAGE, torch.uint8)
            block = block[-block.data_ptr() % PAGE :][:nbytes]
        return block

    def from_here(self) -> AbstractContextManager[None]:
        """A block, of any thread, in which the stream up is the present one.

        What it is given there starts once all is done that the present stream has until now.
        """
        return self._entered(self._up, [self.here()])

    @contextmanager
    def _entered(self, stream: Any, after: Iterable[Any]) -> Iterator[None]:
        # A new thread is at device 0. Left to `stream` alone, it would be set back to that one's
        # stream, which makes a context there: one of every rank on the first GPU of a host.
        is_cpu = self.device.type == "cpu"
        scope = nullcontext() if is_cpu else self._streams.device(self.device)
        with scope, self._streams.stream(stream):
            for event in after:
                stream.wait_event(event)
            yield

    def here(self) -> Any:
        """An event behind what the present stream was given until now."""
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event

    def await_(self, event: Any) -> None:
        """Let the present stream wait for `event`, but not the process."""
        self._streams.current_stream(self.device).wait_event(event)

    def down(self, data: Tensor, memory: Tensor, after: Iterable[Any] = ()) -> Any:
        """Start to copy `data` to the host's `memory`, both flat; returns the event of its end.

        It comes after what the present stream has, and the events `after`. `data` may be freed
        meanwhile, not written; `memory` must be let be.
        """
        event = self.start_down(data, memory, [self.here(), *after])
        self.hold(data, self._down)
        return event

    def up(self, memory: Tensor, after: Iterable[Any] = ()) -> tuple[Tensor, Any]:
        """Start to copy the host's `memory` (flat) to the device, after the events `after`; the
        copy, and its end's event."""
        data, ready = self.room(memory.numel(), memory.dtype)
        return data, self.start_up(memory, data, [ready, *after])

    def room(self, numel: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Any]:
        """Memory of the device for a copy up, and the event from which on it may be written; it may
        be freed before such a copy has ended."""
        data = torch.empty(numel, dtype=dtype, device=self.device)
        self.hold(data, self._up)
        return data, self.here()

    def start_down(self, data: Tensor, memory: Tensor, after: Iterable[Any]) -> Any:
        """As `down`, after the events `after` alone, of any thread; `data` must not be freed."""
        return self._copy(self._down, data, memory, after)

    def start_up(self, memory: Tensor, data: Tensor, after: Iterable[Any]) -> Any:
        """Start to copy the host's `memory` to `data`, after the events `after` alone."""
        return self._copy(self._up, memory, data, after)

    def _copy(self, stream: Any, source: Tensor, target: Tensor, after: Iterable[Any]) -> Any:
        with self._entered(stream, after):
            target.copy_(source, non_blocking=True)
            return self._recorded(stream)

    def _recorded(self, stream: Any) -> Any:
        """Return an event after the work that `stream` has been given so far."""
        # A blocking event lets a host thread sleep in `synchronize`; by default CUDA spins, which
        # takes a core from the training.
        is_cuda = self.device.type == "cuda"
        event = self._streams.Event(blocking=True) if is_cuda else self._streams.Event()
        event.record(stream)
        return event

    def send_narrowed(self, value: Tensor, into: Tensor) -> None:
        """Copy `value` (flat, of the host) `into` memory of the device, in whose dtype it travels,
        on the present stream. `value` may be written again at once."""
        nbytes = into.numel() * into.element_size()
        if self._narrowing is None or self._narrowing.nbytes < nbytes:
            self._narrowing = self.ring(nbytes)
        # Through a ring: the host must not write to a block whose copy is still running.
        block = self._narrowing.next()
        near = block.tensor[:nbytes].view(into.dtype)
        near.copy_(value)
        into.copy_(near, non_blocking=True)
        block.copies = [self._recorded(self._streams.current_stream(self.device))]

    def used_here(self, data: Tensor) -> None:
        """`data`, of the device, is used by the present stream, which need not be that under which
        it was allocated: freed there, its memory is used anew only after that use."""
        self.hold(data, self._streams.current_stream(self.device))

    def hold(self, data: Tensor, stream: Any) -> None:
        """Should `data` be freed before `stream` is done with it, let the allocator wait with using
        its memory anew."""
        if data.device.type != "cpu":
            data.record_stream(stream)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values`, a small new tensor of the host, on `device`; the host does not wait for a copy."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Many small `values` on the CPU, in order; the host waits once for those of one device and
    dtype, where a copy of each would make it wait for each."""
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, value in enumerate(values):
        together.setdefault((value.device, value.dtype), []).append(place)
    found = [value.detach() for value in values]
    for (device, _), places in together.items():
        if device.type == "cpu":
            continue
        parts = [found[place].reshape(-1) for place in places]
        near = torch.cat(parts).cpu().split_with_sizes([part.numel() for part in parts])
        for place, part in zip(places, near, strict=True):
            found[place] = part.view(found[place].shape).clone()  # a pickled view is all of them
    return found


def start_to_host(values: Tensor) -> tuple[Tensor, Any]:
    """Start to copy `values`, a small tensor of a device, to the CPU on the present stream; the
    copy, and the event of its end."""
    near = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    near.copy_(values, non_blocking=True)
    module = torch.get_device_module(values.device)
    event = module.Event()
    event.record(module.current_stream(values.device))
    return near, event


ALIGNED = 512
"""Bytes that intervals in one block are aligned to: torch's own blocks on a device are."""


def packed(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Lay `sizes` (bytes) end to end into blocks whose sizes are powers of two.

    torch's allocator of pinned memory rounds up to such a size: by itself, an interval would take
    up to twice its bytes. Returns the blocks' sizes, and by interval its block and first byte.
    """
    aligned = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    blocks: list[int] = []
    places: list[tuple[int, int]] = []
    used, left = 0, sum(aligned)
    for size in aligned:
        if not blocks or used + size > blocks[-1]:
            above = 1 << (max(left, ALIGNED) - 1).bit_length()
            # All that is left, where that wastes half an interval at most; else what can be filled.
            fits = above if above - left <= size // 2 else above // 2
            blocks.append(max(fits, 1 << (max(size, ALIGNED) - 1).bit_length()))
            used = 0
        places.append((len(blocks) - 1, used))
        used, left = used + size, left - size
    return blocks, places
