"""Defines the handle of an operation in flight, which the communication thread completes."""

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
"""Seconds by which a wait exceeds the timeout, because rank 0 needs time to report it."""


class OperationHandle:
    """An operation in flight, for `poll` and `synchronize`.

    `tensors` are its inputs. If `in_place` is true, the results are written to them. `finish`
    converts the results into the value that `synchronize` returns.
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
        self._finished: StreamEvent | None = None
        self._result: Any = None
        self._error: Callable[[], Exception] | None = None

    @property
    def is_bounded(self) -> bool:
        """True if rank 0 limits how long the operation waits.

        A join has no limit, because it waits for as long as other ranks have data.
        """
        return self.request.kind != JOIN

    @property
    def is_done(self) -> bool:
        """True if `wait` would return, or raise an error, immediately."""
        return self._done.is_set()

    def succeed(self, result: Any, finished: StreamEvent) -> None:
        """Set the result, once no other rank reads the inputs or the result any more."""
        self._result, self._finished, self.tensors = result, finished, ()
        self._done.set()

    def fail(self, text: str, kind: type[Exception] = HorovodInternalError) -> None:
        """Set an error, for `wait` to raise."""
        self._error, self.tensors = partial(kind, text), ()
        self._done.set()

    def fail_in_child(self, text: str) -> None:
        """Set an error in a forked child, for `wait` to raise."""
        # Create a new event, because a thread of the parent may have held the old one's lock during
        # the fork.
        self._done = threading.Event()
        self.fail(text)

    def wait(self, timeout: float) -> Any:
        """Wait for the result and return it.

        Raises HorovodInternalError if the operation fails or rank 0 does not answer, and BadCall if
        the request was invalid.
        """
        # Wait longer than rank 0 does, because rank 0's report names the missing ranks.
        if not self._done.wait(timeout + MARGIN if self.is_bounded else None):
            raise HorovodInternalError(
                f"{self.request.kind} {self.request.name!r}: rank 0, which coordinates operations, "
                f"has not answered for {timeout + MARGIN:g} s. Check whether it is stopped, or its "
                "network is down."
            )
        if self._error is not None:
            raise self._error()
        if self._finished is not None:
            # The caller's stream waits, not the host, because the sum may still be running on the
            # device.
            self._finished.wait()
            self._finished = None
            if isinstance(self._result, list):  # a list of tensors
                record_use(self._result)
            if self._finish is not None:
                self._result = self._finish(self._result)
        return self._result
