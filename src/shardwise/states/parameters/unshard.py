"""Unshards units of sharded parameters (shows them whole), ahead of their turn, and reshards them.

A *unit* is a part of the model whose parameters come and go together. To show one is to let its
parameters be views of gathered buckets, to rest it (FSDP's reshard) is to take them away:

    gather ─▶ show    parameters, addresses and bit sums are those of the whole buckets
              rest    the same undone, then the buffers go back: nobody may see them any more

Which unit is shown when is said by `residency`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwise.states.parameters.bucket_gathers import (
    BucketGathers,
    Gather,
    WholeBucket,
    there,
    whole_of,
)
from shardwise.states.parameters.lost_writes import LostWrites
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.saved_references import BucketAddresses, BucketReference, CastCache
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.parameters.sharded_parameters import ShardedParameters


@dataclass(eq=False)
class Unit:
    """A part of the model that is gathered as a whole.

    `lasting`: kept from the end of a forward to the end of its backward. `always`: whole all the
    time, since no module says when it is needed. `kept`: whole until the next backward has ended,
    because autograd has saved the parameters themselves.
    """

    name: str
    buckets: list[ShardedBucket]
    lasting: bool = False
    always: bool = False
    kept: bool = False
    gather: Gather | None = field(default=None, repr=False)
    wholes: list[WholeBucket] = field(default_factory=list, repr=False)
    depth: int = 0
    """How many of its modules' forwards are under way, one inside the other."""

    @property
    def is_whole(self) -> bool:
        """Whether its parameters have their values now."""
        return self.gather is not None

    @property
    def named(self) -> list[NamedParameter]:
        """Its parameters."""
        return [named for bucket in self.buckets for named in bucket.named]


class WholeUnits:
    """Shows and rests `units`, which `gathers` makes whole."""

    def __init__(
        self, parameters: ShardedParameters, units: Sequence[Unit], gathers: BucketGathers
    ) -> None:
        self._parameters = parameters
        self._units = units
        self._gathers = gathers
        self._whole: dict[Unit, None] = {}
        self._ahead: dict[int, Gather] = {}
        """By number of a unit, its gather that was started ahead of its turn."""
        self._addresses = BucketAddresses()
        self._writes = LostWrites(parameters.note_written)

    # -- gathers --------------------------------------------------------------------------

    def start_ahead(self, number: int) -> None:
        """Start the gather of unit `number`, whose turn comes next."""
        if number not in self._ahead:
            self._ahead[number] = self._gathers.start(self._units[number].buckets)

    def _started(self, number: int) -> Gather:
        ahead = self._ahead.pop(number, None)
        return ahead if ahead is not None else self._gathers.start(self._units[number].buckets)

    def take_part(self, number: int) -> None:
        """Gather unit `number` for the other ranks, and keep nothing of it."""
        gather = self._started(number)
        gather.wait()
        self._gathers.give_back(gather)

    def show(self, number: int) -> None:
        """Gather unit `number`, and let its parameters have their values."""
        self._show(number, self._started(number))

    def _show(self, number: int, gather: Gather) -> None:
        unit = self._units[number]
        assert not unit.is_whole
        unit.wholes, unit.gather = gather.wait(), gather
        self._whole[unit] = None
        for index, (bucket, whole) in enumerate(zip(unit.buckets, unit.wholes, strict=True)):
            self._parameters.show(bucket, whole.views, whole.addresses)
            self._addresses.add(whole.flat, number, index)
            self._writes.begin(bucket, whole.flat)

    # -- rest -----------------------------------------------------------------------------

    def let_go(self, unit: Unit) -> None:
        """Put a unit to rest, unless it is needed: always, in a forward under way, or in the next
        backward."""
        if not (unit.depth or unit.always or unit.kept):
            self._rest(unit)

    def let_go_of_all(self, *, but_lasting: bool = False) -> None:
        """Put all to rest that are not needed; with `but_lasting` none of those that last."""
        for unit in list(self._whole):
            if not (but_lasting and unit.lasting):
                self.let_go(unit)

    def keep(self, number: int | None) -> None:
        """Keep unit `number`, or all that are whole, until `end_keeping`."""
        for unit in list(self._whole) if number is None else [self._units[number]]:
            unit.kept = True

    def end_keeping(self) -> None:
        """Let units that were kept rest with the others."""
        for unit in self._units:
            unit.kept = False

    def allow_writes(self, allowed: bool) -> None:
        """Between passes what stays whole may be read and not written: it is a temporary copy, and
        a write would reach no shard."""
        for unit in self._whole:
            for bucket in unit.buckets if not unit.depth else ():
                self._parameters.allow_writes(bucket, allowed=allowed)

    def _rest(self, unit: Unit) -> None:
        if unit.gather is None:
            return
        del self._whole[unit]
        for bucket, whole in zip(unit.buckets, unit.wholes, strict=True):
            self._writes.end(bucket, whole.flat)  # while the values are still there
            self._parameters.rest(bucket)
            self._addresses.remove(whole.flat)
        gather, unit.gather, unit.wholes = unit.gather, None, []
        # Last: the buffer may be borrowed, and written, by the next gather at once.
        self._gathers.give_back(gather)

    # -- memory of their own --------------------------------------------------------------

    def make_own(self, number: int, *, here: bool) -> dict[ShardedBucket, Tensor]:
        """Make unit `number` whole in memory of its own; returns its buckets. Collective.

        A rank that is not `here` takes part and keeps nothing.
        """
        unit = self._units[number]
        self._rest(unit)
        flats = {bucket: self._parameters.gathered(bucket, here=here) for bucket in unit.buckets}
        found = {bucket: flat for bucket, flat in flats.items() if flat is not None}
        if here:
            wholes = [whole_of(bucket, flat) for bucket, flat in found.items()]
            self._show(number, there(wholes))
            unit.depth += 1
            for bucket in unit.buckets:
                self._parameters.allow_copies(bucket)
        return found

    def end_own(self, number: int, *, here: bool) -> None:
        """Undo `make_own`."""
        unit = self._units[number]
        if here:
            unit.depth -= 1
            self._rest(unit)
            for bucket in unit.buckets:
                self._parameters.refuse_copies(bucket)
        if unit.always:
            self.show(number)

    def finish_checks(self) -> None:
        """Wait until it is known of all passes so far whether anything was written in them."""
        self._writes.finish()

    def forget_writes(self) -> None:
        """Those that may write, the optimizer or a block that is there for it, have written."""
        self._writes.forget()

    # -- between steps --------------------------------------------------------------------

    def renew(self) -> None:
        """Parameters have changed: rest all, and show those that are always shown anew.
        Collective."""
        self._addresses.generation += 1
        self._writes.forget()
        while self._ahead:  # of a pass that was abandoned: the values of before
            self.take_part(next(iter(self._ahead)))
        self.let_go_of_all()
        for number, unit in enumerate(self._units):
            if unit.always:
                self._rest(unit)
                self.show(number)
        self.allow_writes(False)

    # -- what autograd saves --------------------------------------------------------------

    @property
    def reference_of(self) -> Callable[[Tensor], BucketReference | None]:
        """Finds what to save instead of a tensor, if its memory is a whole unit's."""
        return self._addresses.find  # itself, since it is called for all that autograd saves

    @property
    def casts(self) -> CastCache:
        """What autocast keeps of a forward's weights."""
        return self._addresses.casts

    def is_current(self, reference: BucketReference) -> bool:
        """Whether parameters have not changed since `reference` was made."""
        return reference.generation == self._addresses.generation

    def tensor_at(self, reference: BucketReference) -> Tensor:
        """The tensor that `reference` was made of; its unit is whole."""
        whole = self._units[reference.unit].wholes[reference.index]
        return reference.of(whole.in_form(reference.form))
