"""What a rank holds of a state between steps, and where: in memory, or on a disk.

`on_host` has what rests in the host's memory and is used on an accelerator.

A held interval is used span by span. In memory there is one span, the interval itself. On a disk
spans are cut so that a few of them are all the memory that it ever takes:

    take(0)   use   put(0)
      ahead(1)      take(1)   use   put(1)      read ahead, written behind
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.collectives import Handle
from shardwise.states.squares import squares
from shardwise.tiers.copy_stream import Beside
from shardwise.tiers.nvme import Loan, Store

SPAN = 4 * 2**20
"""Elements of a span on a disk: large enough for its full rate, small beside any model."""

Span = tuple[int, int]


class Held(ABC):
    """The elements of one bucket's interval; `spans` are counted from the interval's start."""

    spans: Sequence[Span]
    numel: int
    dtype: torch.dtype
    device: torch.device
    """Where a span is while it is in use."""
    memory: Tensor | None = None
    """The interval as it lies, where it lies in memory for good."""
    beside: Beside | None = None
    """Where it rests on the host and is used on an accelerator, what copies between them."""

    @abstractmethod
    def ahead(self, index: int) -> None:
        """Span `index` is needed soon."""

    @abstractmethod
    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Span `index`, to be read and changed until it is `put`; `fresh`: with anything in it."""

    @abstractmethod
    def put(self, index: int, *, changed: bool) -> None:
        """Span `index` is no longer in use."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes between steps."""

    def load(self, into: Tensor) -> None:
        """Copy the whole interval `into` a tensor of its length."""
        for index, (first, end) in enumerate(self.spans):
            if index + 1 < len(self.spans):
                self.ahead(index + 1)
            into[first:end].copy_(self.take(index))
            self.put(index, changed=False)

    def store(self, value: Tensor) -> None:
        """Take the whole interval from `value`."""
        for index, (first, end) in enumerate(self.spans):
            self.take(index, fresh=True).copy_(value[first:end])
            self.put(index, changed=True)

    def send(self, value: Tensor, into: Tensor) -> None:
        """Copy `value`, a span that was taken, `into` another interval's."""
        into.copy_(value)

    def add(self, part: Tensor, *, fresh: bool) -> tuple[Tensor | None, Handle]:
        """Add `part`, of the interval's length, or take it as it is if `fresh`.

        Returns the sum of squares of what is then held, or None where that can be looked at later;
        and what says by `reusable` when `part` may be written again.
        """
        told = []
        for index, (first, end) in enumerate(self.spans):
            value = self.take(index, fresh=fresh)
            if fresh:
                value.copy_(part[first:end])
            else:
                value.add_(part[first:end].to(value.device))
            told.append(squares(value))
            self.put(index, changed=True)
        return torch.stack(told).sum() if told else None, Handle()

    def cut(self, spans: Sequence[Span]) -> Held:
        """The same, used in `spans`."""
        assert list(self.spans) == list(spans), "spans on a disk are all cut alike"
        return self

    def widened(self) -> Held:
        """Room for the same in fp32, with anything in it."""
        raise AssertionError("what is on a disk is as wide as it will be needed")

    def loaded(self) -> Tensor:
        """The whole interval: itself where it is in memory, else a copy."""
        value = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        self.load(value)
        return value

    @property
    def nbytes(self) -> int:
        """Bytes that it takes where it rests."""
        return self.numel * self.dtype.itemsize


class InMemory(Held):
    """An interval that is a tensor; in one span, unless it goes with one that is on a disk."""

    def __init__(self, tensor: Tensor, spans: Sequence[Span] | None = None) -> None:
        self.tensor = self.memory = tensor
        self.spans = [(0, tensor.numel())] if spans is None else spans
        self.numel, self.dtype, self.device = tensor.numel(), tensor.dtype, tensor.device

    def ahead(self, index: int) -> None:
        """It is there."""

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """The span as it lies."""
        del fresh
        first, end = self.spans[index]
        return self.tensor[first:end]

    def put(self, index: int, *, changed: bool) -> None:
        """Nothing to do."""

    def add(self, part: Tensor, *, fresh: bool) -> tuple[Tensor | None, Handle]:
        """Add in one call; its squares can be looked at when they are needed."""
        if fresh:
            self.tensor.copy_(part)
        else:
            self.tensor.add_(part)
        return None, Handle()

    def cut(self, spans: Sequence[Span]) -> InMemory:
        """The same memory, used in `spans`."""
        return InMemory(self.tensor, spans)

    def widened(self) -> InMemory:
        """The same in fp32."""
        return InMemory(self.tensor.float())

    def loaded(self) -> Tensor:
        """The tensor itself."""
        return self.tensor

    @property
    def memory_bytes(self) -> int:
        """All of it."""
        return self.nbytes


class OnDisk(Held):
    """An interval whose spans are the records of a store, from record `first` on."""

    def __init__(
        self, store: Store, first: int, numel: int, dtype: torch.dtype, beside: Beside | None
    ) -> None:
        self.beside = beside
        self._store = store
        self._first = first
        self.spans = spans_of(numel)
        self.numel, self.dtype, self.device = numel, dtype, torch.device("cpu")
        self._loans: dict[int, Loan] = {}

    def ahead(self, index: int) -> None:
        """Start to read span `index`."""
        if index not in self._loans:
            self._loans[index] = self._store.read(self._first + index)

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Span `index`, once it is here."""
        if index not in self._loans:
            start = self._store.blank if fresh else self._store.read
            self._loans[index] = start(self._first + index)
        return self._loans[index].wait().view(self.dtype)

    def put(self, index: int, *, changed: bool) -> None:
        """Let go of span `index`; what was changed is written behind."""
        loan = self._loans.pop(index)
        if changed:
            loan.write()
        else:
            loan.give_back()

    @property
    def memory_bytes(self) -> int:
        """None: the store's few buffers serve all intervals."""
        return 0


def spans_of(numel: int) -> list[Span]:
    """Cut `numel` elements into spans for a disk."""
    return [(first, min(first + SPAN, numel)) for first in range(0, numel, SPAN)]


def record_bytes(numels: Sequence[int], itemsize: int) -> list[int]:
    """The sizes of a store's records for intervals of `numels` elements of `itemsize` bytes."""
    return [(end - first) * itemsize for numel in numels for first, end in spans_of(numel)]


def on_disk(
    store: Store,
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    besides: Sequence[Beside | None],
) -> list[OnDisk]:
    """The intervals that a store made for them holds, in order."""
    made, first = [], 0
    for numel, dtype, beside in zip(numels, dtypes, besides, strict=True):
        made.append(OnDisk(store, first, numel, dtype, beside))
        first += len(made[-1].spans)
    return made
