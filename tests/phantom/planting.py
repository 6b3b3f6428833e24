"""Waits and notices of the package that a planted fault leaves out, found by their files."""

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
    """The fault of this process, if there is one."""

    _kind: ClassVar[str | None] = None
    _places: ClassVar[tuple[str, ...]] = ()
    _times: ClassVar[int] = 0

    @classmethod
    def leaves_out(cls, kind: str) -> bool:
        """Return whether the action that this thread's lines ask for must be left out."""
        if kind != cls._kind:
            return False
        if not asking_files().issuperset(cls._places):
            return False
        cls._times += 1
        return True

    @classmethod
    @contextmanager
    def of(cls, kind: str, *places: str) -> Iterator[None]:
        """Context manager that leaves out the wait or notice `kind` of these files.

        Fails if there was no such action.
        """
        cls._kind, cls._places, cls._times = kind, places, 0
        try:
            yield
        finally:
            cls._kind = None
        assert cls._times, f"{places} never asked for {kind}"
