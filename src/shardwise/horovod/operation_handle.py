"""OperationHandle is an operation in flight: who asked for it waits on it, the thread ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shardwise.errors import HorovodInternalError
from shardwise.horovod.coordinator import JOIN, OperationRequest
from shardwise.horovod.streams import StreamEvent, record_use

MARGIN = 10.0
"""Seconds beyond the time-out within which rank 0 must report it."""


class OperationHandle:
    """An operation in flight, for `poll` and `synchronize`.

    `tensors` are its inputs; with `in_place` the results are written to them. `finish` turns the
    results into what `synchronize` returns.
    """

    def __init__(
        self,
        request: OperationRequest,
        tensors: Sequence[Tensor] = (),
        *,
        in_place: bool = False,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        self.request = request
        self.tensors = tensors
        self.in_place = in_place
        self.ready = StreamEvent.record(tensors)
        """The event after which the inputs can be read."""
        self._finish = finish
        self._done = threading.Event()
        self._came: StreamEvent | None = None
        self._result: Any = None
        self._error: Callable[[], Exception] | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether rank 0 ends the operation in time; join waits for as long as others have data."""
        return self.request.kind != JOIN

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._done.is_set()

    def succeed(self, result: Any, came: StreamEvent) -> None:
        """Set the result. No other rank reads the inputs or the result from now on."""
        self._result, self._came, self.tensors = result, came, ()
        self._done.set()

    def fail(self, text: str, kind: type[Exception] = HorovodInternalError) -> None:
        """Set an error, which `wait` raises."""
        self._error, self.tensors = partial(kind, text), ()
        self._done.set()

    def fail_in_child(self, text: str) -> None:
        """Set an error in a forked child, where a thread that is gone may hold the event's lock."""
        self._done = threading.Event()
        self.fail(text)

    def wait(self, timeout: float) -> Any:
        """Wait for the result and return it. Raises HorovodInternalError where none comes, BadCall
        where the request cannot be."""
        if not self._done.wait(timeout + MARGIN if self.is_bounded else None):
            raise HorovodInternalError(
                f"{self.request.kind} {self.request.name!r}: rank 0, which coordinates, has not "
                f"answered for {timeout + MARGIN:g} s. Is it stopped, or cut off?"
            )
        if self._error is not None:
            raise self._error()
        if self._came is not None:
            self._came.wait()
            self._came = None
            if isinstance(self._result, list):  # of tensors
                record_use(self._result)
            if self._finish is not None:
                self._result = self._finish(self._result)
        return self._result
