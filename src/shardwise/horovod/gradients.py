"""The gradients of a `DistributedOptimizer`, from backward to synchronize.

A hook on each parameter counts its backwards. After `passes` of them its gradient is complete, and
travels with its parcel while backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from weakref import WeakSet, ref

from torch import Tensor

from shardwise.errors import HookOrder
from shardwise.horovod.buckets import Parcel
from shardwise.states.tracked import Tracked

_watching: WeakSet[Gradients] = WeakSet()


class Gradients:
    """Watches parameters `forms`, whose gradients travel in `parcels`.

    `begun` says whether a backward has come since the last `synchronize`. `note` makes what goes
    with the very first one.
    """

    def __init__(
        self,
        forms: Sequence[Tracked],
        parcels: Sequence[Parcel],
        passes: int,
        note: Callable[[], Mapping[str, str]],
    ) -> None:
        self._parcels = parcels
        self._place_of = {
            index: (parcel, place)
            for parcel in parcels
            for place, index in enumerate(parcel.indices)
        }
        self._note: Callable[[], Mapping[str, str]] | None = note
        self.passes = passes
        self._left = [passes] * len(forms)
        self.begun = False
        self._replaced = False
        self._watched = {id(form.parameter) for form in forms}
        self._hooks = [
            form.parameter.register_post_accumulate_grad_hook(partial(_arrive, ref(self), index))  # type: ignore[no-untyped-call]
            for index, form in enumerate(forms)
        ]
        _watching.add(self)

    def set_passes(self, passes: int) -> None:
        """From now on gradients are complete after so many backwards."""
        self.passes = passes
        self._left = [passes] * len(self._left)

    def arrived(self, index: int) -> None:
        """A backward has added to a parameter's gradient."""
        if self._left[index] <= 0:
            raise HookOrder(
                "Gradients were computed more than backward_passes_per_step "
                f"({self.passes}) times before optimizer.step(). Increase backward_passes_per_step "
                "to accumulate gradients, or call step() after each."
            )
        self.begun = True
        self._left[index] -= 1
        if self._left[index] == 0:
            parcel, place = self._place_of[index]
            if parcel.arrived(place):
                self._launch(parcel)

    def synchronize(self) -> None:
        """Return when every `param.grad` is reduced; gradients that no backward made are zeros.
        Raises HookOrder where another optimizer watches these parameters by now."""
        if self._replaced:
            raise HookOrder(
                "A newer hvd.DistributedOptimizer has parameters of this one, and reduces their "
                "gradients: call step() of that one only, or give each parameter to one optimizer."
            )
        for parcel in self._parcels:
            if not parcel.launched:
                self._launch(parcel)
        for parcel in self._parcels:
            parcel.finish()
        self.forget()

    def forget(self) -> None:
        """Count from the beginning."""
        for parcel in self._parcels:
            parcel.reset()
        self._left = [self.passes] * len(self._left)
        self.begun = False

    def detach(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        _watching.discard(self)

    def release(self, ids: Set[int]) -> None:
        """Another optimizer watches parameters of these ids now."""
        if not ids.isdisjoint(self._watched):
            self.detach()
            self._replaced = True

    def _launch(self, parcel: Parcel) -> None:
        note, self._note = self._note, None
        parcel.launch(note() if note is not None else {})


def release(params: Iterable[Tensor]) -> None:
    """A new optimizer takes these: those that have watched one of them watch no longer."""
    ids = {id(param) for param in params}
    for gradients in list(_watching):
        gradients.release(ids)


def _arrive(gradients: ref[Gradients], index: int, param: Tensor) -> None:
    """The hook on a parameter; it keeps no optimizer alive."""
    del param
    alive = gradients()
    if alive is not None:
        alive.arrived(index)
