"""Who has asked for what, and what all ranks do next: Horovod's negotiation, on rank 0. Pure.

Ranks ask for operations by name, in any order. One is done as soon as every member of its process
set has asked for it, in the order in which that comes about, which is the order on all ranks:

    rank 1   b, a ─┐
    rank 2   a, b ─┼─▶ coordinator ─▶ verdicts: b, a ─▶ all ranks
    rank 0   b, a ─┘

A rank that has joined takes part in every allreduce without asking, with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.horovod.requests import JOIN, JOINED, Key, Request, difference
from shardwise.watch.wait_graph import named

ADD = "process set to add"
REMOVE = "process set to remove"

REDUCTIONS = ("allreduce", "sparse_allreduce")
"""Kinds in which a rank that has joined takes part, with zeros."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What members of a process set do next: `request`, as one of them asked for it; or why not.

    `to` are the ranks it is for. `rows` has by member what `Request.rows` says (zeros where one has
    joined). `number` is the new process set's, or the rank that joined last. `mistake` says
    that what is refused can never be. `notes` are those of the ranks that asked; they stay with
    rank 0.
    """

    to: tuple[int, ...]
    request: Request
    rows: Sequence[Sequence[int]] = ()
    number: int = 0
    error: str = ""
    mistake: bool = False
    notes: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a message."""
        rest = {name: getattr(self, name) for name in ("to", "rows", "number", "error", "mistake")}
        return {**rest, "request": self.request.as_json()}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Verdict:
        """The way back."""
        request = Request.from_json(said["request"])
        return cls(**{**said, "request": request, "to": tuple(said["to"])})


@dataclass
class _Pending:
    """An operation that some ranks have `asked` for, the first of them at `since` (seconds)."""

    since: float
    asked: dict[int, Request] = field(default_factory=dict)
    warned: bool = False


class Coordinator:
    """Keeps the table of what `size` ranks ask for."""

    def __init__(self, size: int) -> None:
        self.members: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        """The ranks of each process set; number 0 has all."""
        self._next = 1
        self._pending: dict[Key, _Pending] = {}
        self._joined: list[int] = []
        self._left: dict[int, str] = {}

    def ask(self, rank: int, request: Request, now: float) -> list[Verdict]:
        """Mind that `rank` asks for an operation; what can be done now."""
        if request.members not in self.members:
            why = f"there is no process set {request.members}: it was removed."
            text = f"{request.kind} {request.name!r} cannot be done: {why}"
            return [Verdict(to=(rank,), request=request, error=text)]
        pending = self._pending.setdefault(request.key, _Pending(now))
        pending.asked[rank] = request
        if request.kind == JOIN:
            self._joined.append(rank)
            others = [key for key in self._pending if key != request.key]
            return list(self._ready([*others, request.key]))
        return list(self._ready([request.key]))

    def leave(self, rank: int, why: str) -> list[Verdict]:
        """Mind that `rank` takes part in nothing any more; what has become impossible."""
        self._left.setdefault(rank, why)
        return list(self._ready(list(self._pending)))

    def overdue(self, now: float, patience: float) -> list[Verdict]:
        """What has waited for longer than `patience` seconds is given up."""
        late = [key for key, since in self._waits() if now - since > patience]
        return [
            self._refuse(
                key,
                f"waited {patience:g} s for {named(self._missing(key))}. Every rank must ask for "
                "the same operations; --timeout sets how long to wait.",
            )
            for key in late
        ]

    def stalled(self, now: float, after: float) -> list[tuple[Request, list[int]]]:
        """What has waited for longer than `after` seconds, and for whom; each is told once."""
        found = []
        for key, since in self._waits():
            pending = self._pending[key]
            if not pending.warned and now - since > after:
                pending.warned = True
                found.append((next(iter(pending.asked.values())), self._missing(key)))
        return found

    @property
    def oldest(self) -> float | None:
        """Since when the longest wait lasts; None where nobody waits."""
        return min((since for _, since in self._waits()), default=None)

    def _waits(self) -> list[tuple[Key, float]]:
        """What waits, and since when. Who has joined may wait for as long as others have data."""
        return [(key, pending.since) for key, pending in self._pending.items() if key != JOINED]

    def _missing(self, key: Key) -> list[int]:
        asked = self._pending[key].asked
        return [r for r in self.members[key[0]] if r not in asked and not self._is_joined(key, r)]

    def _is_joined(self, key: Key, rank: int) -> bool:
        """Whether `rank` need not ask; only operations of all ranks know of that."""
        return key[0] == 0 and rank in self._joined

    def _ready(self, keys: Sequence[Key]) -> Iterator[Verdict]:
        for key in keys:
            asked = self._pending[key].asked
            request = next(iter(asked.values()))
            gone = [r for r in self.members[key[0]] if r in self._left and r not in asked]
            if gone:
                yield self._refuse(key, f"cannot be done: {self._left[gone[0]]}")
            elif request.kind == JOIN:
                if len(asked) == len(self.members[0]):
                    yield self._join(key)
            elif not self._missing(key):
                verdict = self._decide(key)
                if request.kind == REMOVE and not verdict.error:
                    yield from self._abandon(verdict.number)
                yield verdict

    def _decide(self, key: Key) -> Verdict:
        asked = self._pending[key].asked
        members = self.members[key[0]]
        joined = [rank for rank in members if rank not in asked]
        request = asked[min(asked)]
        if found := difference(asked):
            return self._refuse(key, found, whole=True)
        if joined and (request.kind not in REDUCTIONS or request.op == "Adasum"):
            what = "Adasum" if request.op == "Adasum" else request.kind
            return self._refuse(
                key, f"cannot be done while {named(joined)} has joined: {what} needs all ranks."
            )
        if request.kind in (ADD, REMOVE) and (fault := self._fault(request)):
            return self._refuse(key, fault, whole=True, mistake=True)
        number = self._change(request)
        del self._pending[key]
        nothing = [0] * len(request.rows())
        rows = [asked[rank].rows() if rank in asked else nothing for rank in members]
        notes = {rank: one.note for rank, one in asked.items() if one.note}
        return Verdict(to=members, request=request, rows=rows, number=number, notes=notes)

    def _abandon(self, number: int) -> Iterator[Verdict]:
        """What waits in a process set that is no more."""
        for key in [key for key in self._pending if key[0] == number]:
            yield self._refuse(key, f"cannot be done: process set {number} was removed.")

    def _change(self, request: Request) -> int:
        """Add or remove a process set; its number."""
        if request.kind == REMOVE:
            del self.members[request.root]
            return request.root
        if request.kind == ADD:
            self.members[self._next] = request.splits
            self._next += 1
            return self._next - 1
        return 0

    def _fault(self, request: Request) -> str:
        if request.kind == REMOVE and request.root not in self.members:
            return f"there is no process set {request.root}."
        same = [number for number, ranks in self.members.items() if ranks == request.splits]
        if request.kind == ADD and same:
            return f"process set {same[0]} has the ranks {list(request.splits)} already."
        return ""

    def _join(self, key: Key) -> Verdict:
        last = self._joined[-1]
        self._joined.clear()
        asked = self._pending.pop(key).asked
        return Verdict(to=self.members[0], request=asked[last], number=last)

    def _refuse(self, key: Key, why: str, *, whole: bool = False, mistake: bool = False) -> Verdict:
        """The end of an operation for those that asked; `whole` where `why` names it itself."""
        asked = self._pending.pop(key).asked
        request = asked[min(asked)]
        text = why if whole else f"{request.kind} {request.name!r} {why}"
        return Verdict(to=tuple(sorted(asked)), request=request, error=text, mistake=mistake)
