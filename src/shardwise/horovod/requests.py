"""What ranks ask for by name, and whether they ask for the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.watch.wait_graph import named

Key = tuple[int, str, str]
"""What operations are told apart by: process set, kind where there are no tensors, and name."""

JOIN = "join"
"""The kind, and the name, of saying that a rank has no more data."""

JOINED: Key = (0, JOIN, JOIN)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One operation as a rank asks for it.

    `kind` is what is done to the tensors of `shapes` and `dtypes`, one or a group; `members` the
    number of the process set. `op` says how values become one, times `scale`: before, and after.
    `root` is a rank of the run. `splits` has the rows that go to each member, or the ranks of a
    new process set. `layout` is anything else that must be alike, `note` what rank 0 looks at.
    """

    name: str
    kind: str
    members: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = "cpu"
    op: str = ""
    scale: tuple[float, float] = (1.0, 1.0)
    root: int = 0
    splits: tuple[int, ...] = ()
    layout: str = ""
    note: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What this operation is told apart by; a tensor may have any name."""
        return self.members, "" if self.shapes else self.kind, self.name

    def rows(self) -> list[int]:
        """What may differ between ranks: how many rows of each tensor this one has, or sends."""
        if self.kind == "alltoall":
            return list(self.splits)
        return [shape[0] if shape else 1 for shape in self.shapes]

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Request:
        """The way back."""
        shapes = tuple(tuple(shape) for shape in said["shapes"])
        lists = {name: tuple(said[name]) for name in ("dtypes", "scale", "splits")}
        return cls(**{**said, **lists, "shapes": shapes})


UNEVEN = ("allgather", "alltoall", "sparse_allreduce")
"""Kinds of which ranks may have different numbers of rows."""


def difference(asked: Mapping[int, Request]) -> str:
    """Why what ranks ask for under one name cannot be one operation; "" where it can."""
    for words in (_kind, _tensors, _op, _root, _splits, _layout):
        said = {rank: words(asked[rank]) for rank in sorted(asked)}
        if len(set(said.values())) > 1:
            name = next(iter(asked.values())).name
            return f"{name!r} is {_by_rank(said)}: it must be the same on all ranks."
    return ""


def _by_rank(said: Mapping[int, str]) -> str:
    texts = dict.fromkeys(said.values())
    parts = [f"{text} on {named([r for r, t in said.items() if t == text])}" for text in texts]
    return " and ".join(parts)


def _kind(request: Request) -> str:
    count = len(request.shapes)
    return f"{request.kind} of {count} tensors" if count > 1 else request.kind


def _tensors(request: Request) -> str:
    free = request.kind in UNEVEN
    tensors = zip(request.shapes, request.dtypes, strict=True)
    said = ", ".join(f"{dtype} of shape {_shape(shape, free)}" for shape, dtype in tensors)
    return f"{request.kind} of {said} on {request.device}"


def _shape(shape: tuple[int, ...], free: bool) -> str:
    sizes = ["*" if free and place == 0 else str(size) for place, size in enumerate(shape)]
    return f"({', '.join(sizes)})"


def _op(request: Request) -> str:
    before, after = request.scale
    if (before, after) == (1.0, 1.0):
        return f"{request.kind} with op {request.op}"
    return f"{request.kind} with op {request.op}, scaled by {before:g} before and {after:g} after"


def _root(request: Request) -> str:
    return f"{request.kind} from rank {request.root}"


def _splits(request: Request) -> str:
    return "" if request.kind == "alltoall" else f"{request.kind} {list(request.splits)}"


def _layout(request: Request) -> str:
    return f"{request.kind} of {request.layout}"
