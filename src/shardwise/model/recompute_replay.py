"""What a forward must not do again when it is recomputed: it is given what came of it then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class Tape:
    """The results of one forward, in order. Recomputation runs in the thread of backward."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside the block `once` makes its value, which is put on this tape."""

        def put(make: Callable[[], T]) -> T:
            value = make()
            self._values.append(value)
            return value

        yield from _with(put)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside the block `once` gives the values of this tape, from the first one on."""
        values = iter(self._values)
        yield from _with(lambda make: next(values))


_once: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("once", default=None)


def _with(rule: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    token = _once.set(rule)
    try:
        yield
    finally:
        _once.reset(token)


def once(make: Callable[[], T]) -> T:
    """`make()`; in a recomputation, what it gave in the forward that is recomputed."""
    rule = _once.get()
    return make() if rule is None else rule(make)
