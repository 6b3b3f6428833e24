"""Waits and notices of the package that a planted fault leaves out, by where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from tests.phantom.where import asking_files

COLLECTIVE, EVENT, RECORD, SYNCHRONIZE = (
    "the wait for a collective",
    "the wait for an event",
    "record_stream",
    "event.synchronize",
)


class Planted:
    """The one fault of this process, if there is one."""

    _kind: ClassVar[str | None] = None
    _places: ClassVar[tuple[str, ...]] = ()
    _times: ClassVar[int] = 0

    @classmethod
    def leaves_out(cls, kind: str) -> bool:
        """Whether what the lines that this thread is at ask for is not to be done."""
        if kind != cls._kind:
            return False
        if not asking_files().issuperset(cls._places):
            return False
        cls._times += 1
        return True

    @classmethod
    @contextmanager
    def of(cls, kind: str, *places: str) -> Iterator[None]:
        """Inside the block the wait or notice `kind` that all of these files are asking for is
        left out. Fails where there was none."""
        cls._kind, cls._places, cls._times = kind, places, 0
        try:
            yield
        finally:
            cls._kind = None
        assert cls._times, f"{places} never asked for {kind}"
