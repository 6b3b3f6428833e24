"""Process sets: some of the ranks, among which an operation is done."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from shardwise.errors import BadCall
from shardwise.horovod.context import Context, current, is_initialized
from shardwise.horovod.coordinator import ADD, REMOVE
from shardwise.horovod.handles import Handle
from shardwise.horovod.requests import Request


class ProcessSet:
    """Some of the ranks, from `hvd.add_process_set` on; `ranks` in ascending order."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = sorted({int(rank) for rank in ranks})
        self._number: int | None = None
        self._known_to: ref[Context] | None = None

    @property
    def process_set_id(self) -> int | None:
        """Its number; None before it is added, once it is removed, and after `hvd.shutdown`."""
        if self._known_to is None or not is_initialized() or self._known_to() is not current():
            return None
        return self._number

    def known_as(self, number: int | None) -> None:
        """Mind its number, until `hvd.shutdown`; None where it is removed."""
        self._number, self._known_to = number, ref(current())

    @property
    def ranks(self) -> list[int]:
        """The ranks of the run that are in it."""
        return self._ranks

    def number(self) -> int:
        """Its number. Raises BadCall where it was not added, or removed since."""
        number = self.process_set_id
        if number is None:
            raise BadCall(f"{self} is not known yet: hvd.add_process_set(it) first, on all ranks.")
        return number

    def included(self) -> bool:
        """Whether this rank is in it."""
        return current().world.rank in self.ranks

    def size(self) -> int:
        """The number of ranks in it."""
        self.number()
        return len(self.ranks)

    def rank(self) -> int:
        """The place of this rank among them; -1 where it is not in it."""
        self.number()
        return self.ranks.index(current().world.rank) if self.included() else -1

    def __str__(self) -> str:
        return f"ProcessSet({self.ranks})"

    __repr__ = __str__


class _Global(ProcessSet):
    """All ranks."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int]:
        return list(range(current().world.size))

    def __str__(self) -> str:
        """Also before `init`: help() and tracebacks show it."""
        return f"ProcessSet({self.ranks})" if is_initialized() else "ProcessSet(all ranks)"

    __repr__ = __str__


global_process_set = _Global()
"""All ranks, number 0."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set known, on all ranks alike; the ranks alone will do. Collective.

    Raises BadCall for ranks that do not exist or are those of a set that there is,
    HorovodInternalError where ranks give different ones.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.process_set_id is not None:
        raise BadCall(f"{made} was added already, as number {made.process_set_id}.")
    size = current().world.size
    if not made.ranks or made.ranks[0] < 0 or made.ranks[-1] >= size:
        raise BadCall(f"{made}: a process set has ranks from 0 to {size - 1}, one at least.")
    made.known_as(_change(Request(name=ADD, kind=ADD, splits=tuple(made.ranks))))
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set, on all ranks alike; whether it was known. Collective."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    _change(Request(name=REMOVE, kind=REMOVE, root=process_set.process_set_id))
    process_set.known_as(None)
    return True


def _change(request: Request) -> int:
    background = current().background
    handle = background.submit(Handle(request))
    return int(handle.wait(background.timeout))
