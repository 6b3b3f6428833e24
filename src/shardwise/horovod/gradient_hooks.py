"""Hooks that count gradients of a `DistributedOptimizer` and start the reduction of full buckets.

A hook on each parameter counts its backwards. After `passes` of them its gradient is complete; a
bucket whose gradients are all complete is reduced while backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from weakref import WeakSet, ref

from torch import Tensor

from shardwise.errors import HookOrder
from shardwise.horovod.buckets import GradientBucket
from shardwise.states.parameters.named_parameters import NamedParameter

_active: WeakSet[GradientHooks] = WeakSet()


class GradientHooks:
    """Hooks on parameters `named`, whose gradients are reduced in `buckets`.

    `started` says whether a backward has come since the last `synchronize`. `note` makes the note
    that goes with the very first request.
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        buckets: Sequence[GradientBucket],
        passes: int,
        note: Callable[[], Mapping[str, str]],
    ) -> None:
        self._buckets = buckets
        self._position_of = {
            index: (bucket, position)
            for bucket in buckets
            for position, index in enumerate(bucket.indices)
        }
        self._note: Callable[[], Mapping[str, str]] | None = note
        self.passes = passes
        self._left = [passes] * len(named)
        self.started = False
        self._replaced = False
        self._watched = {id(entry.parameter) for entry in named}
        self._hooks = [
            entry.parameter.register_post_accumulate_grad_hook(partial(_arrive, ref(self), index))  # type: ignore[no-untyped-call]
            for index, entry in enumerate(named)
        ]
        _active.add(self)

    def set_passes(self, passes: int) -> None:
        """Set the number of backwards after which gradients are complete."""
        self.passes = passes
        self._left = [passes] * len(self._left)

    def arrived(self, index: int) -> None:
        """Count a backward of a parameter; start the reduction of its bucket once that is full."""
        if self._left[index] <= 0:
            raise HookOrder(
                "Gradients were computed more than backward_passes_per_step "
                f"({self.passes}) times before optimizer.step(). Increase backward_passes_per_step "
                "to accumulate gradients, or call step() after each."
            )
        self.started = True
        self._left[index] -= 1
        if self._left[index] == 0:
            bucket, position = self._position_of[index]
            if bucket.arrived(position):
                self._launch(bucket)

    def synchronize(self) -> None:
        """Wait until every `param.grad` is reduced; gradients that no backward made are zeros.
        Raises HookOrder where a newer optimizer has taken these parameters."""
        if self._replaced:
            raise HookOrder(
                "A newer hvd.DistributedOptimizer has parameters of this one, and reduces their "
                "gradients: call step() of that one only, or give each parameter to one optimizer."
            )
        # All are requested before any is waited for: a rank whose backward skipped a bucket
        # requests it here, and the others may be waiting for just that one.
        for bucket in self._buckets:
            if not bucket.launched:
                self._launch(bucket)
        for bucket in self._buckets:
            bucket.finish()
        self.forget()

    def forget(self) -> None:
        """Reset all counts for the next step."""
        for bucket in self._buckets:
            bucket.reset()
        self._left = [self.passes] * len(self._left)
        self.started = False

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        _active.discard(self)

    def release(self, ids: Set[int]) -> None:
        """Remove the hooks if a newer optimizer has hooks on one of these parameters (ids)."""
        if not ids.isdisjoint(self._watched):
            self.detach()
            self._replaced = True

    def _launch(self, bucket: GradientBucket) -> None:
        note, self._note = self._note, None
        bucket.launch(note() if note is not None else {})


def release(params: Iterable[Tensor]) -> None:
    """Remove the hooks of older optimizers on `params`, which a new optimizer takes."""
    ids = {id(param) for param in params}
    for gradients in list(_active):
        gradients.release(ids)


def _arrive(gradients: ref[GradientHooks], index: int, param: Tensor) -> None:
    """The hook on a parameter. It holds a weak reference, so it keeps no optimizer alive."""
    del param
    alive = gradients()
    if alive is not None:
        alive.arrived(index)
