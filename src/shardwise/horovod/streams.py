"""Orders CUDA work between the communication thread and the other threads.

A kernel is enqueued long before it runs. So one thread records an event on its stream, and another
makes its own stream wait for that event before it enqueues more. On the CPU all of this does
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class StreamEvent:
    """A CUDA event on some stream; without one, waiting does nothing."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    @classmethod
    def record(cls, tensors: Sequence[Tensor]) -> StreamEvent:
        """An event on the current stream of the GPU that has `tensors`; empty on the CPU."""
        on_gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if on_gpu is None:
            return cls()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(on_gpu))
        return cls(event)

    def wait(self) -> None:
        """Make the current stream wait for the event; the host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


def record_use(tensors: Sequence[Tensor]) -> None:
    """Record the use of tensors on the current stream.

    The allocator knows only the stream that made a tensor; without this it could reuse the memory
    while this stream still reads it.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class CommunicationStream:
    """The CUDA stream that collectives are enqueued on; none for ranks on the CPU."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    @contextmanager
    def after(self, event: StreamEvent) -> Iterator[None]:
        """Enqueue on this stream inside the block, after `event`."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            event.wait()
            yield

    def record_use(self, tensors: Sequence[Tensor]) -> None:
        """Record the use of tensors of other streams on this one."""
        if self._stream is not None:
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
