"""Implements process sets: groups of ranks for operations in which only some ranks take part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from shardwise.errors import BadCall
from shardwise.horovod.context import Context, current, is_initialized
from shardwise.horovod.coordinator import ADD_PROCESS_SET, REMOVE_PROCESS_SET, OperationRequest
from shardwise.horovod.operation_handle import OperationHandle


class ProcessSet:
    """A group of ranks, usable after `hvd.add_process_set`.

    Args:
        ranks: Ranks of the run, in any order.

    Example:
        ```python
        even = hvd.add_process_set(hvd.ProcessSet(range(0, hvd.size(), 2)))
        if even.included():
            total = hvd.allreduce(tensor, op=hvd.Sum, process_set=even)
        ```
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = sorted({int(rank) for rank in ranks})
        self._number: int | None = None
        self._known_to: ref[Context] | None = None

    @property
    def process_set_id(self) -> int | None:
        """Number of the set, or None before the set is added and after `hvd.shutdown`."""
        if self._known_to is None or not is_initialized() or self._known_to() is not current():
            return None
        return self._number

    def known_as(self, number: int | None) -> None:
        """Set the number, which is valid until `hvd.shutdown`, or None if the set was removed."""
        self._number, self._known_to = number, ref(current())

    @property
    def ranks(self) -> list[int]:
        """The global ranks in this set, in ascending order."""
        return self._ranks

    def number(self) -> int:
        """Return the number of the set. Raises BadCall if the set has not been added."""
        number = self.process_set_id
        if number is None:
            raise BadCall(
                f"{self} has not been added: pass it to hvd.add_process_set first, on all ranks."
            )
        return number

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return current().world.rank in self.ranks

    def size(self) -> int:
        """Return the number of ranks in the set."""
        self.number()
        return len(self.ranks)

    def rank(self) -> int:
        """Return this rank's index in the set, or -1 if it is not in the set."""
        self.number()
        return self.ranks.index(current().world.rank) if self.included() else -1

    def __str__(self) -> str:
        return f"ProcessSet({self.ranks})"

    __repr__ = __str__


class _Global(ProcessSet):
    """The process set of all ranks, whose number is 0."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int]:
        return list(range(current().world.size))

    def __str__(self) -> str:
        """Return a name for the set. help() and tracebacks may call this before `init`."""
        return f"ProcessSet({self.ranks})" if is_initialized() else "ProcessSet(all ranks)"

    __repr__ = __str__


global_process_set = _Global()
"""The process set of all ranks; its number is 0."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set on all ranks. Collective.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set, with its number.

    Raises:
        BadCall: If a rank does not exist, or if the ranks already form a set.
        HorovodInternalError: If ranks register different sets.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.process_set_id is not None:
        raise BadCall(f"{added} is already added, as number {added.process_set_id}: use that one.")
    size = current().world.size
    if not added.ranks or added.ranks[0] < 0 or added.ranks[-1] >= size:
        raise BadCall(f"{added} needs at least one rank, and only ranks from 0 to {size - 1}.")
    added.known_as(_change(ADD_PROCESS_SET, splits=tuple(added.ranks)))
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set on all ranks. Collective.

    Returns:
        True if it was registered.
    """
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    _change(REMOVE_PROCESS_SET, root=process_set.process_set_id)
    process_set.known_as(None)
    return True


def _change(kind: str, **more: Any) -> int:
    background = current().background
    handle = background.submit(OperationHandle(OperationRequest(name=kind, kind=kind, **more)))
    return int(handle.wait(background.timeout))
