"""One bucket of gradients, from the first gradient of a backward to the update.

    begin ─▶ FILLING     mark_ready for each gradient, then collect
               │
               ├─ launch ─▶ LAUNCHED ─ settle ─▶ SUMMED ─ consume ─▶ CONSUMED
               └─ launch ─▶ HELD (the backward does not reduce)
                              └─ launch_held ─▶ LAUNCHED

`begin` of the next micro-batch leads from any of these to FILLING, also while the collective of the
one before is in flight. `launch_late` starts a second collective: SUMMED ─▶ LAUNCHED.

A bucket collects gradients in a flat buffer. Replicated gradients have a buffer for good (`kept`):
micro-batches add up in it. Sharded gradients, and all gradients in the exact mode, borrow a buffer
for one reduction. The bucket keeps the sum of the elements that this rank updates (`reduced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from shardwise.comm import Handle
from shardwise.errors import ModelError
from shardwise.layout.bucket_layout import Bucket, Span
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
"""Elements up to which gradients wait for their bucket and move together. A larger one moves when
it arrives, while it is in the processor's cache."""

SENT_APART = 1 << 19
"""Elements from which a gradient is worth messages of its own, where those save a copy."""


class BucketState(Enum):
    """What a bucket does in the present step; the module shows the transitions."""

    FILLING = auto()
    HELD = auto()
    LAUNCHED = auto()
    SUMMED = auto()
    CONSUMED = auto()


@dataclass(frozen=True)
class Backward:
    """The settings of one backward, the same for all of its gradients.

    `reduces`: buckets are sent to the other ranks in it. `is_first`: none was sent before in this
    step, so a kept buffer holds no sum. `empty`: its gradients (perhaps NaN) are thrown away; else
    they are multiplied by `factor`, None for 1. `is_zero` replaces `empty` if only the device knows
    the weight.
    """

    reduces: bool
    is_first: bool
    empty: bool = False
    factor: float | Tensor | None = None
    is_zero: Tensor | None = None

    def weighted(self, grad: Tensor) -> Tensor:
        """Return `grad` times the factor, in fp32 for 16-bit ones; zeros if the weight is zero."""
        grad = self._multiplied([grad])[0]
        # Selected, not multiplied: a product with zero would keep a NaN.
        return grad if self.is_zero is None else torch.where(self.is_zero, 0.0, grad)

    def _multiplied(self, grads: list[Tensor]) -> list[Tensor]:
        factor = self.factor
        if factor is None:
            return grads
        # In fp32, so that only the write into the bucket rounds to 16 bits.
        grads = [grad.float() if grad.dtype in NARROW else grad for grad in grads]
        if isinstance(factor, Tensor):
            return list(torch._foreach_mul(grads, factor.to(grads[0].dtype)))
        return list(torch._foreach_mul(grads, factor))

    def put(self, grad: Tensor, target: Tensor, *, adds: bool) -> None:
        """Write `grad`, weighted, to `target`, or add it to what is there.

        Written numbers do not become zero here: `clean` does that once for a whole bucket.
        """
        if adds:
            target.add_(self.weighted(grad))
        elif self.factor is None:
            target.copy_(grad)
        elif grad.dtype == target.dtype and not (
            isinstance(self.factor, Tensor) and grad.dtype in NARROW
        ):
            # One pass, and no memory for the product; 16-bit numbers are multiplied in fp32 here,
            # except by a tensor, which would be rounded to 16 bits.
            torch.mul(grad, self.factor, out=target)
        else:
            target.copy_(self._multiplied([grad])[0])

    def put_all(self, grads: list[Tensor], targets: list[Tensor]) -> None:
        """Write `grads`, weighted, to `targets`, in one call for all."""
        if targets:
            torch._foreach_copy_(targets, self._multiplied(grads))

    def add_all(self, grads: list[Tensor], targets: list[Tensor]) -> None:
        """Add `grads`, weighted, to `targets`, in one call for all."""
        if targets:
            several = self.is_zero is None
            weighted = self._multiplied(grads) if several else [self.weighted(g) for g in grads]
            torch._foreach_add_(targets, weighted)

    def clean(self, *written: Tensor | None) -> None:
        """Fill the `written` memory with zeros if the device finds the weight to be zero."""
        for memory in written:
            if memory is not None and self.is_zero is not None:
                memory.masked_fill_(self.is_zero, 0.0)


class GradientBucket:
    """Collects, reduces and keeps the gradients of one bucket on this rank.

    `own` are the elements whose sum this rank needs: its interval, or all of them. `named` are the
    parameters by slot; `kind` is the dtype and device of buffers. `square` computes sums of
    squares; with `counts` False, another rank of the replica counts those of this bucket.
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
        """Parameters by slot."""
        self.expected = len(layout.slots)
        """Arrivals to wait for in a backward; at first, one for each parameter."""
        self.remaining = 0
        """Arrivals that this backward still lacks; below zero once more arrive than expected."""
        self.late: list[int] = []
        """Slots whose gradient arrived after this backward had launched the bucket."""
        self.is_awaited = False
        """Whether a sum of this step was launched."""
        self._named = named
        self._kept = None if kept is None else Buffer(kept)
        self._total = total
        self._square = square
        self._queue = queue
        first, end = layout.interval(queue.rank)
        # If several ranks have the whole sum, each squares its own interval only: no element counts
        # twice.
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
        """Memory for the elements that this rank sums, where they are not in the buffer."""
        self._has = [False] * len(layout.slots)
        """By slot, whether a gradient of this backward has been taken."""
        self._elsewhere: dict[int, Tensor] = {}
        """By slot, the flat gradient that is sent from where autograd has put it."""
        self._is_filled = False
        """Whether the kept buffer holds gradients of this step."""
        self._in_flight = 0
        self._squares: Tensor | None = None
        self._last_sent = Handle()
        """The last collective of the kept buffer: other ranks may read it until `reusable`."""

    # -- filling --------------------------------------------------------------------------

    def begin(self, backward: Backward) -> None:
        """Start to collect the gradients of a backward."""
        self.state = BucketState.FILLING
        self._backward = backward
        self.remaining = self.expected
        self._has = [False] * len(self._has)

    def mark_ready(self, place: int) -> bool:
        """Note that slot `place` has a gradient in `param.grad`; return whether none is missing
        any more."""
        if self.state is not BucketState.FILLING:
            # The buffer may be in flight, so the gradient stays where it is until backward ends.
            self.late.append(place)
        elif self._is_large[place]:
            self._take_large(place)
        self.remaining -= 1
        return self.remaining == 0

    def _take_large(self, place: int) -> None:
        """Move the gradient of a slot now, while it is in the processor's cache."""
        with unguarded():
            grad = self._taken(place)
        if grad is None:
            return
        again = self._has[place]
        self._has[place] = True
        if not again and (flat := self._sendable(place, grad)) is not None:
            self._elsewhere[place] = flat
            return
        buffer = self._open()
        if (first := self._elsewhere.pop(place, None)) is not None:
            # Second gradient for this slot. The first was going to be sent from where it is, so
            # copy it into the buffer and accumulate there.
            slot = self.layout.slots[place]
            buffer[slot.start : slot.end] = first
        views = self._views()
        for target, part in zip(views.targets[place], views.parts(place, grad), strict=True):
            self._backward.put(part, target, adds=again or self._adds)

    def _taken(self, place: int) -> Tensor | None:
        """Take the gradient of a slot away from its parameter."""
        named = self._named[place]
        grad, named.parameter.grad = named.parameter.grad, None
        if grad is None or self._backward.empty:
            return None
        refuse_sparse(named, grad)
        return grad

    def _sendable(self, place: int, grad: Tensor) -> Tensor | None:
        """Return `grad`, weighted and flat, if it can be sent without a copy; else None."""
        if place not in self._sent_apart or not self._backward.reduces or self._adds:
            return None
        value = self._backward.weighted(grad)
        dtype, device = self.kind
        if self._kept is not None and self._backward.is_first:
            dtype = self._kept.memory.dtype  # wider than gradients are, once they add up in it
        fits = (value.dtype, value.device) == (dtype, device)
        return self._named[place].flat(value) if fits else None

    @property
    def _adds(self) -> bool:
        """Whether this backward adds to earlier gradients of the step, in the kept buffer."""
        return self._is_filled and self._kept is not None and self._backward.is_first

    def _open(self) -> Tensor:
        """Return the buffer that this backward collects into: the kept one, or a borrowed one."""
        if self._flat is None:
            if self._kept is not None and self._backward.is_first:
                self._buffer, self._flat = self._kept, self._kept.memory
            else:
                # After its first reduction a kept buffer holds a sum over the ranks. Adding a part
                # of this rank alone to it would count the other ranks' sums again.
                self._buffer = self._queue.borrow(self.kind)
                self._flat = self._buffer.memory[: self.layout.numel]
                self._onto = self._own_memory()
        return self._flat

    def _own_memory(self) -> Tensor | None:
        """Return where this rank's interval can be collected apart from the buffer, because the
        transport makes the sum there; None where it must be in the buffer."""
        place = self._in_place()
        if place is None or not (self._queue.scatters and self._queue.group.sums_onto):
            return None
        return place if (place.dtype, place.device) == self.kind else None

    def _in_place(self) -> Tensor | None:
        """Return memory that the next sum can be written to without a copy: the first of a step."""
        storage = self._total.first
        free = self._kept is None and not self.is_awaited
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
        """Move the small gradients into the buffer in one call, and zero what got none.

        Returns the memory that these gradients are in now.
        """
        buffer, views, adds = self._open(), self._views(), self._adds
        targets: dict[bool, list[Tensor]] = {False: [], True: []}
        grads: dict[bool, list[Tensor]] = {False: [], True: []}
        absent = list(views.gaps)
        with unguarded():
            taken = [self._taken(place) for place in range(len(views.targets))]
        for place, (parts, grad) in enumerate(zip(views.targets, taken, strict=True)):
            if grad is None:
                if not self._has[place]:
                    absent += parts
                continue
            again = adds or self._has[place]
            self._has[place] = True
            targets[again] += parts
            grads[again] += views.parts(place, grad)
        self._backward.put_all(grads[False], targets[False])
        self._backward.add_all(grads[True], targets[True])
        if not adds:
            self._backward.clean(buffer, self._onto)
            if absent:
                # A borrowed buffer holds another bucket's gradients.
                torch._foreach_zero_(absent)
        if self._buffer is self._kept:
            self._is_filled = True
        return targets[False] + targets[True]

    @property
    def used(self) -> list[int]:
        """The parameters whose gradients this backward has collected."""
        return [index for index, has in zip(self.indices, self._has, strict=True) if has]

    def take_late(self, backward: Backward) -> list[tuple[int, Tensor]]:
        """Take the gradients that arrived after the launch, each with its parameter.

        `backward` is the one under way: it may not fill this bucket otherwise.
        """
        self._backward = backward
        with unguarded():
            taken = [
                (self.indices[place], self._taken(place)) for place in dict.fromkeys(self.late)
            ]
        self.late.clear()
        return [(index, backward.weighted(grad)) for index, grad in taken if grad is not None]

    # -- reducing -------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the collective of what was collected; hold it if this backward does not reduce."""
        if self._backward.reduces:
            assert self._buffer is not None
            self._start(self._buffer)
        else:
            self.state = BucketState.HELD
        self._close()

    def _close(self) -> None:
        """Drop the references to the buffer, which the queue may lend to others or free."""
        self._buffer = self._flat = self._onto = None
        self._elsewhere = {}

    def launch_held(self) -> None:
        """Start the collective of the kept buffer, which no backward of this step has launched."""
        assert self._kept is not None
        self._start(self._kept)

    def launch_late(self, entries: Sequence[tuple[int, Tensor]]) -> None:
        """Start a second collective, of late gradients alone."""
        buffer = self._queue.borrow(self.kind)
        buffer.memory[: self.layout.numel].zero_()
        self._add(buffer, entries)
        self._start(buffer)

    def hold_late(self, entries: Sequence[tuple[int, Tensor]]) -> None:
        """Add late gradients to the kept buffer, which is not in flight."""
        assert self._kept is not None
        self._add(self._kept, entries)

    def _add(self, buffer: Buffer, entries: Sequence[tuple[int, Tensor]]) -> None:
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
        self.is_awaited = True
        self._in_flight += 1
        borrowed = buffer is not self._kept
        queue.push(Launch(self.index, self.settle, buffer, handle, in_place, borrowed))

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        """Cut the buffer at every gradient that may be elsewhere: on all ranks at the same places,
        because each piece is a message."""
        pieces, end = [], 0
        for place in self._sent_apart:
            slot = self.layout.slots[place]
            if end < slot.start:
                pieces.append(flat[end : slot.start])
            pieces.append(self._elsewhere.get(place, flat[slot.start : slot.end]))
            end = slot.end
        return pieces if pieces and end == self.layout.numel else [*pieces, flat[end:]]

    def settle(self, launch: Launch) -> None:
        """Wait for the sum of `launch`, and add it to this step's."""
        self._in_flight -= 1  # first: it counts launches in the queue, also if the wait raises
        # On an accelerator this makes the stream wait, not the host.
        launch.handle.wait()
        readers = [launch.handle]
        if launch.in_place:
            self._total.count_part()
        else:
            self._last_sent.reusable()  # another rank may still copy the first sum out of it
            part = launch.buffer.memory[self.own[0] : self.own[1]]
            self._squares, read = self._total.add(part)
            readers.append(read)
        if launch.is_borrowed:
            self._queue.give_back(launch.buffer, readers)
        # With several micro-batches the next one may fill the bucket by now, or be in flight.
        if self.state is BucketState.LAUNCHED and self._in_flight == 0:
            self.state = BucketState.SUMMED

    # -- the sum --------------------------------------------------------------------------

    @property
    def reduced(self) -> Storage:
        """The reduced gradient of the elements `own`."""
        return self._total.total

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps between steps."""
        return self._total.nbytes if self._kept is None else self._kept.memory.nbytes

    def square(self) -> Tensor:
        """Return the sum of squares of this rank's own interval: an fp64 scalar on its device, or
        the row of an exact sum. Computed once for each sum."""
        if self._squares is None:
            self._squares = self._square(self.reduced, self._counted)
        return self._squares

    def square_in_fp64(self) -> Tensor:
        """Return the same where squares of fp32 numbers overflow; slower, and on the CPU."""
        return self._square(self.reduced, self._counted, wide=True).cpu()

    def forget_squares(self) -> None:
        """Square the sum again when it is asked for: other code has changed it."""
        self._squares = None

    def nonfinite(self) -> set[int]:
        """Return the parameters whose reduced gradient is not finite in the elements `own`."""
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
        """Forget the gradients of a failed backward; a buffer in flight stays with the queue."""
        # Once launched, the buffer is the queue's, also if the launch has raised afterwards: given
        # back twice, two buckets would collect into it.
        filling = self.state is BucketState.FILLING
        if filling and self._buffer is not None and self._buffer is not self._kept:
            self._queue.give_back(self._buffer, ())
        self._close()

    def consume(self) -> None:
        """Forget the sum of this step, once no other rank reads a kept buffer any more.

        After a step's exchange that is known without waiting: no rank enters it before it has read
        all that it needs, and messages of one rank keep their order. A step that was abandoned has
        no exchange, and waits here.
        """
        self._last_sent.reusable()  # else a backward would write what another rank still sums
        self.state = BucketState.CONSUMED
        self.is_awaited = self._is_filled = False
        self.late.clear()
        self._squares = None
        self._total.clear()

    def widen(self) -> None:
        """Keep 16-bit gradients in fp32 from the next step on."""
        if self.reduced.dtype not in NARROW:
            return
        if self._kept is None:
            self._total.widen()
        else:
            self._kept = Buffer(self._kept.memory.float())
            self._total = GradientSum(MemoryStorage(self._kept.memory[self.own[0] : self.own[1]]))


def refuse_sparse(named: NamedParameter, grad: Tensor) -> None:
    """Raise ModelError for a gradient that no flat buffer can hold."""
    if grad.layout != torch.strided:
        raise ModelError(
            f"The gradient of {named.name} is sparse, which flat buckets cannot hold. Build its "
            "embedding with sparse=False."
        )
