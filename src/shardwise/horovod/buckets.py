"""Buckets of gradients, each reduced in one negotiated operation.

    gradient ─▶ copied into the flat buffer ─▶ bucket full: request its allreduce ─▶ finish

After `finish` each `param.grad` is a view of the buffer that was reduced.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.errors import BadCall
from shardwise.horovod.compression import Compression, Compressor
from shardwise.horovod.context import current
from shardwise.horovod.operation_handle import OperationHandle
from shardwise.horovod.operations import ReduceOp, submit, wait
from shardwise.horovod.process_sets import ProcessSet
from shardwise.horovod.sparse_allreduce import empty_sparse_gradient, sparse_allreduce_async
from shardwise.horovod.streams import StreamEvent, record_use
from shardwise.layout import bucket_layout
from shardwise.states.parameters.named_parameters import NamedParameter

SMALL = 1 << 14
"""Elements up to which gradients are copied together when their bucket is full; a larger one is
copied at once, while it is in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """How gradients are reduced, and over which ranks."""

    op: ReduceOp
    scale: tuple[float, float]
    process_set: ProcessSet
    compression: type[Compressor]
    narrow: bool
    """Whether floating gradients are sent as fp16."""
    sparse_as_dense: bool


class GradientBucket(ABC):
    """Gradients that are reduced in one operation; `indices` are those of their parameters."""

    indices: Sequence[int]

    def __init__(
        self, name: str, named: Sequence[NamedParameter], options: ReductionOptions
    ) -> None:
        self.name = name
        self.named = named
        self.options = options
        self.missing = len(named)
        self.launched = False
        self.handle: OperationHandle | None = None
        self.sparse: set[int] = set()
        """Positions of parameters that have a sparse gradient, though it is sent dense."""

    def arrived(self, position: int) -> bool:
        """Take a complete gradient; returns whether the bucket is full."""
        self.take(position)
        self.missing -= 1
        return self.missing == 0

    @abstractmethod
    def take(self, position: int) -> None:
        """Copy a gradient into the buffer, if that is better done at once."""

    @abstractmethod
    def launch(self, note: Mapping[str, str]) -> None:
        """Request the reduction; gradients that were not computed are zeros."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the reduced gradients are in `param.grad`."""

    def reset(self) -> None:
        """Prepare for the next step."""
        self.missing, self.launched = len(self.named), False

    def start(self, tensor: Tensor, note: Mapping[str, str]) -> None:
        """Request the reduction of `tensor`, in place."""
        current().reduces = True
        self.launched = True
        self.handle = submit(
            "allreduce",
            [tensor],
            self.name,
            self.options.process_set,
            in_place=True,
            note=note,
            op=self.options.op.name,
            scale=self.options.scale,
            layout=f"parameters laid out as {self.digest}",
        )

    @property
    def digest(self) -> str:
        """A digest of names, shapes and dtypes, which must be equal on all ranks."""
        said = "\n".join(f"{f.name} {tuple(f.shape)} {f.strides} {f.dtype}" for f in self.named)
        return hashlib.sha256(said.encode()).hexdigest()[:8]

    def gradient(self, position: int) -> Tensor:
        """The gradient of a parameter, dense; zeros where it has none."""
        entry = self.named[position]
        grad = entry.parameter.grad
        if grad is None:
            return torch.zeros_like(entry.parameter, requires_grad=False)
        if grad.layout == torch.strided:
            return grad
        if not self.options.sparse_as_dense:
            raise BadCall(
                f"The gradient of {entry.name} is sparse, and no nn.Embedding(sparse=True) has it, "
                "by which all ranks would know: write hvd.DistributedOptimizer(..., "
                "sparse_as_dense=True)."
            )
        self.sparse.add(position)
        return grad.to_dense()

    def show(self, position: int, reduced: Tensor) -> None:
        """Set `param.grad` to the reduced gradient, in the layout that its optimizer expects."""
        entry = self.named[position]
        entry.parameter.grad = reduced.to_sparse(1) if position in self.sparse else reduced


class FlatBucket(GradientBucket):
    """Parameters of one dtype, whose gradients lie end to end in one permanent buffer."""

    def __init__(
        self,
        name: str,
        named: Sequence[NamedParameter],
        options: ReductionOptions,
        found: bucket_layout.Bucket,
    ) -> None:
        super().__init__(name, named, options)
        first = named[0]
        dtype = torch.float16 if options.narrow and first.dtype.is_floating_point else first.dtype
        background = current().background
        group = background.group(options.process_set.number())

        def made() -> tuple[Tensor, StreamEvent]:
            buffer = group.allocate(found.numel, dtype, first.device)
            return buffer, StreamEvent.record([buffer])

        self._buffer, zeroed = background.call(made)
        zeroed.wait()  # zeroed on the thread's stream, filled on this one
        record_use([self._buffer])
        starts = [slot.start for slot in found.slots]
        pairs = list(zip(named, starts, strict=True))
        self._views = [entry.view(self._buffer, start) for entry, start in pairs]
        self._wide: Tensor | None = None
        self._shown = self._views
        if dtype != first.dtype:
            self._wide = torch.empty_like(self._buffer, dtype=first.dtype)
            self._shown = [entry.view(self._wide, start) for entry, start in pairs]
        self._taken = [False] * len(named)

    def take(self, position: int) -> None:
        if self.named[position].parameter.numel() > SMALL:
            self._move([position])

    def launch(self, note: Mapping[str, str]) -> None:
        self._move([position for position, taken in enumerate(self._taken) if not taken])
        self.start(self._buffer, note)

    def finish(self) -> None:
        assert self.handle is not None
        wait(self.handle)
        if self._wide is not None:
            self._wide.copy_(self._buffer)
        for entry, shown in zip(self.named, self._shown, strict=True):
            entry.parameter.grad = shown
        for position in self.sparse:
            self.show(position, self._shown[position])

    def reset(self) -> None:
        super().reset()
        self._taken = [False] * len(self.named)

    def _move(self, positions: Sequence[int]) -> None:
        """Copy gradients into the buffer, but for those that backward has written there."""
        grads = {position: self.gradient(position) for position in positions}
        moved = [p for p in positions if grads[p].data_ptr() != self._views[p].data_ptr()]
        if moved:
            torch._foreach_copy_([self._views[p] for p in moved], [grads[p] for p in moved])
        for position in positions:
            self._taken[position] = True
            if self._wide is None:
                self.named[position].parameter.grad = self._views[position]


class CompressedBucket(GradientBucket):
    """One parameter, whose gradient the user's own compressor turns into the tensor that is
    sent."""

    def take(self, position: int) -> None:
        """Leave the gradient where it is; `launch` compresses it."""

    def launch(self, note: Mapping[str, str]) -> None:
        packed, self._context = self.options.compression.compress(self.gradient(0))
        self.start(packed, note)

    def finish(self) -> None:
        assert self.handle is not None
        self.show(0, self.options.compression.decompress(wait(self.handle)[0], self._context))


class SparseBucket(GradientBucket):
    """One parameter with a sparse gradient, of which the used rows are sent. A rank that used none
    sends none."""

    def take(self, position: int) -> None:
        """Leave the gradient where it is; `launch` sends its rows."""

    def launch(self, note: Mapping[str, str]) -> None:
        grad = self.named[0].parameter.grad
        self._came_dense = grad is not None and grad.layout == torch.strided
        if grad is None:
            grad = empty_sparse_gradient(self.named[0].parameter)
        elif self._came_dense:  # the weight is used by a layer that is dense, too
            grad = grad.to_sparse(1)
        op, process_set = self.options.op, self.options.process_set
        self.launched = True
        self.handle = sparse_allreduce_async(grad, self.name, op, process_set, note=note)

    def finish(self) -> None:
        assert self.handle is not None
        reduced = wait(self.handle)
        self.named[0].parameter.grad = reduced.to_dense() if self._came_dense else reduced


def make_buckets(
    named: Sequence[NamedParameter],
    groups: Sequence[int],
    sparse: Set[Tensor],
    capacity: int,
    options: ReductionOptions,
    name: str,
) -> list[GradientBucket]:
    """The buckets of parameters `named`; `sparse` are the parameters with sparse gradients.

    `groups` has a number for each parameter; equal ones may share a bucket. A group of the user's
    own, above 0, is in one bucket whatever its size; `capacity` in bytes bounds the others.
    """
    apart = [i for i, entry in enumerate(named) if entry.parameter in sparse]
    if options.sparse_as_dense:
        apart = []
    rest = [index for index in range(len(named)) if index not in set(apart)]
    found = _one_by_one(SparseBucket, named, apart, options, name)
    if options.compression in (Compression.none, Compression.fp16):
        found += _laid_out(named, rest, groups, capacity, options, name)
    else:
        found += _one_by_one(CompressedBucket, named, rest, options, name)
    if options.sparse_as_dense:
        for bucket in found:
            positions = enumerate(bucket.named)
            bucket.sparse = {position for position, entry in positions if entry.parameter in sparse}
    return found


def _laid_out(
    named: Sequence[NamedParameter],
    indices: Sequence[int],
    groups: Sequence[int],
    capacity: int,
    options: ReductionOptions,
    name: str,
) -> list[GradientBucket]:
    """Flat buckets of the parameters at `indices`."""
    found: list[GradientBucket] = []
    largest = sum(entry.shape.numel() * entry.dtype.itemsize + 64 for entry in named)
    for number in sorted({groups[index] for index in indices}, reverse=True):
        members = [index for index in indices if groups[index] == number]
        specs = [
            bucket_layout.Spec(
                name=named[index].name,
                numel=named[index].shape.numel(),
                itemsize=named[index].dtype.itemsize,
                key=(named[index].dtype, named[index].device),
            )
            for index in members
        ]
        for found_layout in bucket_layout.lay_out(
            specs, ranks=1, capacity=largest if number else capacity
        ):
            held = [members[slot.parameter] for slot in found_layout.slots]
            bucket = FlatBucket(
                f"{name}.{len(found)}", [named[i] for i in held], options, found_layout
            )
            bucket.indices = held
            found.append(bucket)
    return found


def _one_by_one(
    kind: type[GradientBucket],
    named: Sequence[NamedParameter],
    indices: Sequence[int],
    options: ReductionOptions,
    name: str,
) -> list[GradientBucket]:
    """A bucket for each parameter at `indices`."""
    found: list[GradientBucket] = []
    for index in indices:
        bucket = kind(f"{name}.{named[index].name}", [named[index]], options)
        bucket.indices = [index]
        found.append(bucket)
    return found
