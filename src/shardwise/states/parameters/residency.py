"""Decides when to gather each unit of sharded parameters, and when to release it.

The forward pass unshards a unit on entering one of its modules, and reshards it on leaving. The
backward pass unshards the unit again when a gradient reaches its outputs, or when an operation
needs a saved tensor. Autograd saves references in place of parameters, so it does not keep the
parameters' memory alive:

    forward    enter a ── unshard ── compute ── leave a ── reshard a
    backward   touch a ── unshard ── compute ── touch b ── reshard a

Collective gathers follow the gather order. The next unit is gathered while the current one
computes. The last unit of a pass (the part of the model around the other units) stays gathered from
the end of the forward pass until the end of the backward pass. `unshard.py` runs the gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardwise.comm import GatherOrder
from shardwise.errors import UsageError
from shardwise.states.parameters.bucket_gathers import AllGathers, SharedMemoryGathers
from shardwise.states.parameters.saved_references import BucketReference
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.parameters.sharded_parameters import ShardedParameters
from shardwise.states.parameters.unshard import Unit, WholeUnits
from shardwise.states.shard_groups import ShardGroups
from shardwise.timeline import span


class Residency:
    """Unshards and reshards units as forward and backward passes reach them.

    Args:
        parameters: The sharded parameters.
        units: All units, in registration order.
        groups: The ranks that gather each bucket.
        order: The order in which all ranks run collective gathers.
        inside: Returns the indices of the units inside a module, in order.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        units: Sequence[Unit],
        groups: ShardGroups,
        order: GatherOrder,
        inside: Callable[[nn.Module], Sequence[int]],
    ) -> None:
        self._parameters = parameters
        self.units = units
        shared = all(bucket.common is not None for unit in units for bucket in unit.buckets)
        self._gathers = (
            SharedMemoryGathers()
            if shared
            else AllGathers(groups, collective=parameters.is_collective)
        )
        self._order = order
        self._first = 0
        if self._gathers.collective:
            staying = [number for number, unit in enumerate(units) if unit.lasting]
            self._first = order.join(self, [unit.name for unit in units], staying=staying)
        self._inside = inside
        self.part: int | None = None
        """The part of the model that is running, if it runs in parts. Each part uses different
        units."""
        self._expected: dict[Hashable, Sequence[int]] = {}
        """Kind of forward pass -> units of its outermost module."""
        self._over: Callable[[int], None] | None = None
        self._pass: Hashable = None
        """Kind of the running pass, or None."""
        self._depth = 0
        """Nesting depth of the running module forward passes."""
        self._tape: list[Hashable] = []
        """Kinds of the recorded forward passes that still wait for their backward pass."""
        self._backwards = 0
        self._own: dict[int, bool] = {}
        """For each unit that a block of user code holds gathered, whether the block may write
        it."""
        self._whole = WholeUnits(parameters, units, self._gathers)
        self.settled()
        parameters.watch(self.settled)

    @property
    def is_idle(self) -> bool:
        """True if no forward or backward pass is running."""
        return self._pass is None

    @property
    def is_collective(self) -> bool:
        """True if gathers are collective, so that every rank must run each forward pass."""
        return self._gathers.collective

    def pace(self, over: Callable[[int], None]) -> bool:
        """Register `over`, to be called after a unit's last gather in each backward pass.

        Its argument is the unit's index. All ranks call it at the same point. Returns whether
        gathers are collective.
        """
        self._over = over
        return self._gathers.collective

    @contextmanager
    def unpaced(self) -> Iterator[None]:
        """Context manager inside which the function passed to `pace` is not called.

        Used for passes whose gradients are discarded.
        """
        over, self._over = self._over, None
        try:
            yield
        finally:
            self._over = over

    # -- forward --------------------------------------------------------------------------

    def enter(self, number: int, hook: int, module: nn.Module) -> None:
        """Unshard unit `number`, because the forward pass of one of its modules begins.

        `hook` is the index of the module's hook.
        """
        self._end_dead_passes()
        # Only the outermost module starts a pass. A forward pass inside a backward pass is a
        # recomputation, whose units belong to the backward pass.
        if self._depth == 0 and self._pass is None:
            self._whole.reshard_unneeded(keep_lasting=self.is_awaited)
            self._whole.casts.begin()
            # Passes of the same kind need the same units, so the gather order learns each kind
            # once.
            kind = ("forward", hook, torch.is_grad_enabled(), self.part)
            if kind not in self._expected:
                self._expected[kind] = self._inside(module)
            self._open(kind)
        self._depth += 1
        self.units[number].depth += 1
        self._need(number)

    def leave(self, number: int, *, failed: bool) -> None:
        """Reshard unit `number` if possible, after the forward pass of one of its modules.

        `failed` states whether that forward pass raised.
        """
        unit = self.units[number]
        if not unit.depth:
            return  # the forward pass failed before `enter`
        self._depth -= 1
        unit.depth -= 1
        in_backward = self._is_backward()
        # A lasting unit is the last of a forward pass and the first of its backward pass, so keep
        # it.
        awaited = torch.is_grad_enabled() or self.is_awaited
        if not (unit.depth or in_backward or (unit.lasting and awaited)):
            self._whole.casts.leave_unit(number)
            self._whole.reshard_if_unneeded(unit)
        if self._depth == 0 and not in_backward:
            self._whole.casts.end()
            kind, self._pass = self._pass, None
            if torch.is_grad_enabled():
                self._tape.append(kind)
            # Other ranks may need units that this rank's forward pass has skipped. Join their
            # gathers before continuing; otherwise the other ranks would wait forever.
            self._finish_turns(self._expected[kind], failed=failed)
            self._whole.reshard_unneeded(keep_lasting=self.is_awaited)
            self._whole.allow_writes(False)

    @property
    def is_awaited(self) -> bool:
        """True if a recorded forward pass has not had its backward pass yet."""
        return bool(self._tape)

    def keep(self, number: int | None = None) -> None:
        """Keep unit `number` (None: all gathered units) gathered until a backward pass has ended.

        Needed if autograd saves the parameters themselves rather than references to them.
        """
        self._whole.keep(number)

    # -- backward -------------------------------------------------------------------------

    def open_backward(self) -> None:
        """Begin a backward pass through all forward passes recorded since the previous one."""
        self._end_dead_passes()
        self._backwards += 1
        # The kind consists of the forward passes and a counter: a second backward pass through the
        # same graph (`keep_graph`) may need different units, so the gather order learns each
        # separately.
        self._open(("backward", self._backwards, self.part, *self._tape))

    def close_backward(self, *, keep_graph: bool = False, failed: bool = False) -> None:
        """Finish a backward pass, which may have failed.

        If `keep_graph` is true, another backward pass through the same forward passes may follow.
        """
        if not self._is_backward():
            return
        expected: Sequence[int] = ()
        if self._gathers.collective:
            # All units that a backward pass may need. A lasting unit may be needed first or last,
            # so it is gathered first and stays gathered.
            recorded = {unit for kind in self._tape for unit in self._expected[kind]}
            expected = sorted(recorded, key=lambda unit: (not self.units[unit].lasting, -unit))
        self._finish_turns(expected, failed=failed)
        self._pass = None
        if not keep_graph:
            self._forget_forwards()
        self._whole.reshard_unneeded()
        self._whole.allow_writes(False)

    def _forget_forwards(self) -> None:
        """Discard the recorded forward passes, because no backward pass will follow them."""
        self._tape.clear()
        self._backwards = 0
        self._whole.end_keeping()

    def touch(self, number: int) -> None:
        """Unshard unit `number`, because a backward pass needs it."""
        if self._pass is None:
            # The engine did not start this backward pass: torch.autograd.grad or another engine
            # did. Only autograd's callback tells when it ends.
            self.open_backward()
            close = partial(self.close_backward, keep_graph=True)
            Variable._execution_engine.queue_callback(close)
        self._need(number)

    def _need(self, number: int) -> None:
        if self.units[number].is_whole:
            return
        if self._is_backward():
            # The backward pass is done with the previous unit, so reshard that one first to reuse
            # its buffer.
            self._whole.reshard_unneeded(keep_lasting=True)
        if not self._gathers.collective:
            self._whole.unshard(number)
            return
        with span("gather"):
            self._order.reach(self._first + number)

    def _end_dead_passes(self) -> None:
        """Finish failed backward passes that the engine did not start and nothing else reports."""
        self._order.end_dead_pass()
        self.end_dead_pass()

    def end_dead_pass(self) -> None:
        """Finish a backward pass through these units if it has failed without being noticed."""
        # -1 means that autograd executes no graph in this thread. A backward pass that is still
        # open here has therefore raised, and its callback never ran.
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
        """Function that returns the reference for autograd to save in place of a tensor.

        It returns None for a tensor outside the memory of gathered units.
        """
        return self._whole.reference_of

    def fetch(self, reference: BucketReference) -> Tensor:
        """Return the tensor that `reference` stands for. Unshards its unit if necessary.

        Raises UsageError if the parameters have changed since the forward pass.
        """
        unit = self.units[reference.unit]
        if not self._whole.is_current(reference):
            raise UsageError(
                f"The backward through {unit.name} belongs to a forward that ran before the last "
                "change of its parameters (engine.step, or full_parameters with write=True). "
                "Compute the loss again after the change."
            )
        if not unit.is_whole or self._pass is None:
            self.touch(reference.unit)
        return self._whole.tensor_at(reference)

    # -- between steps --------------------------------------------------------------------

    def settled(self) -> None:
        """Discard recorded forward passes and gather permanent units again.

        Call after the parameters have changed. Permanent units are always gathered. Collective.
        """
        self._forget_forwards()
        self._whole.renew()

    @contextmanager
    def whole(
        self, numbers: Sequence[int], *, here: bool = True, write: bool = False
    ) -> Iterator[dict[ShardedBucket, Tensor]]:
        """Context manager that gathers the units `numbers`, for reading or (if `write`) writing.

        Collective. Inside the block, the units are in separate memory. Yields their full buckets,
        except those of units that an enclosing block has already gathered. A rank whose `here` is
        False only participates in the gathers.
        """
        if self._pass is not None:
            raise UsageError(
                "engine.full_parameters was entered inside a forward or a backward. Enter it "
                "before or after them."
            )
        if not self.in_block:  # an enclosing block stores its own writes on exit
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
            # Do this even after an error in the block, because `end_own` may gather and other ranks
            # take part.
            for number in new:
                del self._own[number]
                self._whole.end_own(number, here=here)
            self._whole.allow_writes(False)

    def check_passes(self) -> None:
        """Raise BrokenView if user code wrote to a parameter during a pass.

        Such a write would not reach any shard. Waits for the pending checks of all passes so far.
        """
        self._whole.finish_checks()
        if not self.in_block:  # an enclosing block stores its own writes on exit
            self._parameters.check()

    @property
    def in_block(self) -> bool:
        """True if user code is inside a `whole` block."""
        return bool(self._own)

    def is_writable(self, numbers: Sequence[int]) -> bool:
        """Return whether blocks of user code have gathered all units `numbers` for writing."""
        return all(self._own.get(number, False) for number in numbers)

    def check_unwritten(self, shown: Mapping[ShardedBucket, Tensor]) -> None:
        """Raise BrokenView if user code wrote to any of the read-only full buckets `shown`.

        `whole` yielded these buckets. Collective.
        """
        self._parameters.check_unwritten(shown)
        if not any(self._own.values()):
            self._parameters.check()

    def resting(self) -> list[Tensor]:
        """Return the parameters that are not gathered."""
        return [t.parameter for unit in self.units if not unit.is_whole for t in unit.named]

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Context manager that lets ranks run different numbers of forward passes.

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
        """No-op: the gather order prevents ranks from gathering different units."""

    def set_aside(self) -> Callable[[], None]:
        """Set the recorded forward passes aside, so that this rank can run passes on its own.

        Returns a function that restores the recorded passes.
        """
        recorded = list(self._tape), self._backwards

        def bring_back() -> None:
            self.end_dead_pass()
            self._tape, self._backwards = recorded

        return bring_back

    def reset(self) -> None:
        """Discard the state that a failed forward or backward pass has left behind."""
        self._depth, self._pass = 0, None
        self._order.drop(self)
        for unit in self.units:
            unit.depth = 0
        self._forget_forwards()
        self._whole.reshard_unneeded()

    def reshard_in_child(self) -> None:
        """Reshard gathered units in a forked process, which has no gather buffers."""
        # Units held by a block of user code are in ordinary memory, which the fork has copied.
        for number, unit in enumerate(self.units):
            for bucket in unit.buckets if unit.is_whole and number not in self._own else ():
                self._parameters.reshard(bucket)

    def close(self) -> None:
        """Reshard all units and leave the gather order."""
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
        """Participate in the gathers that other ranks still need in this pass."""
        if self._gathers.collective:
            numbers = [self._first + number for number in expected]
            self._order.close(self, numbers, failed=failed)

    def mode(self) -> None:
        """No-op: all passes of the same kind gather in the same way."""

    def is_past(self, number: int) -> None:
        """Call the function passed to `pace`: unit `number` had its last gather in this pass."""
        if self._over is not None and self._is_backward() and not self.units[number].lasting:
            self._over(number)

    def run_entry(self, number: int, *, wanted: bool) -> None:
        """Gather unit `number` with all ranks. Keep it gathered only if `wanted` is true."""
        unit = self.units[number]
        # A lasting unit stays gathered from its first turn in a backward pass on: it has no second
        # turn.
        if wanted or (self._is_backward() and unit.lasting and not unit.is_whole):
            self._whole.unshard(number)
        else:
            self._whole.take_part(number)

    def start_ahead(self, number: int) -> None:
        """Start gathering unit `number`, the next one in the gather order."""
        self._whole.start_ahead(number)
