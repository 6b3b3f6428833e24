"""torch.cuda's streams and events, of which only the order is there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from tests.phantom.clocks import Seen
from tests.phantom.order import Order
from tests.phantom.planting import EVENT, SYNCHRONIZE, Planted

ALL = -1
"""Instead of the number of a stream: all of them."""


class Device:
    """The one device of this process: its order, and the library that knows the current stream."""

    order: ClassVar[Order]
    library: ClassVar[ctypes.CDLL]

    @classmethod
    def current(cls) -> str:
        """The name of the stream that this thread gives work to."""
        return name_of(cls.library.current_stream())


def name_of(number: int) -> str:
    """What messages call a stream."""
    return f"stream {number}" if number else "the default stream"


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        del priority
        self.cuda_stream: int = Device.library.new_stream() if number is None else number
        self.name = name_of(self.cuda_stream)
        self.device = device

    def wait_event(self, event: Event) -> None:
        """Go on when `event` has happened."""
        if Planted.leaves_out(EVENT):
            return
        Device.order.wait(self.name, event.seen)

    def wait_stream(self, other: Stream) -> None:
        """Go on when `other` has done what it was asked for."""
        Device.order.wait(self.name, Device.order.moment(other.name))

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind what this stream was asked for."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait."""
        Device.order.synchronize(Device.order.moment(self.name), "stream")

    def query(self) -> bool:
        """Whether all is done, as far as the host knows."""
        return Device.order.has_happened(Device.order.moment(self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class Event:
    """torch.cuda.Event; no time passes between two of them."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        del enable_timing, blocking
        self.seen: Seen = {}

    def record(self, stream: Stream | None = None) -> None:
        """Stand behind what a stream was asked for."""
        self.seen = Device.order.moment((stream or current_stream()).name)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait."""
        if Planted.leaves_out(SYNCHRONIZE):
            return
        Device.order.synchronize(self.seen, "event")

    def query(self) -> bool:
        """Whether it has happened, as far as the host knows."""
        return Device.order.has_happened(self.seen)

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds: none."""
        del other
        return 0.0


def current_stream(device: Any = None) -> Stream:
    """torch.cuda.current_stream."""
    return Stream(device, number=Device.library.current_stream())


def default_stream(device: Any = None) -> Stream:
    """torch.cuda.default_stream."""
    return Stream(device, number=0)


@contextmanager
def stream(present: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    if present is None:
        yield
        return
    before = Device.library.exchange_stream(present.cuda_stream)
    try:
        yield
    finally:
        Device.library.exchange_stream(before)


def synchronize(device: Any = None) -> None:
    """torch.cuda.synchronize."""
    del device
    Device.order.synchronize(None, "device")


# What torch's C++ does with streams and events, as autograd between threads.

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
    """Let the device's library tell `order` what C++ does; pinned memory belongs to `host`."""
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
"""Callbacks must live as long as the library may call them."""
