"""Fills one bucket with the gradients that a backward makes, and hands it to the reducer.

A gradient is moved into the bucket's flat buffer, or sent from where autograd has put it:

    param.grad ─▶ take      large ones as they arrive, while they are in the processor's cache ─┐
    param.grad ─▶ complete  small ones together, when the last of the bucket has arrived ───────┼─▶
                            launch                                                              ┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.errors import ModelError
from shardwise.model.precision import NARROW
from shardwise.states.gradients.bucket_reducer import BucketReducer
from shardwise.states.gradients.gradient_accumulator import GradientBucket
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters_at_rest import unguarded


@dataclass(frozen=True)
class Backward:
    """The settings of one backward, alike for all of its gradients.

    `reduces`: buckets are sent to the other ranks in it. `is_first`: none has been yet in this
    step, so that a buffer which is kept holds no sum. `empty`: whatever arrives (perhaps NaN) is
    thrown away; else it is multiplied by `factor`, None for 1. `is_zero` is what `empty` says if
    the device alone knows the weight.
    """

    reduces: bool
    is_first: bool
    empty: bool = False
    factor: float | Tensor | None = None
    is_zero: Tensor | None = None

    def weighted(self, grad: Tensor) -> Tensor:
        """`grad` times the factor, not rounded to 16 bit before it is in the bucket; zeros where
        the weight is zero."""
        grad = self._multiplied([grad])[0]
        # A product with zero would keep a NaN.
        return grad if self.is_zero is None else torch.where(self.is_zero, 0.0, grad)

    def _multiplied(self, grads: list[Tensor]) -> list[Tensor]:
        """`grads` times the factor, in one call for those of a kind."""
        factor = self.factor
        if factor is None:
            return grads
        grads = [grad.float() if grad.dtype in NARROW else grad for grad in grads]
        if isinstance(factor, Tensor):
            return list(torch._foreach_mul(grads, factor.to(grads[0].dtype)))
        return list(torch._foreach_mul(grads, factor))

    def put(self, grad: Tensor, target: Tensor, *, adds: bool) -> None:
        """Write `grad`, weighted, to `target`, or add it to what is there.

        What is written is not made zero here: `clean` does that for a whole bucket.
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
        """Write `grads`, weighted, to `targets`, as `put` does."""
        if targets:
            torch._foreach_copy_(targets, self._multiplied(grads))

    def add_all(self, grads: list[Tensor], targets: list[Tensor]) -> None:
        """Add `grads`, weighted, to `targets`."""
        if targets:
            several = self.is_zero is None
            weighted = self._multiplied(grads) if several else [self.weighted(g) for g in grads]
            torch._foreach_add_(targets, weighted)

    def clean(self, *written: Tensor | None) -> None:
        """Make memory zero that `put` has `written`, if nothing in it counts."""
        for memory in written:
            if memory is not None and self.is_zero is not None:
                memory.masked_fill_(self.is_zero, 0.0)


class BucketFill:
    """Collects the gradients of one bucket in a backward, and remembers whether it has any.

    `indices` are its parameters by slot. A gradient is taken out of `param.grad`, once in most
    backwards; what comes again is added.
    """

    def __init__(
        self, bucket: GradientBucket, reducer: BucketReducer, named: Sequence[NamedParameter]
    ) -> None:
        slots = bucket.layout.slots
        self.bucket = bucket
        self.indices = [slot.parameter for slot in slots]
        self.expected = len(slots)
        """Arrivals to wait for in a backward; at first, one for each parameter."""
        self.remaining = 0
        self.filled = False
        """Whether `bucket.kept` holds gradients of this step."""
        self.closed = True
        """Whether this backward has launched the bucket: what comes now is late."""
        self._reducer = reducer
        self._named = [named[index] for index in self.indices]
        self._sent_apart = frozenset(reducer.sent_apart[bucket.index])
        self._buffer: Tensor | None = None
        self._onto: Tensor | None = None
        """What takes the elements that this rank sums, where they are apart from the buffer."""
        # By slot: whether its gradient of this backward is in the buffer, or else its memory.
        self._has = [False] * len(slots)
        self._elsewhere: dict[int, Tensor] = {}

    def begin(self, backward: Backward) -> None:
        """Make ready for a backward."""
        self._backward = backward
        self.remaining = self.expected
        self.closed = False
        self._buffer = None
        self._has = [False] * len(self._has)
        self._elsewhere = {}

    def take(self, place: int) -> bool:
        """Take the gradient of the slot `place` now, while it is in the processor's cache; whether
        there was one."""
        with unguarded():
            grad = self._taken(place)
        if grad is None:
            return False
        again = self._has[place]
        self._has[place] = True
        if not again and (flat := self._sendable(place, grad)) is not None:
            self._elsewhere[place] = flat
            return True
        buffer = self._open()
        if (first := self._elsewhere.pop(place, None)) is not None:
            # It came twice: the first one would have been sent from where it lies.
            slot = self.bucket.layout.slots[place]
            buffer[slot.start : slot.end] = first
        views = self._reducer.views(self.bucket, buffer, self._onto)
        for target, part in zip(views.targets[place], views.parts(place, grad), strict=True):
            self._backward.put(part, target, adds=again or self._adds)
        return True

    def complete(self) -> tuple[list[int], list[Tensor]]:
        """Collect what is lacking; returns which parameters had a gradient that was not taken
        before, and these."""
        buffer = self._open()
        found = self._collect(buffer)
        if self.bucket.kept is buffer:
            self.filled = True
        return found

    def launch(self) -> None:
        """The bucket is complete: start its collective, where this backward reduces."""
        self.closed = True
        if self._backward.reduces:
            self._reducer.launch(self.bucket, self._open(), self._elsewhere, self._onto)
        self._elsewhere = {}

    def abandon(self) -> None:
        """Backward has failed: forget what it has brought."""
        buffer, self._buffer, self._elsewhere = self._buffer, None, {}
        if buffer is not None and buffer is not self.bucket.kept and not self.closed:
            self._reducer.give_back(buffer)

    def add(self, buffer: Tensor, entries: Sequence[tuple[int, Tensor]]) -> None:
        """Add gradients, each with its parameter, to what `buffer` holds."""
        targets = self._reducer.views(self.bucket, buffer).targets
        by_parameter = dict(zip(self.indices, targets, strict=True))
        for index, grad in entries:
            by_parameter[index][0].add_(grad)

    @property
    def _own(self) -> Tensor | None:
        """The buffer that the bucket has for good, if this backward collects into that."""
        return self.bucket.kept if self._backward.is_first else None

    @property
    def _adds(self) -> bool:
        """Whether the buffer, open or still to be opened, holds earlier gradients of this step."""
        return self.filled and self._own is not None

    def _open(self) -> Tensor:
        """The buffer that this backward collects into: kept for good, or borrowed."""
        if self._buffer is None:
            own = self._own
            self._buffer = self._reducer.borrow(self.bucket) if own is None else own
            self._onto = self._reducer.onto(self.bucket) if own is None else None
        return self._buffer

    def _taken(self, place: int) -> Tensor | None:
        """The gradient of a slot, taken away from its parameter."""
        named = self._named[place]
        grad, named.parameter.grad = named.parameter.grad, None
        if grad is None or self._backward.empty:
            return None
        refuse_sparse(named, grad)
        return grad

    def _sendable(self, place: int, grad: Tensor) -> Tensor | None:
        """`grad`, weighted and flat, if it is to be sent from where it is; else None."""
        if place not in self._sent_apart or not self._backward.reduces or self._adds:
            return None
        value = self._backward.weighted(grad)
        dtype, device = self.bucket.kind
        if (own := self._own) is not None:
            dtype = own.dtype  # wider than gradients are made, once they add up in it
        fits = (value.dtype, value.device) == (dtype, device)
        return self._named[place].flat(value) if fits else None

    def _collect(self, buffer: Tensor) -> tuple[list[int], list[Tensor]]:
        """Move what has not been taken, small gradients, in one call; zero what none came for."""
        targets: dict[bool, list[Tensor]] = {False: [], True: []}
        grads: dict[bool, list[Tensor]] = {False: [], True: []}
        views = self._reducer.views(self.bucket, buffer, self._onto)
        absent = list(views.gaps)
        adds, found = self._adds, []
        with unguarded():
            taken = [self._taken(place) for place in range(len(views.targets))]
        for place, (parts, grad) in enumerate(zip(views.targets, taken, strict=True)):
            if grad is None:
                if not self._has[place]:
                    absent += parts
                continue
            again = adds or self._has[place]
            targets[again] += parts
            grads[again] += views.parts(place, grad)
            found.append(self.indices[place])
        self._backward.put_all(grads[False], targets[False])
        self._backward.add_all(grads[True], targets[True])
        if not adds:
            self._backward.clean(buffer, self._onto)
            if absent:
                # A borrowed buffer holds another bucket's gradients.
                torch._foreach_zero_(absent)
        return found, targets[False] + targets[True]


def refuse_sparse(named: NamedParameter, grad: Tensor) -> None:
    """Raise ModelError for a gradient that no flat buffer can hold."""
    if grad.layout != torch.strided:
        raise ModelError(
            f"The gradient of {named.name} is sparse, which flat buckets cannot hold. Build its "
            "embedding with sparse=False."
        )
