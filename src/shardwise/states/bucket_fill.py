"""The gradients of one bucket while backward makes them: moved into its buffer, or sent from where
they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.errors import ModelError
from shardwise.model.precision import NARROW
from shardwise.states.reduction import Reduction, Rest
from shardwise.states.resting import unguarded
from shardwise.states.tracked import Tracked


@dataclass(frozen=True)
class Backward:
    """What holds for all gradients of a backward.

    `reduces`: buckets go on their way in it. `is_first`: none has yet in this step, so that a
    buffer which is kept holds no sum. `empty`: whatever arrives (perhaps NaN) is thrown away; else
    it is multiplied by `factor`, None for 1. `weight` is set where the device alone knows whether
    that is zero.
    """

    reduces: bool
    is_first: bool
    empty: bool = False
    factor: float | Tensor | None = None
    weight: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether gradients stay as they are."""
        return self.factor is None and self.weight is None

    def cleaned(self, grad: Tensor) -> Tensor:
        """`grad` as it counts, not rounded to 16 bit before it is in the bucket; zeros where the
        weight is zero."""
        if self.factor is not None:
            grad = (grad.float() if grad.dtype in NARROW else grad) * self.factor
        if self.weight is None:
            return grad
        return torch.where(self.weight == 0, torch.zeros_like(grad), grad)


class Collector:
    """What one bucket has gathered so far in a backward, and whether it has any of this step.

    `indices` are its parameters by slot. A gradient is taken out of `param.grad`, once in most
    backwards; what comes again is added.
    """

    def __init__(self, rest: Rest, reduction: Reduction, tracked: Sequence[Tracked]) -> None:
        slots = rest.bucket.slots
        self.rest = rest
        self.indices = [slot.parameter for slot in slots]
        self.expected = len(slots)
        """Arrivals to wait for in a backward; at first, one for each parameter."""
        self.remaining = 0
        self.filled = False
        """Whether `rest.kept` holds gradients of this step."""
        self.closed = True
        """Whether this backward has sent the bucket on its way: what comes now is late."""
        self._reduction = reduction
        self._forms = [tracked[index] for index in self.indices]
        self._straight = frozenset(reduction.straight[rest.index])
        self._buffer: Tensor | None = None
        self._onto: Tensor | None = None
        """What takes the elements that this rank sums, where they are apart from the buffer."""
        # By slot: its gradient of this backward is in the buffer, or elsewhere.
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
        """Take the gradient of the slot `place`, as it is still in the processor's cache; whether
        there was one."""
        with unguarded():
            grad = self._taken(place)
        if grad is None:
            return False
        value, again = self._backward.cleaned(grad), self._has[place]
        self._has[place] = True
        if not again and (flat := self._sendable(place, value)) is not None:
            self._elsewhere[place] = flat
            return True
        buffer = self._open()
        if (first := self._elsewhere.pop(place, None)) is not None:
            slot = self.rest.bucket.slots[place]
            buffer[slot.start : slot.end] = first
        landing = self._reduction.landing(self.rest, buffer, self._onto)
        for target, part in zip(landing.targets[place], landing.parts(place, value), strict=True):
            if again or self._adds:
                target.add_(part)
            else:
                target.copy_(part)
        return True

    def complete(self) -> tuple[list[int], list[Tensor]]:
        """Collect what is lacking; returns which parameters had a gradient that was not taken
        before, and these."""
        buffer = self._open()
        found = self._collect(buffer)
        if self.rest.kept is buffer:
            self.filled = True
        return found

    def launch(self) -> None:
        """The bucket is complete: send it on its way, where this backward reduces."""
        self.closed = True
        if self._backward.reduces:
            self._reduction.launch(self.rest, self._open(), self._elsewhere, self._onto)
        self._elsewhere = {}

    def abandon(self) -> None:
        """Backward has failed: forget what it has brought."""
        buffer, self._buffer, self._elsewhere = self._buffer, None, {}
        if buffer is not None and buffer is not self.rest.kept and not self.closed:
            self._reduction.give_back(buffer)

    def add(self, buffer: Tensor, entries: Sequence[tuple[int, Tensor]]) -> None:
        """Add gradients, each with its parameter, to what `buffer` holds."""
        targets = self._reduction.landing(self.rest, buffer).targets
        views = dict(zip(self.indices, targets, strict=True))
        for index, grad in entries:
            views[index][0].add_(grad)

    @property
    def _own(self) -> Tensor | None:
        """The buffer that the bucket has for good, if this backward collects into that."""
        return self.rest.kept if self._backward.is_first else None

    @property
    def _adds(self) -> bool:
        """Whether the buffer, open or still to be opened, holds earlier gradients of this step."""
        return self.filled and self._own is not None

    def _open(self) -> Tensor:
        """The buffer that this backward collects into: kept for good, or borrowed."""
        if self._buffer is None:
            own = self._own
            self._buffer = self._reduction.borrow(self.rest) if own is None else own
            self._onto = self._reduction.onto(self.rest) if own is None else None
        return self._buffer

    def _taken(self, place: int) -> Tensor | None:
        """The gradient of a slot, that its parameter has no longer."""
        form = self._forms[place]
        grad, form.parameter.grad = form.parameter.grad, None
        if grad is None or self._backward.empty:
            return None
        refuse_sparse(form, grad)
        return grad

    def _sendable(self, place: int, value: Tensor) -> Tensor | None:
        """`value` flat, if it is to be sent from where it lies; else None."""
        if place not in self._straight or not self._backward.reduces or self._adds:
            return None
        dtype, device = self.rest.kind
        if (own := self._own) is not None:
            dtype = own.dtype  # wider than gradients are made, once they add up in it
        fits = (value.dtype, value.device) == (dtype, device)
        return self._forms[place].flat(value) if fits else None

    def _collect(self, buffer: Tensor) -> tuple[list[int], list[Tensor]]:
        """Move what has not been taken, small gradients, in one call; blank what none came for."""
        targets: dict[bool, list[Tensor]] = {False: [], True: []}
        grads: dict[bool, list[Tensor]] = {False: [], True: []}
        landing = self._reduction.landing(self.rest, buffer, self._onto)
        absent = list(landing.gaps)
        adds, plain, found = self._adds, self._backward.plain, []
        with unguarded():
            taken = [self._taken(place) for place in range(len(landing.targets))]
        for place, (parts, grad) in enumerate(zip(landing.targets, taken, strict=True)):
            if grad is None:
                if not self._has[place]:
                    absent += parts
                continue
            again = adds or self._has[place]
            targets[again] += parts
            grads[again] += landing.parts(place, grad if plain else self._backward.cleaned(grad))
            found.append(self.indices[place])
        if targets[False]:
            torch._foreach_copy_(targets[False], grads[False])
        if targets[True]:
            torch._foreach_add_(targets[True], grads[True])
        if not adds and absent:
            torch._foreach_zero_(absent)
        return found, grads[False] + grads[True]


def refuse_sparse(form: Tracked, grad: Tensor) -> None:
    """Raise ModelError for a gradient that no flat buffer can hold."""
    if grad.layout != torch.strided:
        raise ModelError(
            f"The gradient of {form.name} is sparse, which flat buckets cannot hold. Build its "
            "embedding with sparse=False."
        )
