"""Gradients that travel together: the engine's flat buckets, negotiated by name.

    arrive ─▶ move into the flat buffer ─▶ the last one is here: ask for its allreduce ─▶ finish

After `finish` each `param.grad` is its part of the buffer, where the reduction has been made.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise import layout
from shardwise.errors import BadCall
from shardwise.horovod.asking import ReduceOp, ask, wait
from shardwise.horovod.compression import Compression, Compressor
from shardwise.horovod.context import current
from shardwise.horovod.handles import Handle
from shardwise.horovod.process_sets import ProcessSet
from shardwise.horovod.sparse_allreduce import no_rows, sparse_allreduce_async
from shardwise.horovod.streams import Moment, used_here
from shardwise.states.tracked import Tracked

SMALL = 1 << 14
"""Elements up to which gradients wait for their bucket and move together; a larger one moves as it
arrives, while it is in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How gradients travel: what is made of them, and among whom."""

    op: ReduceOp
    scale: tuple[float, float]
    process_set: ProcessSet
    compression: type[Compressor]
    narrow: bool
    """Whether floating gradients travel as fp16."""
    sparse_as_dense: bool


class Parcel(ABC):
    """Gradients that are reduced in one operation; `indices` are their parameters'."""

    indices: Sequence[int]

    def __init__(self, name: str, forms: Sequence[Tracked], way: Way) -> None:
        self.name = name
        self.forms = forms
        self.way = way
        self.missing = len(forms)
        self.launched = False
        self.handle: Handle | None = None
        self.sparse: set[int] = set()
        """Places of parameters that have a sparse gradient, though it travels dense."""

    def arrived(self, place: int) -> bool:
        """The gradient of a parameter is complete; whether all are."""
        self.take(place)
        self.missing -= 1
        return self.missing == 0

    @abstractmethod
    def take(self, place: int) -> None:
        """Mind a gradient while it is in the processor's cache."""

    @abstractmethod
    def launch(self, note: Mapping[str, str]) -> None:
        """Ask for the reduction; gradients that have not come are zeros."""

    @abstractmethod
    def finish(self) -> None:
        """Return when the reduced gradients are in `param.grad`."""

    def reset(self) -> None:
        """Make ready for the next gradients."""
        self.missing, self.launched = len(self.forms), False

    def ask(self, tensor: Tensor, note: Mapping[str, str]) -> None:
        """Ask for the reduction of a tensor, in place."""
        current().reduces = True
        self.launched = True
        self.handle = ask(
            "allreduce",
            [tensor],
            self.name,
            self.way.process_set,
            in_place=True,
            note=note,
            op=self.way.op.name,
            scale=self.way.scale,
            layout=f"parameters laid out as {self.digest}",
        )

    @property
    def digest(self) -> str:
        """What of its parameters must be the same on all ranks."""
        said = "\n".join(f"{f.name} {tuple(f.shape)} {f.strides} {f.dtype}" for f in self.forms)
        return hashlib.sha256(said.encode()).hexdigest()[:8]

    def gradient(self, place: int) -> Tensor:
        """That of a parameter, dense; zeros where it has none."""
        form = self.forms[place]
        grad = form.parameter.grad
        if grad is None:
            return torch.zeros_like(form.parameter, requires_grad=False)
        if grad.layout == torch.strided:
            return grad
        if not self.way.sparse_as_dense:
            raise BadCall(
                f"The gradient of {form.name} is sparse, and no nn.Embedding(sparse=True) has it, "
                "by which all ranks would know: write hvd.DistributedOptimizer(..., "
                "sparse_as_dense=True)."
            )
        self.sparse.add(place)
        return grad.to_dense()

    def show(self, place: int, reduced: Tensor) -> None:
        """Let a parameter have its reduced gradient, in the layout that its optimizer expects."""
        form = self.forms[place]
        form.parameter.grad = reduced.to_sparse(1) if place in self.sparse else reduced


class Bucket(Parcel):
    """Parameters of one dtype, laid end to end in one buffer for good."""

    def __init__(self, name: str, forms: Sequence[Tracked], way: Way, found: layout.Bucket) -> None:
        super().__init__(name, forms, way)
        first = forms[0]
        dtype = torch.float16 if way.narrow and first.dtype.is_floating_point else first.dtype
        background = current().background
        group = background.group(way.process_set.number())

        def made() -> tuple[Tensor, Moment]:
            buffer = group.allocate(found.numel, dtype, first.device)
            return buffer, Moment.now([buffer])

        self._buffer, zeroed = background.call(made)
        zeroed.before_now()  # on another stream than the one that gradients are moved on
        used_here([self._buffer])
        starts = [slot.start for slot in found.slots]
        pairs = list(zip(forms, starts, strict=True))
        self._views = [form.view(self._buffer, start) for form, start in pairs]
        self._wide: Tensor | None = None
        self._shown = self._views
        if dtype != first.dtype:
            self._wide = torch.empty_like(self._buffer, dtype=first.dtype)
            self._shown = [form.view(self._wide, start) for form, start in pairs]
        self._taken = [False] * len(forms)

    def take(self, place: int) -> None:
        if self.forms[place].parameter.numel() > SMALL:
            self._move([place])

    def launch(self, note: Mapping[str, str]) -> None:
        self._move([place for place, taken in enumerate(self._taken) if not taken])
        self.ask(self._buffer, note)

    def finish(self) -> None:
        assert self.handle is not None
        wait(self.handle)
        if self._wide is not None:
            self._wide.copy_(self._buffer)
        for form, shown in zip(self.forms, self._shown, strict=True):
            form.parameter.grad = shown
        for place in self.sparse:
            self.show(place, self._shown[place])

    def reset(self) -> None:
        super().reset()
        self._taken = [False] * len(self.forms)

    def _move(self, places: Sequence[int]) -> None:
        """Move gradients into the buffer, but for those that backward has put there."""
        grads = {place: self.gradient(place) for place in places}
        moved = [p for p in places if grads[p].data_ptr() != self._views[p].data_ptr()]
        if moved:
            torch._foreach_copy_([self._views[p] for p in moved], [grads[p] for p in moved])
        for place in places:
            self._taken[place] = True
            if self._wide is None:
                self.forms[place].parameter.grad = self._views[place]


class Single(Parcel):
    """One parameter, whose gradient a compressor of the user's own turns into what travels."""

    def take(self, place: int) -> None:
        """It stays where it is."""

    def launch(self, note: Mapping[str, str]) -> None:
        packed, self._context = self.way.compression.compress(self.gradient(0))
        self.ask(packed, note)

    def finish(self) -> None:
        assert self.handle is not None
        self.show(0, self.way.compression.decompress(wait(self.handle)[0], self._context))


class Rows(Parcel):
    """One parameter whose gradient is sparse, and travels as it is: rows that were used. A rank
    that used none gives none."""

    def take(self, place: int) -> None:
        """It stays where it is."""

    def launch(self, note: Mapping[str, str]) -> None:
        grad = self.forms[0].parameter.grad
        self._came_dense = grad is not None and grad.layout == torch.strided
        if grad is None:
            grad = no_rows(self.forms[0].parameter)
        elif self._came_dense:  # the weight is used by a layer that is dense, too
            grad = grad.to_sparse(1)
        op, process_set = self.way.op, self.way.process_set
        self.launched = True
        self.handle = sparse_allreduce_async(grad, self.name, op, process_set, note=note)

    def finish(self) -> None:
        assert self.handle is not None
        reduced = wait(self.handle)
        self.forms[0].parameter.grad = reduced.to_dense() if self._came_dense else reduced


def parcels(
    forms: Sequence[Tracked],
    groups: Sequence[int],
    sparse: Set[Tensor],
    capacity: int,
    way: Way,
    name: str,
) -> list[Parcel]:
    """The parcels of parameters `forms`; `sparse` are those whose gradients are.

    `groups` says by parameter which may share a parcel. A group of the user's own, above 0, is in
    one whatever its size; `capacity` in bytes bounds the others.
    """
    apart = [i for i, form in enumerate(forms) if form.parameter in sparse]
    if way.sparse_as_dense:
        apart = []
    rest = [index for index in range(len(forms)) if index not in set(apart)]
    found = _one_by_one(Rows, forms, apart, way, name)
    if way.compression in (Compression.none, Compression.fp16):
        found += _laid_out(forms, rest, groups, capacity, way, name)
    else:
        found += _one_by_one(Single, forms, rest, way, name)
    if way.sparse_as_dense:
        for parcel in found:
            places = enumerate(parcel.forms)
            parcel.sparse = {place for place, form in places if form.parameter in sparse}
    return found


def _laid_out(
    forms: Sequence[Tracked],
    indices: Sequence[int],
    groups: Sequence[int],
    capacity: int,
    way: Way,
    name: str,
) -> list[Parcel]:
    """Buckets of the parameters at `indices`."""
    found: list[Parcel] = []
    largest = sum(form.shape.numel() * form.dtype.itemsize + 64 for form in forms)
    for number in sorted({groups[index] for index in indices}, reverse=True):
        chosen = [index for index in indices if groups[index] == number]
        specs = [
            layout.Spec(
                name=forms[index].name,
                numel=forms[index].shape.numel(),
                itemsize=forms[index].dtype.itemsize,
                key=(forms[index].dtype, forms[index].device),
            )
            for index in chosen
        ]
        for bucket in layout.lay_out(specs, ranks=1, capacity=largest if number else capacity):
            held = [chosen[slot.parameter] for slot in bucket.slots]
            parcel = Bucket(f"{name}.{len(found)}", [forms[i] for i in held], way, bucket)
            parcel.indices = held
            found.append(parcel)
    return found


def _one_by_one(
    kind: type[Parcel], forms: Sequence[Tracked], indices: Sequence[int], way: Way, name: str
) -> list[Parcel]:
    """A parcel for each parameter at `indices`."""
    found: list[Parcel] = []
    for index in indices:
        parcel = kind(f"{name}.{forms[index].name}", [forms[index]], way)
        parcel.indices = [index]
        found.append(parcel)
    return found
