"""Unshards and reshards units of sharded parameters, using FSDP2's terms.

A *unit* is a part of the model whose parameters are gathered together. Unsharding a unit makes its
parameters views of gathered buckets. Resharding removes the parameters' values again:

    gather ─▶ unshard   parameters become views; register their addresses, sum their bits
              reshard   undo both in reverse order; return the buffers last

`residency.py` decides when to unshard and reshard each unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwise.states.parameters.bucket_gathers import (
    BucketGathers,
    Gather,
    WholeBucket,
    finished_gather,
    whole_bucket,
)
from shardwise.states.parameters.lost_writes import LostWrites
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.saved_references import BucketAddresses, BucketReference, CastCache
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.parameters.sharded_parameters import ShardedParameters


@dataclass(eq=False)
class Unit:
    """A part of the model whose parameters are gathered together."""

    name: str
    buckets: list[ShardedBucket]
    lasting: bool = False
    """True if the unit stays gathered from the end of a forward pass to the end of its backward
    pass."""
    always: bool = False
    """True if the unit is always gathered, because no module shows when it is needed."""
    kept: bool = False
    """True if the unit stays gathered until the next backward pass has completed, because autograd
    has saved its parameters themselves."""
    gather: Gather | None = field(default=None, repr=False)
    wholes: list[WholeBucket] = field(default_factory=list, repr=False)
    depth: int = 0
    """Nesting depth of the unit's running module forward passes."""

    @property
    def is_whole(self) -> bool:
        """True if the unit is gathered, so that its parameters have their values."""
        return self.gather is not None

    @property
    def named(self) -> list[NamedParameter]:
        """The parameters of all the unit's buckets."""
        return [named for bucket in self.buckets for named in bucket.named]


class WholeUnits:
    """Unshards and reshards `units`, using `gathers` to gather their buckets."""

    def __init__(
        self, parameters: ShardedParameters, units: Sequence[Unit], gathers: BucketGathers
    ) -> None:
        self._parameters = parameters
        self._units = units
        self._gathers = gathers
        self._whole: dict[Unit, None] = {}
        self._ahead: dict[int, Gather] = {}
        """Unit index -> gather that was started before its turn."""
        self._addresses = BucketAddresses()
        self._writes = LostWrites(parameters.note_written)

    # -- gathers --------------------------------------------------------------------------

    def start_ahead(self, number: int) -> None:
        """Start gathering unit `number` ahead of its turn."""
        if number not in self._ahead:
            self._ahead[number] = self._gathers.start(self._units[number].buckets)

    def _started(self, number: int) -> Gather:
        ahead = self._ahead.pop(number, None)
        return ahead if ahead is not None else self._gathers.start(self._units[number].buckets)

    def take_part(self, number: int) -> None:
        """Participate in gathering unit `number`, which other ranks need, without unsharding it."""
        gather = self._started(number)
        gather.wait()
        self._gathers.give_back(gather)

    def unshard(self, number: int) -> None:
        """Gather unit `number` and set its parameters' values."""
        self._unshard(number, self._started(number))

    def _unshard(self, number: int, gather: Gather) -> None:
        unit = self._units[number]
        assert not unit.is_whole  # a second gather would never return the first one's buffers
        unit.wholes, unit.gather = gather.wait(), gather
        self._whole[unit] = None
        for index, (bucket, whole) in enumerate(zip(unit.buckets, unit.wholes, strict=True)):
            self._parameters.unshard(bucket, whole.views, whole.addresses)
            self._addresses.add(whole.flat, number, index)
            self._writes.begin(bucket, whole.flat)

    # -- reshard --------------------------------------------------------------------------

    def reshard_if_unneeded(self, unit: Unit) -> None:
        """Reshard a unit, unless it must stay gathered (`depth`, `always`, `kept`)."""
        if not (unit.depth or unit.always or unit.kept):
            self._reshard(unit)

    def reshard_unneeded(self, *, keep_lasting: bool = False) -> None:
        """Reshard all units that need not stay gathered.

        If `keep_lasting` is true, lasting units stay gathered.
        """
        for unit in list(self._whole):
            if not (keep_lasting and unit.lasting):
                self.reshard_if_unneeded(unit)

    def keep(self, number: int | None) -> None:
        """Keep unit `number` gathered until `end_keeping`. None means all gathered units."""
        for unit in list(self._whole) if number is None else [self._units[number]]:
            unit.kept = True

    def end_keeping(self) -> None:
        """Allow units to be resharded again after `keep`."""
        for unit in self._units:
            unit.kept = False

    def allow_writes(self, allowed: bool) -> None:
        """Allow or forbid writes to gathered units, except those in a running forward pass.

        Between passes a gathered unit is a temporary copy, so a write would not reach any shard.
        """
        for unit in self._whole:
            for bucket in unit.buckets if not unit.depth else ():
                self._parameters.allow_writes(bucket, allowed=allowed)

    def _reshard(self, unit: Unit) -> None:
        if unit.gather is None:
            return
        del self._whole[unit]
        for bucket, whole in zip(unit.buckets, unit.wholes, strict=True):
            self._writes.end(bucket, whole.flat)  # first, because it compares the values
            self._parameters.reshard(bucket)
            self._addresses.remove(whole.flat)
        # Drop the unit's views before returning the buffer, whose reference count must show only
        # other users.
        gather, unit.gather, unit.wholes = unit.gather, None, []
        # Return the buffer last, because the next gather may borrow and overwrite it at once.
        self._gathers.give_back(gather)

    # -- separate memory ------------------------------------------------------------------

    def make_own(self, number: int, *, here: bool) -> dict[ShardedBucket, Tensor]:
        """Gather unit `number` into separate memory and unshard it. Return its full buckets.

        Collective. A rank whose `here` is False only participates, and gets no buckets.
        """
        unit = self._units[number]
        # A unit that is always gathered is in a gather buffer or in shared memory. The caller may
        # write to the unit, so move it to separate memory.
        self._reshard(unit)
        flats = {bucket: self._parameters.gathered(bucket, here=here) for bucket in unit.buckets}
        own = {bucket: flat for bucket, flat in flats.items() if flat is not None}
        if here:
            wholes = [whole_bucket(bucket, flat) for bucket, flat in own.items()]
            self._unshard(number, finished_gather(wholes))
            unit.depth += 1  # as in a forward pass: nothing may reshard the unit before `end_own`
            for bucket in unit.buckets:
                self._parameters.allow_copies(bucket)
        return own

    def end_own(self, number: int, *, here: bool) -> None:
        """Undo `make_own`, and gather the unit again if it is always gathered."""
        unit = self._units[number]
        if here:
            unit.depth -= 1
            self._reshard(unit)
            for bucket in unit.buckets:
                self._parameters.refuse_copies(bucket)
        if unit.always:
            self.unshard(number)

    def finish_checks(self) -> None:
        """Wait for the pending checks that detect user writes during a pass."""
        self._writes.finish()

    def forget_writes(self) -> None:
        """Discard the bit sums so far, because the optimizer or user code was allowed to write."""
        self._writes.forget()

    # -- between steps --------------------------------------------------------------------

    def renew(self) -> None:
        """Reshard all units after parameters have changed. Gather permanent units again.

        Permanent units are those whose `always` is True. Collective.
        """
        self._addresses.generation += 1
        self._writes.forget()
        # Gathers that were started ahead in an abandoned pass contain the old values, so discard
        # them.
        while self._ahead:
            self.take_part(next(iter(self._ahead)))
        self.reshard_unneeded()
        # Follow the order of units, which is the same on all ranks, because these gathers have no
        # turns.
        for number, unit in enumerate(self._units):
            if unit.always:
                self._reshard(unit)
                self.unshard(number)
        self.allow_writes(False)

    # -- what autograd saves --------------------------------------------------------------

    @property
    def reference_of(self) -> Callable[[Tensor], BucketReference | None]:
        """Function that returns the reference for autograd to save in place of a tensor.

        It returns None for a tensor outside the memory of gathered units.
        """
        # Return the method itself, without a wrapper, because autograd calls it for every tensor it
        # saves.
        return self._addresses.find

    @property
    def casts(self) -> CastCache:
        """The object that clears autocast's cache during forward passes."""
        return self._addresses.casts

    def is_current(self, reference: BucketReference) -> bool:
        """Return whether the parameters are unchanged since `reference` was created."""
        return reference.generation == self._addresses.generation

    def tensor_at(self, reference: BucketReference) -> Tensor:
        """Return the tensor that `reference` stands for. Its unit must be gathered."""
        whole = self._units[reference.unit].wholes[reference.index]
        return reference.of(whole.in_form(reference.form))
