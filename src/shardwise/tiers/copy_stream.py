"""Copies between a device and memory of the host, on a copy stream beside the work.

    present stream   compute ── compute ────── compute ── compute
                            ╲ from_here              ╱ await_
    copy stream              ╲── copy ── copy ──────╱

The present stream is the one that PyTorch gives work to in the calling thread. Where the process
itself needs a copy, it waits for the copy's event: `event.synchronize()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class CopyStream:
    """A stream for copies of `device`, which is an accelerator.

    The CPU does in its place, in tests: its streams do everything at once, and nothing is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: ModuleType = torch.get_device_module(device)
        self._stream: Any = self._streams.Stream(device)

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

    def from_here(self) -> AbstractContextManager[None]:
        """A block, of any thread, in which the copy stream is the present one.

        What it is given there starts once all is done that the present stream has until now.
        """
        return self._entered(self.here())

    @contextmanager
    def _entered(self, after: Any) -> Iterator[None]:
        with self._streams.stream(self._stream):
            self._stream.wait_event(after)
            yield

    def here(self) -> Any:
        """An event behind what the present stream was given until now."""
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event

    def await_(self, event: Any) -> None:
        """Let the present stream wait for `event`, but not the process."""
        self._streams.current_stream(self.device).wait_event(event)

    def down(self, data: Tensor, memory: Tensor) -> Any:
        """Start to copy `data` to the host's `memory`, both flat; returns the event of its end.

        `data` may be freed meanwhile, not written; `memory` must be let be.
        """
        return self._copy(data, memory, on_device=data)

    def up(self, memory: Tensor) -> tuple[Tensor, Any]:
        """Start to copy the host's `memory` (flat) to the device; the copy, and its end's event."""
        data = torch.empty(memory.numel(), dtype=memory.dtype, device=self.device)
        return data, self._copy(memory, data, on_device=data)

    def _copy(self, source: Tensor, target: Tensor, *, on_device: Tensor) -> Any:
        # Behind all that the present stream has: what is copied down is computed there.
        with self.from_here():
            target.copy_(source, non_blocking=True)
            event = self.here()
        if on_device.device.type != "cpu":
            # Should it be freed before the copy ends, the allocator waits with using it anew.
            on_device.record_stream(self._stream)
        return event


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values`, a small new tensor of the host, on `device`; the host does not wait for a copy."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


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
