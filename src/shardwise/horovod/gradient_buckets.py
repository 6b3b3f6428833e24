"""Reduces the gradients of a `DistributedOptimizer` in buckets, during the backward pass.

    hook of a parameter ─▶ copy into the flat buffer ─▶ bucket full ─▶ request its allreduce
    optimizer.step      ─▶ request the other buckets ─▶ wait for all ─▶ param.grad are views

Each bucket is one negotiated operation. A gradient is complete after `passes` backward passes.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from weakref import WeakSet, ref

import torch
from torch import Tensor

from shardwise.errors import BadCall, HookOrder
from shardwise.horovod.compression import Compression, Compressor
from shardwise.horovod.context import current
from shardwise.horovod.operation_handle import OperationHandle
from shardwise.horovod.operations import ReduceOp, submit, wait
from shardwise.horovod.process_sets import ProcessSet
from shardwise.horovod.script_checks import Note
from shardwise.horovod.sparse_allreduce import empty_sparse_gradient, sparse_allreduce_async
from shardwise.horovod.streams import StreamEvent, record_use
from shardwise.layout import bucket_layout
from shardwise.states.parameters.named_parameters import NamedParameter

SMALL = 1 << 14
"""Largest gradient, in elements, that is copied together with others when its bucket is full.

A larger gradient is copied immediately, while it is in the CPU cache.
"""


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """Options of a reduction, and the ranks that take part."""

    op: ReduceOp
    scale: tuple[float, float]
    """Factors before and after the sum."""
    process_set: ProcessSet
    compression: type[Compressor]
    sparse_as_dense: bool


class HorovodBucket(ABC):
    """Gradients that are reduced in one operation.

    filling ── mark_ready, for each parameter ── launch ── finish ── reset: filling again

    `indices` are the positions of the bucket's parameters in the optimizer's list of parameters.
    """

    def __init__(
        self,
        name: str,
        indices: Sequence[int],
        named: Sequence[NamedParameter],
        options: ReductionOptions,
    ) -> None:
        self.name = name
        self.indices = indices
        self.named = [named[index] for index in indices]
        self.options = options
        self.missing = len(indices)
        self.handle: OperationHandle | None = None
        """The reduction, from `launch` to `reset`."""
        self.sparse: set[int] = set()
        """Positions of parameters whose sparse gradient is sent as a dense one."""
        # Rank 0 compares this digest, because buckets with different layouts would sum unrelated
        # gradients.
        described = (f"{f.name} {tuple(f.shape)} {f.strides} {f.dtype}" for f in self.named)
        digest = hashlib.sha256("\n".join(described).encode()).hexdigest()[:8]
        self._layout = f"parameters laid out as {digest}"

    def mark_ready(self, position: int) -> bool:
        """Record that gradient `position` is complete, and return whether the bucket is full."""
        self.missing -= 1
        return self.missing == 0

    @abstractmethod
    def launch(self, note: Note) -> None:
        """Request the reduction. A gradient that no backward pass has computed is sent as zeros."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the reduced gradients are in `param.grad`."""

    def reset(self) -> None:
        """Prepare the bucket for the next step."""
        self.missing, self.handle = len(self.named), None

    def _request(self, tensor: Tensor, note: Note) -> None:
        current().reduces = True
        options = self.options
        self.handle = submit(
            "allreduce",
            [tensor],
            self.name,
            options.process_set,
            in_place=True,
            note=note,
            op=options.op.name,
            scale=options.scale,
            layout=self._layout,
        )

    def _reduced(self) -> Sequence[Tensor]:
        assert self.handle is not None
        found: Sequence[Tensor] = wait(self.handle)
        return found

    def _dense_gradient(self, position: int) -> Tensor:
        """Return the gradient at `position` as a dense tensor, or zeros if there is none."""
        entry = self.named[position]
        grad = entry.parameter.grad
        if grad is None:
            return torch.zeros_like(entry.parameter, requires_grad=False)
        if grad.layout == torch.strided:
            return grad
        if not self.options.sparse_as_dense:
            raise BadCall(
                f"The gradient of {entry.name} is sparse, but the parameter belongs to no "
                "nn.Embedding(sparse=True), so other ranks cannot know this. Write "
                "hvd.DistributedOptimizer(..., sparse_as_dense=True)."
            )
        self.sparse.add(position)
        return grad.to_dense()

    def _show(self, position: int, reduced: Tensor) -> None:
        """Set `param.grad` to the reduced gradient, in the layout that the optimizer expects."""
        parameter = self.named[position].parameter
        parameter.grad = reduced.to_sparse(1) if position in self.sparse else reduced


class FlatBucket(HorovodBucket):
    """Parameters of one dtype, whose gradients are stored in one permanent, contiguous buffer."""

    def __init__(
        self,
        name: str,
        indices: Sequence[int],
        named: Sequence[NamedParameter],
        options: ReductionOptions,
        layout: bucket_layout.Bucket,
    ) -> None:
        super().__init__(name, indices, named, options)
        first = self.named[0]
        narrow = options.compression is Compression.fp16 and first.dtype.is_floating_point
        dtype = torch.float16 if narrow else first.dtype
        background = current().background
        group = background.group(options.process_set.number())

        def allocate() -> tuple[Tensor, StreamEvent]:
            buffer = group.allocate(layout.numel, dtype, first.device)
            return buffer, StreamEvent.record([buffer])

        # Allocate on the communication thread, because only that thread may use the transport.
        self._buffer, zeroed = background.call(allocate)
        zeroed.wait()  # the thread's stream zeroes the buffer before this stream fills it
        record_use([self._buffer])
        pairs = list(zip(self.named, (slot.start for slot in layout.slots), strict=True))
        self._views = [entry.view(self._buffer, start) for entry, start in pairs]
        self._wide: Tensor | None = None
        """The sums in the dtype of the parameters, if the buffer has a different dtype."""
        self._shown = self._views
        if dtype != first.dtype:
            self._wide = torch.empty_like(self._buffer, dtype=first.dtype)
            self._shown = [entry.view(self._wide, start) for entry, start in pairs]
        self._copied = [False] * len(self.named)

    def mark_ready(self, position: int) -> bool:
        if self.named[position].parameter.numel() > SMALL:
            self._copy([position])
        return super().mark_ready(position)

    def launch(self, note: Note) -> None:
        self._copy([position for position, copied in enumerate(self._copied) if not copied])
        self._request(self._buffer, note)

    def finish(self) -> None:
        self._reduced()
        if self._wide is not None:
            self._wide.copy_(self._buffer)
        for entry, shown in zip(self.named, self._shown, strict=True):
            entry.parameter.grad = shown
        for position in self.sparse:
            self._show(position, self._shown[position])

    def reset(self) -> None:
        super().reset()
        self._copied = [False] * len(self.named)

    def _copy(self, positions: Sequence[int]) -> None:
        """Copy gradients into the buffer, except those that autograd has accumulated there."""
        grads = {position: self._dense_gradient(position) for position in positions}
        # Unless the script has set it to None, `param.grad` is still a view of the buffer from the
        # previous step, and backward has written into the buffer.
        moved = [p for p in positions if grads[p].data_ptr() != self._views[p].data_ptr()]
        if moved:
            torch._foreach_copy_([self._views[p] for p in moved], [grads[p] for p in moved])
        for position in positions:
            self._copied[position] = True
            # Only if the dtypes are the same, because torch requires the dtype of the parameter.
            if self._wide is None:
                self.named[position].parameter.grad = self._views[position]


class CompressedBucket(HorovodBucket):
    """One parameter. A custom compressor converts its gradient to the tensor that is sent."""

    def launch(self, note: Note) -> None:
        packed, self._context = self.options.compression.compress(self._dense_gradient(0))
        self._request(packed, note)

    def finish(self) -> None:
        self._show(0, self.options.compression.decompress(self._reduced()[0], self._context))


class SparseBucket(HorovodBucket):
    """One parameter with a sparse gradient. Only the rows that were used are sent, if any."""

    def launch(self, note: Note) -> None:
        grad = self.named[0].parameter.grad
        # The gradient is dense if a dense layer uses the weight too.
        self._is_dense = grad is not None and grad.layout == torch.strided
        if grad is None:
            grad = empty_sparse_gradient(self.named[0].parameter)
        elif self._is_dense:
            grad = grad.to_sparse(1)
        op, process_set = self.options.op, self.options.process_set
        self.handle = sparse_allreduce_async(grad, self.name, op, process_set, note=note)

    def finish(self) -> None:
        assert self.handle is not None
        reduced: Tensor = wait(self.handle)
        self.named[0].parameter.grad = reduced.to_dense() if self._is_dense else reduced


def make_buckets(
    named: Sequence[NamedParameter],
    groups: Sequence[int],
    sparse: Set[Tensor],
    capacity: int,
    options: ReductionOptions,
    name: str,
) -> list[HorovodBucket]:
    """Create the buckets for the parameters `named`. Those in `sparse` have sparse gradients.

    `groups` contains a group number for each parameter. Only parameters of the same group share a
    bucket. Each user-defined group (numbered from 1) has a single bucket, of any size. The
    parameters of group 0 are divided into buckets of at most `capacity` bytes.
    """
    indices = list(range(len(named)))
    sent_sparse = [
        i for i in indices if named[i].parameter in sparse and not options.sparse_as_dense
    ]
    found: list[HorovodBucket] = [
        SparseBucket(f"{name}.{named[i].name}", [i], named, options) for i in sent_sparse
    ]
    rest = [index for index in indices if index not in set(sent_sparse)]
    if options.compression not in (Compression.none, Compression.fp16):
        found += [CompressedBucket(f"{name}.{named[i].name}", [i], named, options) for i in rest]
    else:
        everything = sum(entry.shape.numel() * entry.dtype.itemsize + 64 for entry in named)
        flat: list[HorovodBucket] = []
        for number in sorted({groups[index] for index in rest}, reverse=True):
            members = [index for index in rest if groups[index] == number]
            specs = [
                bucket_layout.Spec(
                    name=named[index].name,
                    numel=named[index].shape.numel(),
                    itemsize=named[index].dtype.itemsize,
                    key=(named[index].dtype, named[index].device),
                )
                for index in members
            ]
            size = everything if number else capacity
            for layout in bucket_layout.lay_out(specs, ranks=1, capacity=size):
                held = [members[slot.parameter] for slot in layout.slots]
                flat.append(FlatBucket(f"{name}.{len(flat)}", held, named, options, layout))
        found += flat
    if options.sparse_as_dense:
        for bucket in found:
            positions = enumerate(bucket.named)
            bucket.sparse = {position for position, entry in positions if entry.parameter in sparse}
    return found


# -- hooks on parameters --------------------------------------------------------------------------

_active: WeakSet[GradientHooks] = WeakSet()


class GradientHooks:
    """Hooks on the parameters `named`, which launch each bucket when its gradients are complete.

    Each hook counts its parameter's backward passes. After `passes` of them, the gradient is
    complete. The result of `note` is sent with the first request.
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        buckets: Sequence[HorovodBucket],
        passes: int,
        note: Callable[[], Note],
    ) -> None:
        self._buckets = buckets
        self._position_of = {
            index: (bucket, position)
            for bucket in buckets
            for position, index in enumerate(bucket.indices)
        }
        self._note: Callable[[], Note] | None = note
        self.passes = passes
        self._left = [passes] * len(named)
        self.started = False
        """True if a backward pass has run since the last `synchronize`."""
        self._is_replaced = False
        self._parameter_ids = {id(entry.parameter) for entry in named}
        self._hooks = []
        weak = ref(self)  # a strong reference in the hooks would keep the optimizer alive
        for index, entry in enumerate(named):

            def mark_ready(parameter: Tensor, index: int = index) -> None:
                if (hooks := weak()) is not None:
                    hooks.mark_ready(index)

            handle = entry.parameter.register_post_accumulate_grad_hook(mark_ready)  # type: ignore[no-untyped-call]
            self._hooks.append(handle)
        _active.add(self)

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes after which gradients are complete."""
        self.passes = passes
        self._left = [passes] * len(self._left)

    def mark_ready(self, index: int) -> None:
        """Record a backward pass of the parameter at `index`. Launches its bucket if it is full."""
        if self._left[index] <= 0:
            raise HookOrder(
                "Gradients were computed more than backward_passes_per_step "
                f"({self.passes}) times before optimizer.step(). Increase backward_passes_per_step "
                "to accumulate gradients, or call step() after each backward."
            )
        self.started = True
        self._left[index] -= 1
        if self._left[index] == 0:
            bucket, position = self._position_of[index]
            if bucket.mark_ready(position):
                self._launch(bucket)

    def synchronize(self) -> None:
        """Wait until every `param.grad` is reduced.

        Raises HookOrder if some of the parameters are now reduced by a newer optimizer.
        """
        if self._is_replaced:
            raise HookOrder(
                "A newer hvd.DistributedOptimizer has parameters of this one and reduces their "
                "gradients. Call only its step(), or give each parameter to one optimizer."
            )
        # Launch all buckets before waiting for any, because other ranks may already wait for a
        # bucket that this rank's backward pass has skipped.
        for bucket in self._buckets:
            if bucket.handle is None:
                self._launch(bucket)
        for bucket in self._buckets:
            bucket.finish()
        self.forget()

    def forget(self) -> None:
        """Reset the counters of all parameters and buckets for the next step."""
        for bucket in self._buckets:
            bucket.reset()
        self._left = [self.passes] * len(self._left)
        self.started = False

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        _active.discard(self)

    def _launch(self, bucket: HorovodBucket) -> None:
        note, self._note = self._note, None
        bucket.launch(note() if note is not None else {})

    @staticmethod
    def release(parameters: Iterable[Tensor]) -> None:
        """Remove older optimizers' hooks from `parameters`, which a new optimizer will reduce."""
        ids = {id(parameter) for parameter in parameters}
        for hooks in list(_active):
            if not ids.isdisjoint(hooks._parameter_ids):
                hooks.detach()
                hooks._is_replaced = True
