"""Implements rank 0's coordinator, which matches all ranks' requests and orders the operations.

Ranks request operations by name, in any order. An operation is ready when every member of its
process set has requested it. The operation that is ready first is executed first, on all ranks:

    rank 1   b, a ─┐
    rank 2   a, b ─┼─▶ coordinator ─▶ responses: b, a ─▶ all ranks
    rank 0   b, a ─┘

A rank that has called `join` contributes zeros to every allreduce, without a request. This module
neither communicates nor reads the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardwise.watch.wait_graph import named

OperationKey = tuple[int, str, str]
"""Identity of an operation: process set, kind (only if it has no tensors) and name."""

JOIN = "join"
"""The kind and name of the request of a rank that has no more data."""

JOIN_KEY: OperationKey = (0, JOIN, JOIN)


@dataclass(frozen=True, kw_only=True)
class OperationRequest:
    """One rank's request for an operation on a tensor or a group of tensors."""

    name: str
    kind: str
    process_set: int = 0
    """Number of the process set."""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = "cpu"
    op: str = ""
    """Name of the ReduceOp."""
    scale: tuple[float, float] = (1.0, 1.0)
    """Factors before and after the reduction."""
    root: int = 0
    """The run rank that sends in a broadcast, or the number of a process set to remove."""
    splits: tuple[int, ...] = ()
    """Rows for each member of an alltoall, or the ranks of a new process set."""
    layout: str = ""
    """Anything else that must be identical on all ranks, in words."""
    note: Mapping[str, str] = field(default_factory=dict)
    """Values that rank 0 compares (script_checks.py)."""

    @property
    def key(self) -> OperationKey:
        """The operation's identity. Requests with the same key are for the same operation."""
        # An operation without tensors is also identified by its kind, so that a tensor may have any
        # name, even "join".
        return self.process_set, "" if self.shapes else self.kind, self.name

    def rows(self) -> list[int]:
        """Return the row counts, which may differ between ranks.

        For an alltoall, these are the numbers of rows for each member. For other operations, they
        are the numbers of rows of each tensor.
        """
        if self.kind == "alltoall":
            return list(self.splits)
        return [shape[0] if shape else 1 for shape in self.shapes]

    def as_json(self) -> dict[str, Any]:
        """Return the request as plain values, for a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OperationRequest:
        """Create a request from the result of `as_json`."""
        shapes = tuple(tuple(shape) for shape in values["shapes"])
        lists = {name: tuple(values[name]) for name in ("dtypes", "scale", "splits")}
        return cls(**{**values, **lists, "shapes": shapes})


UNEVEN_ROWS = ("allgather", "alltoall", "sparse_allreduce")
"""Kinds of operations that accept a different number of rows from each rank."""


def difference(requests: Mapping[int, OperationRequest]) -> str:
    """Return an error message if requests with the same name do not match, otherwise ""."""
    ranks = sorted(requests)
    for texts in zip(*(_describe_parts(requests[rank]) for rank in ranks), strict=True):
        if len(set(texts)) > 1:
            by_text = {
                text: [r for r, t in zip(ranks, texts, strict=True) if t == text]
                for text in dict.fromkeys(texts)
            }
            what = " and ".join(f"{text} on {named(by_text[text])}" for text in by_text)
            return f"{requests[ranks[0]].name!r} is {what}: it must be the same on all ranks."
    return ""


def _describe_parts(request: OperationRequest) -> tuple[str, ...]:
    """Describe the parts of a request that must be identical on all ranks, most important first."""
    kind, count = request.kind, len(request.shapes)
    tensors = []
    for shape, dtype in zip(request.shapes, request.dtypes, strict=True):
        sizes = list(map(str, shape))
        if kind in UNEVEN_ROWS and sizes:
            sizes[:1] = ["*"]
        tensors.append(f"{dtype} of shape ({', '.join(sizes)})")
    before, after = request.scale
    scaled = f", scaled by {before:g} before and {after:g} after"
    return (
        f"{kind} of {count} tensors" if count > 1 else kind,
        f"{kind} of {', '.join(tensors)} on {request.device}",
        f"{kind} with op {request.op}{'' if request.scale == (1.0, 1.0) else scaled}",
        f"{kind} from rank {request.root}",
        "" if kind == "alltoall" else f"{kind} {list(request.splits)}",
        f"{kind} of {request.layout}",
    )


ADD_PROCESS_SET = "process set to add"
REMOVE_PROCESS_SET = "process set to remove"

REDUCTIONS = ("allreduce", "sparse_allreduce")
"""Kinds of operations that continue without the ranks that have joined, as if they sent zeros."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """A process set's next operation, or an error."""

    ranks: tuple[int, ...]
    """The ranks to send it to."""
    request: OperationRequest
    """The request of one of the members."""
    rows: Sequence[Sequence[int]] = ()
    """`OperationRequest.rows()` of each member, with zeros for ranks that have joined."""
    number: int = 0
    """Number of a new process set, or the rank that joined last."""
    error: str = ""
    is_bad_call: bool = False
    """True if the error is a mistake in the script, which no retry can fix."""
    notes: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """The notes of the requesting ranks, which are not sent."""

    def as_json(self) -> dict[str, Any]:
        """Return the response as plain values, for a message."""
        return asdict(replace(self, notes={}))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Response:
        """Create a response from the result of `as_json`."""
        request = OperationRequest.from_json(values["request"])
        return cls(**{**values, "request": request, "ranks": tuple(values["ranks"])})


@dataclass
class _Pending:
    """An operation and its requests so far. The first one arrived at time `since` (in seconds)."""

    since: float
    requests: dict[int, OperationRequest] = field(default_factory=dict)
    warned: bool = False


class Coordinator:
    """Table of pending requests from `size` ranks."""

    def __init__(self, size: int) -> None:
        self.members: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        """The ranks of each process set. Process set 0 contains all ranks."""
        self._next_number = 1
        self._pending: dict[OperationKey, _Pending] = {}
        self._joined: list[int] = []
        self._gone: dict[int, str] = {}

    def add_request(self, rank: int, request: OperationRequest, now: float) -> list[Response]:
        """Record a request from `rank`, and return the responses that are now ready."""
        if request.process_set not in self.members:
            why = f"process set {request.process_set} does not exist: it was removed."
            text = f"{request.kind} {request.name!r} cannot be done: {why}"
            return [Response(ranks=(rank,), request=request, error=text)]
        pending = self._pending.setdefault(request.key, _Pending(now))
        pending.requests[rank] = request
        if request.kind == JOIN:
            self._joined.append(rank)
            # A join may complete operations that waited for this rank. The join itself is last.
            others = [key for key in self._pending if key != request.key]
            return list(self._ready([*others, request.key]))
        return list(self._ready([request.key]))

    def remove_rank(self, rank: int, why: str) -> list[Response]:
        """Record that `rank` has exited, and return errors for operations that wait for it."""
        self._gone.setdefault(rank, why)
        return list(self._ready(list(self._pending)))

    def time_out(self, now: float, patience: float) -> list[Response]:
        """Return errors for operations that have waited longer than `patience` seconds."""
        late = [key for key, since in self._waits() if now - since > patience]
        return [
            self._fail(
                key,
                f"waited {patience:g} s for {named(self._missing(key))}. Every rank must request "
                "the same operations; --timeout sets how long to wait.",
            )
            for key in late
        ]

    def stalled(self, now: float, after: float) -> list[tuple[OperationRequest, list[int]]]:
        """Return operations that have waited longer than `after` seconds, with the missing ranks.

        Each operation is returned only once.
        """
        found = []
        for key, since in self._waits():
            pending = self._pending[key]
            if not pending.warned and now - since > after:
                pending.warned = True
                found.append((next(iter(pending.requests.values())), self._missing(key)))
        return found

    @property
    def waiting_since(self) -> float | None:
        """The time when the oldest pending operation began to wait, or None if nothing waits."""
        return min((since for _, since in self._waits()), default=None)

    def _waits(self) -> list[tuple[OperationKey, float]]:
        """Return the pending operations, each with the time when it began to wait.

        `join` is omitted, because it may wait for as long as other ranks have data.
        """
        return [(key, pending.since) for key, pending in self._pending.items() if key != JOIN_KEY]

    def _missing(self, key: OperationKey) -> list[int]:
        requests, number = self._pending[key].requests, key[0]
        # After a join, a rank need not request operations of the set of all ranks. It must still
        # request the operations of other process sets.
        joined = self._joined if number == 0 else []
        return [r for r in self.members[number] if r not in requests and r not in joined]

    def _ready(self, keys: Sequence[OperationKey]) -> Iterator[Response]:
        for key in keys:
            requests = self._pending[key].requests
            request = next(iter(requests.values()))
            gone = [r for r in self.members[key[0]] if r in self._gone and r not in requests]
            if gone:
                yield self._fail(key, f"cannot be done: {self._gone[gone[0]]}")
            elif request.kind == JOIN:
                if len(requests) == len(self.members[0]):
                    last = self._joined[-1]
                    self._joined.clear()
                    del self._pending[key]
                    yield Response(ranks=self.members[0], request=requests[last], number=last)
            elif not self._missing(key):
                response = self._respond(key)
                if request.kind == REMOVE_PROCESS_SET and not response.error:
                    # Fail them before the removal, because afterwards no rank has a transport for
                    # them.
                    number = response.number
                    for left in [left for left in self._pending if left[0] == number]:
                        why = f"cannot be done: process set {number} was removed."
                        yield self._fail(left, why)
                yield response

    def _respond(self, key: OperationKey) -> Response:
        requests = self._pending[key].requests
        members = self.members[key[0]]
        joined = [rank for rank in members if rank not in requests]
        request = requests[min(requests)]  # any of them, if all match
        if found := difference(requests):
            return self._fail(key, found, names_it=True)
        if joined and (request.kind not in REDUCTIONS or request.op == "Adasum"):
            what = "Adasum" if request.op == "Adasum" else request.kind
            return self._fail(
                key, f"cannot be done while {named(joined)} has joined: {what} needs all ranks."
            )
        if request.kind in (ADD_PROCESS_SET, REMOVE_PROCESS_SET) and (
            fault := self._why_refused(request)
        ):
            return self._fail(key, fault, names_it=True, is_bad_call=True)
        number = self._change_process_sets(request)
        del self._pending[key]
        nothing = [0] * len(request.rows())  # the rows of a rank that has joined
        rows = [requests[rank].rows() if rank in requests else nothing for rank in members]
        notes = {rank: one.note for rank, one in requests.items() if one.note}
        return Response(ranks=members, request=request, rows=rows, number=number, notes=notes)

    def _change_process_sets(self, request: OperationRequest) -> int:
        """Add or remove a process set if `request` asks for it.

        Returns the number of that set, or 0 if no set has changed.
        """
        if request.kind == REMOVE_PROCESS_SET:
            del self.members[request.root]
            return request.root
        if request.kind == ADD_PROCESS_SET:
            self.members[self._next_number] = request.splits
            self._next_number += 1
            return self._next_number - 1
        return 0

    def _why_refused(self, request: OperationRequest) -> str:
        if request.kind == REMOVE_PROCESS_SET and request.root not in self.members:
            return f"process set {request.root} does not exist."
        same = [number for number, ranks in self.members.items() if ranks == request.splits]
        if request.kind == ADD_PROCESS_SET and same:
            return f"process set {same[0]} already has the ranks {list(request.splits)}."
        return ""

    def _fail(
        self, key: OperationKey, why: str, *, names_it: bool = False, is_bad_call: bool = False
    ) -> Response:
        """Return an error for all ranks that have requested `key`.

        `names_it` is True if `why`, the reason, already names the operation.
        """
        requests = self._pending.pop(key).requests
        request = requests[min(requests)]
        text = why if names_it else f"{request.kind} {request.name!r} {why}"
        return Response(
            ranks=tuple(sorted(requests)), request=request, error=text, is_bad_call=is_bad_call
        )
