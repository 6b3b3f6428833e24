"""Handles: operations that were asked for, and what came of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shardwise.errors import HorovodInternalError
from shardwise.horovod.requests import JOIN, Request
from shardwise.horovod.streams import Moment, used_here

MARGIN = 10.0
"""Seconds beyond the time-out in which rank 0 has to say that it is over."""


class Handle:
    """An operation on its way, for `poll` and `synchronize`.

    `tensors` are what was given to it, `targets` what the results are written to where the user
    wants them in place. `finish` makes what `synchronize` returns of the results.
    """

    def __init__(
        self,
        request: Request,
        tensors: Sequence[Tensor] = (),
        *,
        in_place: bool = False,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        self.request = request
        self.tensors = tensors
        self.in_place = in_place
        self.ready = Moment.now(tensors)
        """When what was given can be read."""
        self._finish = finish
        self._done = threading.Event()
        self._came: Moment | None = None
        self._result: Any = None
        self._error: Callable[[], Exception] | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether rank 0 ends it in time; who joins waits for as long as others have data."""
        return self.request.kind != JOIN

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._done.is_set()

    def succeed(self, result: Any, came: Moment) -> None:
        """Let it end well: no other rank reads what was given, or has come, any more."""
        self._result, self._came, self.tensors = result, came, ()
        self._done.set()

    def fail(self, text: str, kind: type[Exception] = HorovodInternalError) -> None:
        """Let it end with an error."""
        self._error, self.tensors = partial(kind, text), ()
        self._done.set()

    def wait(self, timeout: float) -> Any:
        """The result, once it has come. Raises HorovodInternalError where it does not, BadCall
        where it never can."""
        if not self._done.wait(timeout + MARGIN if self.is_bounded else None):
            raise HorovodInternalError(
                f"{self.request.kind} {self.request.name!r}: rank 0, which coordinates, has not "
                f"answered for {timeout + MARGIN:g} s. Is it stopped, or cut off?"
            )
        if self._error is not None:
            raise self._error()
        if self._came is not None:
            self._came.before_now()
            self._came = None
            if isinstance(self._result, list):  # of tensors
                used_here(self._result)
            if self._finish is not None:
                self._result = self._finish(self._result)
        return self._result


def poll(handle: Handle) -> bool:
    """Whether the operation of `handle` is done: `synchronize` would not wait."""
    return handle.is_done
