"""Decides when each unit of sharded parameters is whole: while its forward or backward needs it.

Forward unshards a unit on entering one of its modules, and reshards it on leaving. Backward
unshards it again when a gradient reaches its outputs, or when an operation needs a saved tensor.
Autograd saves references in place of parameters, so they do not keep the memory alive:

    forward    enter a ── unshard ── compute ── leave a ── reshard a
    backward   touch a ── unshard ── compute ── touch b ── reshard a

Collective gathers take turns in the gather order. The gather of the next unit runs while the
present one computes. The last unit of a pass (the part of the model around the other units) stays
whole from the end of forward until the end of backward. `unshard.py` does the gathers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardwise.comm import Collectives, GatherOrder
from shardwise.errors import UsageError
from shardwise.states.parameters.bucket_gathers import AllGathers, SharedMemoryGathers
from shardwise.states.parameters.saved_references import BucketReference
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.parameters.sharded_parameters import ShardedParameters
from shardwise.states.parameters.unshard import Unit, WholeUnits
from shardwise.timeline import span


class Residency:
    """Unshards and reshards units as passes go through them.

    `group` is used for gathers only, which take turns in `order`. `inside` returns the units that a
    module contains, in their order.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        units: Sequence[Unit],
        group: Collectives,
        order: GatherOrder,
        inside: Callable[[nn.Module], Sequence[int]],
    ) -> None:
        self._parameters = parameters
        self.units = units
        shared = all(bucket.common is not None for unit in units for bucket in unit.buckets)
        self._gathers = SharedMemoryGathers() if shared else AllGathers(group)
        self._order = order
        self._first = 0
        if self._gathers.collective:
            staying = [number for number, unit in enumerate(units) if unit.lasting]
            self._first = order.join(self, [unit.name for unit in units], staying=staying)
        self._inside = inside
        self.part: int | None = None
        """The part of the model that runs now, if it runs in parts; each part uses other units."""
        self._expected: dict[Hashable, Sequence[int]] = {}
        """By kind of forward, the units of its outermost module."""
        self._over: Callable[[int], None] | None = None
        self._pass: Hashable = None
        """Kind of the running pass; None if there is none."""
        self._depth = 0
        """Number of running module forwards, one inside the other."""
        self._tape: list[Hashable] = []
        """Kinds of the recorded forwards that no backward has followed yet."""
        self._backwards = 0
        self._own: dict[int, bool] = {}
        """By unit that a block of user code holds whole, whether the block may write it."""
        self._whole = WholeUnits(parameters, units, self._gathers)
        self.settled()
        parameters.watch(self.settled)

    @property
    def is_idle(self) -> bool:
        """Whether no forward or backward is running."""
        return self._pass is None

    @property
    def is_collective(self) -> bool:
        """Whether gathers are collective, so that a forward needs every rank."""
        return self._gathers.collective

    def pace(self, over: Callable[[int], None]) -> bool:
        """Call `over` after a unit's last gather in each backward, at the same point on all ranks.

        Returns whether gathers are collective.
        """
        self._over = over
        return self._gathers.collective

    # -- forward --------------------------------------------------------------------------

    def enter(self, number: int, hook: int, module: nn.Module) -> None:
        """Unshard unit `number`, because one of its modules begins its forward.

        `hook` is the number of the module's hook.
        """
        self._end_dead_passes()
        # Only the outermost module starts a pass. Within a backward this forward is a
        # recomputation, whose units belong to the backward's pass.
        if self._depth == 0 and self._pass is None:
            self._whole.reshard_unneeded(keep_lasting=self.is_awaited)
            self._whole.casts.begin()
            # Passes of one kind need the same units, so the gather order learns each kind once.
            kind = ("forward", hook, torch.is_grad_enabled(), self.part)
            if kind not in self._expected:
                self._expected[kind] = self._inside(module)
            self._open(kind)
        self._depth += 1
        self.units[number].depth += 1
        self._need(number)

    def leave(self, number: int, *, failed: bool) -> None:
        """Reshard unit `number`, if possible, because a module's forward has ended or failed."""
        unit = self.units[number]
        if not unit.depth:
            return  # the forward failed before `enter`
        self._depth -= 1
        unit.depth -= 1
        in_backward = self._is_backward()
        # A lasting unit is the last of a forward and the first of its backward: keep it.
        awaited = torch.is_grad_enabled() or self.is_awaited
        if not (unit.depth or in_backward or (unit.lasting and awaited)):
            self._whole.casts.leave_unit(number)
            self._whole.reshard_if_unneeded(unit)
        if self._depth == 0 and not in_backward:
            self._whole.casts.end()
            kind, self._pass = self._pass, None
            if torch.is_grad_enabled():
                self._tape.append(kind)
            # Other ranks may need units that this rank's forward has skipped. It takes part in
            # their gathers before it continues; otherwise they would wait forever.
            self._finish_turns(self._expected[kind], failed=failed)
            self._whole.reshard_unneeded(keep_lasting=self.is_awaited)
            self._whole.allow_writes(False)

    @property
    def is_awaited(self) -> bool:
        """Whether a recorded forward still waits for its backward."""
        return bool(self._tape)

    def keep(self, number: int | None = None) -> None:
        """Keep unit `number`, or all whole units, until the next backward has ended.

        Needed if autograd saves the parameters themselves, not references to them.
        """
        self._whole.keep(number)

    # -- backward -------------------------------------------------------------------------

    def open_backward(self) -> None:
        """Begin a backward over the forwards recorded since the last backward."""
        self._end_dead_passes()
        self._backwards += 1
        # The kind has the forwards and a number: the second backward over a graph (`keep_graph`)
        # may need other units than the first, so the gather order learns each separately.
        self._open(("backward", self._backwards, self.part, *self._tape))

    def close_backward(self, *, keep_graph: bool = False, failed: bool = False) -> None:
        """End a backward, which may have failed.

        With `keep_graph` another backward over the same forwards may follow.
        """
        if not self._is_backward():
            return
        expected: Sequence[int] = ()
        if self._gathers.collective:
            # All units that a backward may need. A lasting unit may be needed first or last, so it
            # is gathered first and stays whole.
            recorded = {unit for kind in self._tape for unit in self._expected[kind]}
            expected = sorted(recorded, key=lambda unit: (not self.units[unit].lasting, -unit))
        self._finish_turns(expected, failed=failed)
        self._pass = None
        if not keep_graph:
            self._forget_forwards()
        self._whole.reshard_unneeded()
        self._whole.allow_writes(False)

    def _forget_forwards(self) -> None:
        """Drop the recorded forwards, because no backward will follow them."""
        self._tape.clear()
        self._backwards = 0
        self._whole.end_keeping()

    def touch(self, number: int) -> None:
        """Unshard unit `number`, because a backward needs it."""
        if self._pass is None:
            # A backward that the engine did not start: torch.autograd.grad, or another engine's.
            # Nothing announces its end, except autograd's callback.
            self.open_backward()
            close = partial(self.close_backward, keep_graph=True)
            Variable._execution_engine.queue_callback(close)
        self._need(number)

    def _need(self, number: int) -> None:
        if self.units[number].is_whole:
            return
        if self._is_backward():
            # Backward has left the unit before it: reshard that first, to reuse its buffer.
            self._whole.reshard_unneeded(keep_lasting=True)
        if not self._gathers.collective:
            self._whole.unshard(number)
            return
        with span("gather"):
            self._order.reach(self._first + number)

    def _end_dead_passes(self) -> None:
        """End failed backwards that the engine did not start: nothing else reports them."""
        self._order.end_dead_pass()
        self.end_dead_pass()

    def end_dead_pass(self) -> None:
        """End a failed backward through these units."""
        # -1: autograd executes no graph in this thread, so a backward that is still open here has
        # raised, and its callback never ran.
        if self._is_backward() and torch._C._current_graph_task_id() == -1:
            self._depth = 0
            for unit in self.units:
                unit.depth = 0
            self.close_backward(keep_graph=True, failed=True)

    def _is_backward(self) -> bool:
        return isinstance(self._pass, tuple) and self._pass[0] == "backward"

    # -- what autograd saves --------------------------------------------------------------

    @property
    def reference_of(self) -> Callable[[Tensor], BucketReference | None]:
        """A function that returns the reference to save in place of a tensor.

        It returns None for a tensor that is not in the memory of a whole unit.
        """
        return self._whole.reference_of

    def fetch(self, reference: BucketReference) -> Tensor:
        """Return the tensor of `reference`, unsharding its unit if necessary.

        Raises UsageError if the parameters have changed since the forward.
        """
        unit = self.units[reference.unit]
        if not self._whole.is_current(reference):
            raise UsageError(
                f"The backward through {unit.name} belongs to a forward that ran before the last "
                "change of its parameters (engine.step, or full_parameters with write=True). "
                "Compute the loss again after that change."
            )
        if not unit.is_whole or self._pass is None:
            self.touch(reference.unit)
        return self._whole.tensor_at(reference)

    # -- between steps --------------------------------------------------------------------

    def settled(self) -> None:
        """Handle changed parameters: gather the units that are always whole again. Collective."""
        self._forget_forwards()
        self._whole.renew()

    @contextmanager
    def whole(
        self, numbers: Sequence[int], *, here: bool = True, write: bool = False
    ) -> Iterator[dict[ShardedBucket, Tensor]]:
        """Context manager that holds the units `numbers` whole, to read or, with `write`, to write.

        Collective. The units get separate memory for the block. Yields their buckets, except those
        that an enclosing block already holds and will release. A rank that is not `here` only takes
        part in the gathers.
        """
        if self._pass is not None:
            raise UsageError(
                "engine.full_parameters was entered inside a forward or a backward. Enter it "
                "before or after them."
            )
        if not self.in_block:  # an enclosing block stores its own writes when it ends
            self._parameters.check()
        self._whole.reshard_unneeded()
        new = [number for number in numbers if number not in self._own]
        shown: dict[ShardedBucket, Tensor] = {}
        for number in new:
            shown |= self._whole.make_own(number, here=here)
        self._own |= dict.fromkeys(new, write)
        try:
            yield shown
        finally:
            self._whole.forget_writes()
            # Even after an error in the block: `end_own` may gather, and other ranks take part.
            for number in new:
                del self._own[number]
                self._whole.end_own(number, here=here)
            self._whole.allow_writes(False)

    def check_passes(self) -> None:
        """Raise BrokenView if user code wrote into a parameter during a pass.

        Such a write reaches no shard. Waits for the pending checks of all passes so far.
        """
        self._whole.finish_checks()
        if not self.in_block:  # an enclosing block stores its own writes when it ends
            self._parameters.check()

    @property
    def in_block(self) -> bool:
        """Whether user code is inside a block that holds units whole."""
        return bool(self._own)

    def is_writable(self, numbers: Sequence[int]) -> bool:
        """Return whether a block of user code holds all of `numbers` whole, for writing."""
        return all(self._own.get(number, False) for number in numbers)

    def check_unwritten(self, shown: Mapping[ShardedBucket, Tensor]) -> None:
        """Raise BrokenView if one of `shown`, which `whole` yielded for reading, was written.

        Collective.
        """
        self._parameters.check_unwritten(shown)
        if not any(self._own.values()):
            self._parameters.check()

    def resting(self) -> list[Tensor]:
        """Return the parameters that are not whole now."""
        return [t.parameter for unit in self.units if not unit.is_whole for t in unit.named]

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Context manager that lets ranks run different numbers of forwards.

        See Engine.uneven.
        """
        self._whole.reshard_unneeded()
        if self._gathers.collective:
            with self._order.uneven():
                yield
            return
        bring_back = self.set_aside()
        try:
            yield
        finally:
            bring_back()

    def check(self) -> None:
        """No-op: the gather order keeps ranks from gathering different units."""

    def set_aside(self) -> Callable[[], None]:
        """Set the recorded forwards aside, so that passes from now on concern only this rank.

        Returns a function that restores them.
        """
        recorded = list(self._tape), self._backwards

        def bring_back() -> None:
            self.end_dead_pass()
            self._tape, self._backwards = recorded

        return bring_back

    def reset(self) -> None:
        """Drop the state that a failed forward or backward has left."""
        self._depth, self._pass = 0, None
        self._order.drop(self)
        for unit in self.units:
            unit.depth = 0
        self._forget_forwards()
        self._whole.reshard_unneeded()

    def reshard_in_child(self) -> None:
        """Reshard gathered units in a forked child, which does not have the gather buffers."""
        # Units in a block of user code are in ordinary memory, which the fork has copied.
        for number, unit in enumerate(self.units):
            for bucket in unit.buckets if unit.is_whole and number not in self._own else ():
                self._parameters.reshard(bucket)

    def close(self) -> None:
        """Reshard all units and release the gather order."""
        self.reset()
        if self._gathers.collective:
            self._order.leave(self._first)
        self._gathers.close()

    # -- gathers --------------------------------------------------------------------------

    def _open(self, kind: Hashable) -> None:
        self._whole.allow_writes(True)
        self._pass = kind
        if self._gathers.collective:
            self._order.open(self, (self._first, kind), descending=self._is_backward())

    def _finish_turns(self, expected: Sequence[int], *, failed: bool) -> None:
        """Take part in the gathers that other ranks still need in this pass."""
        if self._gathers.collective:
            numbers = [self._first + number for number in expected]
            self._order.close(self, numbers, failed=failed)

    def mode(self) -> None:
        """No-op: all passes of one kind gather in the same way."""

    def is_past(self, number: int) -> None:
        """Report that all ranks have gathered unit `number` for the last time in this backward."""
        if self._over is not None and self._is_backward() and not self.units[number].lasting:
            self._over(number)

    def run_entry(self, number: int, *, wanted: bool) -> None:
        """Gather unit `number` with all ranks, and keep it whole if this rank has `wanted` it."""
        unit = self.units[number]
        # A lasting unit stays whole from its first turn in a backward on: it has no second turn.
        if wanted or (self._is_backward() and unit.lasting and not unit.is_whole):
            self._whole.unshard(number)
        else:
            self._whole.take_part(number)

    def start_ahead(self, number: int) -> None:
        """Start the gather of unit `number`, which has the next turn."""
        self._whole.start_ahead(number)
