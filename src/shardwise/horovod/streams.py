"""Orders accelerator work between the communication thread and the other threads.

A kernel may not run until long after it was enqueued. To wait for it, one thread records an event
on its stream, and another thread's stream waits for this event. On the CPU, all of this is a no-op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def _streams_of(device: torch.device) -> Any:
    """Return torch's module with the streams of `device`, or None if it has no streams."""
    module = torch.get_device_module(device)
    return module if device.type != "cpu" and hasattr(module, "Stream") else None


class StreamEvent:
    """An event on a stream. If it is empty, `wait` is a no-op."""

    def __init__(self, event: Any = None, device: torch.device | None = None) -> None:
        self._event = event
        self._device = device

    @classmethod
    def record(cls, tensors: Sequence[Tensor]) -> StreamEvent:
        """Record an event on the current stream of the tensors' device. On the CPU, it is empty."""
        for device in (tensor.device for tensor in tensors):
            if (streams := _streams_of(device)) is not None:
                event = streams.Event()
                event.record(streams.current_stream(device))
                return cls(event, device)
        return cls()

    def wait(self) -> None:
        """Make the current stream wait for the event. The host does not wait."""
        if self._device is not None:
            _streams_of(self._device).current_stream(self._device).wait_event(self._event)


def enter(device: torch.device) -> None:
    """Make `device` the current device of this thread."""
    # A new thread starts with the first GPU. Leaving a block with a different stream would return
    # to it, and CUDA would create a context there, which takes about 0.5 GB for every rank on the
    # host.
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def record_use(tensors: Sequence[Tensor], stream: Any = None) -> None:
    """Tell the allocator that `stream` (by default, the current stream) uses the tensors."""
    # The allocator only knows the stream that created a tensor. Without this call, it could reuse
    # the memory while this stream still reads it.
    for tensor in tensors:
        if (streams := _streams_of(tensor.device)) is not None:
            tensor.record_stream(stream or streams.current_stream(tensor.device))


class CommunicationStream:
    """The stream on which collectives run. On the CPU, it has no effect."""

    def __init__(self, device: torch.device) -> None:
        self._streams = _streams_of(device)
        self._stream = self._streams.Stream(device) if self._streams is not None else None

    @contextmanager
    def after(self, event: StreamEvent) -> Iterator[None]:
        """Run the block's work on this stream, once `event` has occurred."""
        if self._stream is None:
            yield
            return
        with self._streams.stream(self._stream):
            event.wait()
            yield

    def record_use(self, tensors: Sequence[Tensor]) -> None:
        """Tell the allocator that this stream uses tensors of other streams."""
        if self._stream is not None:
            record_use(tensors, self._stream)
