"""torch.cuda's streams and events, which have an order but no time."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from tests.phantom.clocks import Seen
from tests.phantom.order import Order
from tests.phantom.planting import EVENT, SYNCHRONIZE, Planted

ALL = -1
"""Stands for all streams in place of a stream's number."""


class Device:
    """The device of this process: its order, and the library that knows the current stream."""

    order: ClassVar[Order]
    library: ClassVar[ctypes.CDLL]

    @classmethod
    def current(cls) -> str:
        """Return the name of the current stream of this thread."""
        return name_of(cls.library.current_stream())


def name_of(number: int) -> str:
    """Return the name of a stream in messages."""
    return f"stream {number}" if number else "the default stream"


class Stream:
    """Replaces torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        del priority
        self.cuda_stream: int = Device.library.new_stream() if number is None else number
        self.name = name_of(self.cuda_stream)
        self.device = device

    def wait_event(self, event: Event) -> None:
        """Wait for `event`."""
        if Planted.leaves_out(EVENT):
            return
        Device.order.wait(self.name, event.seen)

    def wait_stream(self, other: Stream) -> None:
        """Wait for all work on `other`."""
        Device.order.wait(self.name, Device.order.moment(other.name))

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event after the work on this stream."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait."""
        Device.order.synchronize(Device.order.moment(self.name), "stream")

    def query(self) -> bool:
        """Return whether all work is complete, as far as the host knows."""
        return Device.order.has_happened(Device.order.moment(self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class Event:
    """Replaces torch.cuda.Event; no time passes between two events."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        del enable_timing, blocking
        self.seen: Seen = {}

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after the work on a stream."""
        self.seen = Device.order.moment((stream or current_stream()).name)

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait."""
        if Planted.leaves_out(SYNCHRONIZE):
            return
        Device.order.synchronize(self.seen, "event")

    def query(self) -> bool:
        """Return whether it has happened, as far as the host knows."""
        return Device.order.has_happened(self.seen)

    def elapsed_time(self, other: Event) -> float:
        """Return 0.0 milliseconds."""
        del other
        return 0.0


def current_stream(device: Any = None) -> Stream:
    """Return the current stream; replaces torch.cuda.current_stream."""
    return Stream(device, number=Device.library.current_stream())


def default_stream(device: Any = None) -> Stream:
    """Return the default stream; replaces torch.cuda.default_stream."""
    return Stream(device, number=0)


@contextmanager
def stream(present: Stream | None) -> Iterator[None]:
    """Make a stream the current one inside the block; replaces torch.cuda.stream."""
    if present is None:
        yield
        return
    before = Device.library.exchange_stream(present.cuda_stream)
    try:
        yield
    finally:
        Device.library.exchange_stream(before)


def synchronize(device: Any = None) -> None:
    """Make the host wait for all work; replaces torch.cuda.synchronize."""
    del device
    Device.order.synchronize(None, "device")


# What torch's C++ code does with streams and events, such as autograd between threads.

_PAIR = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
_ONE = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


class _Callbacks(ctypes.Structure):
    _fields_: ClassVar = [
        ("record", _PAIR),
        ("block", _PAIR),
        ("await_event", _ONE),
        ("await_stream", _ONE),
        ("has_happened", _ASK),
        ("pinned", _PAIR),
    ]


def follow(order: Order, host: str) -> None:
    """Make the device's library report C++ calls to `order`; pinned memory belongs to `host`."""
    library = Device.library
    for name in ("current_stream", "exchange_stream", "new_stream", "next_released"):
        getattr(library, name).restype = ctypes.c_int64
    library.exchange_stream.argtypes = [ctypes.c_int64]
    Device.order = order

    def await_stream(number: int) -> None:
        seen = None if number == ALL else order.moment(name_of(number))
        order.synchronize(seen, "stream")

    callbacks = _Callbacks(
        _PAIR(lambda event, number: order.record(event, name_of(number))),
        _PAIR(lambda event, number: order.wait(name_of(number), order.event(event))),
        _ONE(lambda event: order.synchronize(order.event(event), "event")),
        _ONE(await_stream),
        _ASK(lambda event: int(order.has_happened(order.event(event)))),
        _PAIR(lambda address, nbytes: order.allocated(address, nbytes, host)),
    )
    library.follow(ctypes.byref(callbacks))
    _kept.append(callbacks)


_kept: list[Any] = []
"""Keeps callbacks alive as long as the library may call them."""
