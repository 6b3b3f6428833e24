"""Implements the life cycle of a gradient bucket, from its first gradient to the update.

    begin ─▶ FILLING     mark_ready for each gradient, then collect
               │
               ├─ launch ─▶ LAUNCHED ─ settle ─▶ SUMMED ─ consume ─▶ CONSUMED
               └─ launch ─▶ HELD (the backward pass does not reduce)
                              └─ launch_held ─▶ LAUNCHED

`begin` of the next micro-batch leads from any state to FILLING, even while the collective of the
previous one is in flight. `launch_late` starts a second collective: SUMMED ─▶ LAUNCHED.

A bucket collects gradients in a flat buffer. Replicated gradients have a permanent buffer (`kept`),
in which micro-batches accumulate. Sharded gradients, and all gradients in the exact mode, borrow a
buffer for one reduction. The bucket stores only the sum of the elements that this rank updates
(`reduced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from shardwise.comm import Handle
from shardwise.errors import ModelError
from shardwise.layout.bucket_layout import Bucket, Span, even_cuts
from shardwise.model.precision import NARROW
from shardwise.states.gradients.bucket_views import BucketViews
from shardwise.states.gradients.gradient_sum import GradientSum, SquareSum
from shardwise.states.gradients.reduction_queue import Buffer, Launch, ReductionQueue
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters_at_rest import unguarded
from shardwise.states.storage.storage import MemoryStorage, Storage
from shardwise.states.storage.storage_factory import TensorKind
from shardwise.timeline import recorder

SMALL = 1 << 14
"""Gradients of at most this many elements wait until their bucket is launched, and are copied in
one call. A larger gradient is copied when it arrives, while it is in the processor's cache."""

SENT_APART = 1 << 19
"""Gradients of at least this many elements are sent in separate messages, if that saves a copy."""


class BucketState(Enum):
    """State of a bucket in the current step. The module docstring shows the transitions."""

    FILLING = auto()
    HELD = auto()
    LAUNCHED = auto()
    SUMMED = auto()
    CONSUMED = auto()


@dataclass(frozen=True)
class Backward:
    """The settings of a backward pass, which apply to all gradients in a bucket."""

    reduces: bool
    """True if buckets are reduced across ranks in this backward pass."""
    is_first: bool
    """True if no bucket has been launched in this step, so that a kept buffer holds no sum yet."""
    empty: bool = False
    """True if the loss weight is zero, so that the gradients (possibly NaN) are discarded."""
    factor: float | Tensor | None = None
    """Factor for all gradients; None means 1."""
    is_zero: Tensor | None = None
    """Boolean tensor in place of `empty`, if the loss weight is known only on the device."""

    def weighted(self, grad: Tensor) -> Tensor:
        """Return `grad` times `factor`, or zeros if the loss weight is zero.

        If there is a factor, 16-bit values become fp32.
        """
        grad = self._multiplied([grad])[0]
        # `where`, because multiplying by zero would keep a NaN.
        return grad if self.is_zero is None else torch.where(self.is_zero, 0.0, grad)

    def _multiplied(self, grads: list[Tensor]) -> list[Tensor]:
        factor = self.factor
        if factor is None:
            return grads
        # Multiply in fp32, so that only the write into the bucket rounds to 16 bits.
        grads = [grad.float() if grad.dtype in NARROW else grad for grad in grads]
        if isinstance(factor, Tensor):
            return list(torch._foreach_mul(grads, factor.to(grads[0].dtype)))
        return list(torch._foreach_mul(grads, factor))

    def put(self, grad: Tensor, target: Tensor, *, adds: bool) -> None:
        """Write the weighted `grad` to `target`, or add it to `target` if `adds` is true.

        If the loss weight is known only on the device, gradients written here are not zeroed yet.
        `clean` zeroes them, once per bucket.
        """
        if adds:
            target.add_(self.weighted(grad))
        elif self.factor is None:
            target.copy_(grad)
        elif grad.dtype == target.dtype and not (
            isinstance(self.factor, Tensor) and grad.dtype in NARROW
        ):
            # A single pass, without memory for the product. torch multiplies 16-bit numbers by a
            # Python number in fp32, but would first round a tensor factor to 16 bits.
            torch.mul(grad, self.factor, out=target)
        else:
            target.copy_(self._multiplied([grad])[0])

    def put_all(self, grads: list[Tensor], targets: list[Tensor]) -> None:
        """Write the weighted `grads` to `targets` in one call."""
        if targets:
            torch._foreach_copy_(targets, self._multiplied(grads))

    def add_all(self, grads: list[Tensor], targets: list[Tensor]) -> None:
        """Add the weighted `grads` to `targets` in one call."""
        if targets:
            several = self.is_zero is None
            weighted = self._multiplied(grads) if several else [self.weighted(g) for g in grads]
            torch._foreach_add_(targets, weighted)

    def clean(self, *written: Tensor | None) -> None:
        """Zero the `written` tensors if the loss weight is a device tensor that is zero."""
        for memory in written:
            if memory is not None and self.is_zero is not None:
                memory.masked_fill_(self.is_zero, 0.0)


class GradientBucket:
    """Collects, reduces and stores the gradients of one bucket on this rank.

    Args:
        index: Index of the bucket.
        layout: Layout of the bucket.
        named: The parameter of each slot.
        own: The span whose sum this rank needs: its interval, or the full bucket.
        kind: dtype and device of the buffers.
        kept: The permanent buffer of shape (numel,), or None if the bucket borrows buffers.
        total: Sum of the gradients over the step's micro-batches.
        square: Computes sums of squares.
        queue: Holds launched buckets and lends buffers.
        counts: False if another rank of the replica counts the squares of this bucket.
    """

    def __init__(
        self,
        index: int,
        layout: Bucket,
        named: Sequence[NamedParameter],
        own: Span,
        kind: TensorKind,
        kept: Tensor | None,
        total: GradientSum,
        square: SquareSum,
        queue: ReductionQueue,
        *,
        counts: bool,
    ) -> None:
        self.index = index
        self.layout = layout
        self.own = own
        self.kind = kind
        self.counts = counts
        self.state = BucketState.CONSUMED
        self.indices = [slot.parameter for slot in layout.slots]
        """Parameter index of each slot."""
        self.expected = len(layout.slots)
        """Number of arrivals to wait for in a backward pass. Initially one per parameter."""
        self.remaining = 0
        """Arrivals still missing in this backward pass. Negative if more arrived than expected."""
        self.late: list[int] = []
        """Slots whose gradient arrived after this backward pass had launched the bucket."""
        self.was_launched = False
        """True if a collective has been launched in this step."""
        self._named = named
        self._kept = None if kept is None else Buffer(kept)
        self._total = total
        self._square = square
        self._queue = queue
        first, end = layout.interval(queue.rank)
        # Every rank squares only its own interval, even if it has the full sum. Otherwise elements
        # would be counted several times in the norm.
        self._counted = (first - own[0], end - own[0])
        self._is_large = [slot.numel > SMALL for slot in layout.slots]
        self._sent_apart = [
            place
            for place, slot in enumerate(layout.slots)
            if queue.group.sends_pieces and slot.numel >= SENT_APART
        ]
        self._buffer: Buffer | None = None
        self._flat: Tensor | None = None
        """The part of the open buffer that this bucket uses: (numel,)."""
        self._onto: Tensor | None = None
        """Separate memory for the elements that this rank sums, if they are not in the buffer."""
        self._collected = [False] * len(layout.slots)
        """For each slot, whether its gradient of this backward pass has been collected."""
        self._uncopied: dict[int, Tensor] = {}
        """Slot -> flat gradient that is sent from autograd's memory without a copy."""
        self._is_filled = False
        """True if the kept buffer holds gradients of this step."""
        self._in_flight = 0
        self._squares: Tensor | None = None
        self._last_sent = Handle()
        """The last collective of the kept buffer. Other ranks may read the buffer until its
        `reusable` returns."""

    # -- filling --------------------------------------------------------------------------

    def begin(self, backward: Backward) -> None:
        """Start collecting the gradients of a backward pass."""
        self.state = BucketState.FILLING
        self._backward = backward
        self.remaining = self.expected
        self._collected = [False] * len(self._collected)

    def mark_ready(self, place: int) -> bool:
        """Record that slot `place` has a gradient in `param.grad`.

        Returns True if this was the last gradient that the bucket expected.
        """
        if self.state is not BucketState.FILLING:
            # The buffer may be in flight, so the gradient stays in `param.grad` until the backward
            # pass ends.
            self.late.append(place)
        elif self._is_large[place]:
            self._take_large(place)
        self.remaining -= 1
        return self.remaining == 0

    def _take_large(self, place: int) -> None:
        """Collect a slot's large gradient at once, while it is in the processor's cache."""
        with unguarded():
            grad = self._take_gradient(place)
        if grad is None:
            return
        again = self._collected[place]
        self._collected[place] = True
        if not again and (flat := self._sendable(place, grad)) is not None:
            self._uncopied[place] = flat
            return
        buffer = self._open()
        if (first := self._uncopied.pop(place, None)) is not None:
            # Second gradient for this slot. The first was going to be sent without a copy, so copy
            # it into the buffer and accumulate there.
            slot = self.layout.slots[place]
            buffer[slot.start : slot.end] = first
        views = self._views()
        for target, part in zip(views.targets[place], views.parts(place, grad), strict=True):
            self._backward.put(part, target, adds=again or self._adds)

    def _take_gradient(self, place: int) -> Tensor | None:
        """Remove a slot's gradient from its parameter. Return it, or None if it is discarded."""
        named = self._named[place]
        grad, named.parameter.grad = named.parameter.grad, None
        if grad is None or self._backward.empty:
            return None
        refuse_sparse(named, grad)
        return grad

    def _sendable(self, place: int, grad: Tensor) -> Tensor | None:
        """Return `grad`, weighted and flat, or None if it must be copied before it can be sent."""
        # A gradient that is held, or added to earlier ones, must be copied into the buffer.
        if place not in self._sent_apart or not self._backward.reduces or self._adds:
            return None
        value = self._backward.weighted(grad)
        dtype, device = self.kind
        if self._kept is not None and self._backward.is_first:
            dtype = self._kept.memory.dtype  # fp32 once sums are widened
        fits = (value.dtype, value.device) == (dtype, device)
        return self._named[place].flat(value) if fits else None

    @property
    def _adds(self) -> bool:
        """True if this backward pass adds to gradients that the kept buffer already holds."""
        return self._is_filled and self._kept is not None and self._backward.is_first

    def _open(self) -> Tensor:
        """Return the buffer for this backward pass: the kept one or a borrowed one."""
        if self._flat is None:
            if self._kept is not None and self._backward.is_first:
                self._buffer, self._flat = self._kept, self._kept.memory
            else:
                # After its first reduction, a kept buffer holds a sum over all ranks. If this rank
                # added a gradient to it, the next reduction would count the other ranks' parts
                # twice.
                self._buffer = self._queue.borrow(self.kind)
                self._flat = self._buffer.memory[: self.layout.numel]
                place = self._in_place()
                sums_apart = self._queue.scatters and self._queue.group.sums_onto
                if place is not None and sums_apart and (place.dtype, place.device) == self.kind:
                    # The transport adds the other ranks' parts onto this memory. Collecting this
                    # rank's interval there saves a copy afterwards.
                    self._onto = place
        return self._flat

    def _in_place(self) -> Tensor | None:
        """Return memory in which the next sum can be computed without a copy, or None.

        Only the first sum of a step can be computed in place.
        """
        storage = self._total.first
        free = self._kept is None and not self.was_launched
        return storage.tensor if free and isinstance(storage, MemoryStorage) else None

    def _views(self) -> BucketViews:
        assert self._buffer is not None
        assert self._flat is not None
        key = self.index, self._onto is not None
        if key not in self._buffer.views:
            self._buffer.views[key] = BucketViews(
                self.layout, self._named, self._flat, self.own, self._onto
            )
        return self._buffer.views[key]

    def collect(self) -> list[Tensor]:
        """Copy small gradients into the buffer in one call, and zero slots without a gradient.

        Returns the parts of the buffer that hold the small gradients.
        """
        buffer, views, adds = self._open(), self._views(), self._adds
        targets: dict[bool, list[Tensor]] = {False: [], True: []}
        grads: dict[bool, list[Tensor]] = {False: [], True: []}
        # Slots without a gradient must be zero, because the buffer has arbitrary content and
        # another rank may have a gradient for them. The padding is summed, too.
        absent = list(views.gaps)
        with unguarded():
            taken = [self._take_gradient(place) for place in range(len(views.targets))]
        for place, (parts, grad) in enumerate(zip(views.targets, taken, strict=True)):
            if grad is None:
                if not self._collected[place]:
                    absent += parts
                continue
            again = adds or self._collected[place]
            self._collected[place] = True
            targets[again] += parts
            grads[again] += views.parts(place, grad)
        self._backward.put_all(grads[False], targets[False])
        self._backward.add_all(grads[True], targets[True])
        if not adds:
            self._backward.clean(buffer, self._onto)
            if absent:
                # A borrowed buffer still holds another bucket's gradients.
                torch._foreach_zero_(absent)
        if self._buffer is self._kept:
            self._is_filled = True
        return targets[False] + targets[True]

    @property
    def used(self) -> list[int]:
        """Indices of the parameters whose gradients this backward pass has collected."""
        return [index for index, has in zip(self.indices, self._collected, strict=True) if has]

    def take_late(self, backward: Backward) -> list[tuple[int, Tensor]]:
        """Remove and return the gradients that arrived after the launch.

        Returns pairs (parameter index, gradient). Each gradient has its parameter's shape.
        `backward` is the current backward pass. It is an argument because `begin` is called only
        for the buckets that a backward pass fills.
        """
        self._backward = backward
        with unguarded():
            taken = [
                (self.indices[place], self._take_gradient(place))
                for place in dict.fromkeys(self.late)
            ]
        self.late.clear()
        return [(index, backward.weighted(grad)) for index, grad in taken if grad is not None]

    # -- reducing -------------------------------------------------------------------------

    def launch(self) -> None:
        """Launch the collective, or hold the gradients if this backward pass does not reduce."""
        if self._backward.reduces:
            assert self._buffer is not None
            self._start(self._buffer)
        else:
            self.state = BucketState.HELD
        self._close()

    def _close(self) -> None:
        """Drop the references to the buffer, so that the queue can lend it again or free it."""
        self._buffer = self._flat = self._onto = None
        self._uncopied = {}

    def launch_held(self) -> None:
        """Launch the kept buffer's collective, which no backward pass of this step has launched."""
        assert self._kept is not None
        self._start(self._kept)

    def launch_late(self, entries: Sequence[tuple[int, Tensor]]) -> None:
        """Launch a second collective, for late gradients only.

        Args:
            entries: Pairs (parameter index, gradient).
        """
        buffer = self._queue.borrow(self.kind)
        buffer.memory[: self.layout.numel].zero_()
        self._add(buffer, entries)
        self._start(buffer)

    def hold_late(self, entries: Sequence[tuple[int, Tensor]]) -> None:
        """Add late gradients to the kept buffer, which must not be in flight.

        Args:
            entries: Pairs (parameter index, gradient).
        """
        assert self._kept is not None
        self._add(self._kept, entries)

    def _add(self, buffer: Buffer, entries: Sequence[tuple[int, Tensor]]) -> None:
        # `_onto` is None here, so each slot has a single view, of its parameter's shape.
        self._buffer, self._flat = buffer, buffer.memory[: self.layout.numel]
        by_parameter = dict(zip(self.indices, self._views().targets, strict=True))
        for index, grad in entries:
            by_parameter[index][0].add_(grad)
        self._close()

    def _start(self, buffer: Buffer) -> None:
        queue, cuts = self._queue, self.layout.cuts
        flat, into = buffer.memory[: self.layout.numel], self._in_place()
        what = "reduce-scatter" if queue.scatters else "all-reduce"
        launched = recorder.launched(what, flat, self.index)
        if self._onto is not None:
            handle = queue.group.reduce_scatter_onto(self._onto, flat, cuts, queue.how)
        elif queue.scatters:
            handle = queue.group.reduce_scatter_pieces(
                self._pieces(flat), flat, cuts, queue.how, into=into
            )
        else:
            handle = queue.group.all_reduce_pieces(self._pieces(flat), flat, queue.how)
        handle.noted(launched)
        if buffer is self._kept:
            self._last_sent = handle
        in_place = buffer is self._kept or (into is not None and queue.scatters)
        self.state = BucketState.LAUNCHED
        self.was_launched = True
        self._in_flight += 1
        borrowed = buffer is not self._kept
        queue.push(Launch(self.index, self.settle, buffer, handle, in_place, borrowed))

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        """Return the memory of the bucket's elements in order, one tensor per message.

        Large gradients may be in autograd's memory. All others are in `flat`.
        """
        # Split by the layout alone: on another rank the same gradient may be in the buffer, and the
        # messages must match.
        pieces, end = [], 0
        for place in self._sent_apart:
            slot = self.layout.slots[place]
            if end < slot.start:
                pieces.append(flat[end : slot.start])
            pieces.append(self._uncopied.get(place, flat[slot.start : slot.end]))
            end = slot.end
        return pieces if pieces and end == self.layout.numel else [*pieces, flat[end:]]

    def settle(self, launch: Launch) -> None:
        """Wait for the reduction that `launch` started, and add its result to this step's sum."""
        self._in_flight -= 1  # first: the launch has left the queue, even if `wait` raises
        # On an accelerator, only the stream waits, not the host.
        launch.handle.wait()
        readers = [launch.handle]
        if launch.in_place:
            self._total.count_part()
        else:
            self._last_sent.reusable()  # another rank may still copy the first sum from `total`
            # (numel of `own`,). The remaining elements belong to other ranks.
            part = launch.buffer.memory[self.own[0] : self.own[1]]
            self._squares, read = self._total.add(part)
            readers.append(read)
        if launch.is_borrowed:
            self._queue.give_back(launch.buffer, readers)
        # With several micro-batches, the next one may already be filling the bucket or be in
        # flight.
        if self.state is BucketState.LAUNCHED and self._in_flight == 0:
            self.state = BucketState.SUMMED

    # -- the sum --------------------------------------------------------------------------

    @property
    def reduced(self) -> Storage:
        """The reduced gradient of the span `own`."""
        return self._total.total

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory that the bucket occupies between steps."""
        return self._total.nbytes if self._kept is None else self._kept.memory.nbytes

    def square(self) -> Tensor:
        """Return the gradient's sum of squares over this rank's own interval. The result is cached.

        It is an fp64 scalar on the gradient's device or, in the exact mode, a row of exact sums.
        """
        if self._squares is None:
            self._squares = self._square(self.reduced, self._counted)
        return self._squares

    def square_in_fp64(self) -> Tensor:
        """Return the sum of squares, computed in fp64 and moved to the CPU.

        This is slower than `square`, but does not overflow.
        """
        return self._square(self.reduced, self._counted, wide=True).cpu()

    def forget_squares(self) -> None:
        """Invalidate the cached sum of squares, because other code has changed the sum."""
        self._squares = None

    def nonfinite(self) -> set[int]:
        """Return the indices of parameters with a non-finite reduced gradient in the span `own`."""
        found = set()
        for first, value in self.reduced.read_spans():
            start = self.own[0] + first
            for piece in self.layout.pieces(start, start + value.numel()):
                part = value[piece.start - start : piece.end - start]
                if not torch.isfinite(part).all():
                    found.add(piece.parameter)
        return found

    # -- the end of a step ----------------------------------------------------------------

    def abandon(self) -> None:
        """Discard the gradients of a failed backward pass. Buffers in flight stay in the queue."""
        # A launched buffer belongs to the queue, even if the launch raised afterwards. If the
        # buffer were returned twice, two buckets would collect into it.
        filling = self.state is BucketState.FILLING
        if filling and self._buffer is not None and self._buffer is not self._kept:
            self._queue.give_back(self._buffer, ())
        self._close()

    def forget_calls(self) -> None:
        """Discard pending collectives, because their transport no longer exists."""
        self._last_sent = Handle()
        self._in_flight = 0

    def follow_group(self) -> None:
        """After ranks were lost, reassign the elements whose squares each rank computes."""
        queue = self._queue
        assert not queue.scatters
        cuts = even_cuts(self.layout.numel, queue.group.size)
        self._counted = cuts[queue.rank], cuts[queue.rank + 1]

    def consume(self) -> None:
        """Wait until no other rank reads the kept buffer, then discard this step's sum."""
        # Otherwise the next backward pass would overwrite memory that another rank still sums.
        # After a step's exchange this returns at once: no rank enters the exchange before it has
        # read all sums, and a rank's messages stay in order. An abandoned step has no exchange, so
        # it may wait here.
        self._last_sent.reusable()
        self.state = BucketState.CONSUMED
        self.was_launched = self._is_filled = False
        self.late.clear()
        self._squares = None
        self._total.clear()

    def widen(self) -> None:
        """Store 16-bit gradients in fp32 from the next step on."""
        if self.reduced.dtype not in NARROW:
            return
        if self._kept is None:
            self._total.widen()
        else:
            self._kept = Buffer(self._kept.memory.float())
            self._total = GradientSum(MemoryStorage(self._kept.memory[self.own[0] : self.own[1]]))


def refuse_sparse(named: NamedParameter, grad: Tensor) -> None:
    """Raise ModelError if `grad` is sparse."""
    if grad.layout != torch.strided:
        raise ModelError(
            f"The gradient of {named.name} is sparse, which flat buckets cannot hold. Build its "
            "embedding with sparse=False."
        )
