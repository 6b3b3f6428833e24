"""Decides when each unit of sharded parameters is whole: while its forward or backward needs it.

Forward shows a unit on entering one of its modules and lets it go on leaving. Backward shows it
again when a gradient reaches its outputs, or when an operation asks for what it saved:

    forward    enter a ── show ── compute ── leave a ── rest      what autograd saves of a
    backward   touch a ── show ── compute ── touch b ── rest a    parameter is a reference

Gathers that are collective take turns in the gather order; the next unit is on its way while one
computes. The last unit of a pass, the rest of the model around the others, stays whole from the end
of forward until backward has ended. `unshard` shows units and rests them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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
    """Shows units and lets them rest; `group` is for gathers alone, which take turns in `order`."""

    def __init__(
        self,
        parameters: ShardedParameters,
        units: Sequence[Unit],
        group: Collectives,
        order: GatherOrder,
        inside: Callable[[nn.Module], Sequence[int]],
    ) -> None:
        """`inside` gives the units that a module holds, in their order."""
        self._parameters = parameters
        self.units = units
        shared = all(bucket.common is not None for unit in units for bucket in unit.buckets)
        self._gathers = SharedMemoryGathers() if shared else AllGathers(group)
        self._order = order
        self._first = self._join() if self._gathers.collective else 0
        self._inside = inside
        self.part: int | None = None
        """Of a model that runs in parts, the one that does now: each needs units of its own."""
        self._expected: dict[Hashable, Sequence[int]] = {}
        self._over: Callable[[int], None] | None = None
        self._pass: Hashable = None
        self._depth = 0
        self._tape: list[Hashable] = []
        self._backwards = 0
        self._own: dict[int, bool] = {}
        """The units that a block of the user's has whole, and whether it is there to write."""
        self._whole = WholeUnits(parameters, units, self._gathers)
        self.settled()
        parameters.watch(self.settled)

    def _join(self) -> int:
        staying = [number for number, unit in enumerate(self.units) if unit.lasting]
        return self._order.join(self, [unit.name for unit in self.units], staying=staying)

    @property
    def is_idle(self) -> bool:
        """Whether no forward and no backward is under way."""
        return self._pass is None

    @property
    def is_collective(self) -> bool:
        """Whether ranks gather units together, so that a forward takes all of them."""
        return self._gathers.collective

    def pace(self, over: Callable[[int], None]) -> bool:
        """Register `over`, called after a unit's last gather in a backward, at the same point on
        every rank. Returns whether gathers are collective."""
        self._over = over
        return self._gathers.collective

    # -- forward --------------------------------------------------------------------------

    def enter(self, number: int, hook: int, module: nn.Module) -> None:
        """A module of unit `number` begins its forward; `hook` is the number of its hook."""
        self._end_dead_passes()
        if self._depth == 0 and self._pass is None:
            self._whole.let_go_of_all(but_lasting=self.is_awaited)
            self._whole.casts.begin()
            kind = ("forward", hook, torch.is_grad_enabled(), self.part)
            if kind not in self._expected:
                self._expected[kind] = self._inside(module)
            self._open(kind)
        self._depth += 1
        self.units[number].depth += 1
        self._need(number)

    def leave(self, number: int, *, failed: bool) -> None:
        """A module's forward has ended, or failed."""
        unit = self.units[number]
        if not unit.depth:
            return  # it failed before it began
        self._depth -= 1
        unit.depth -= 1
        in_backward = self._is_backward()
        awaited = torch.is_grad_enabled() or self.is_awaited
        if not (unit.depth or in_backward or (unit.lasting and awaited)):
            self._whole.casts.left(number)
            self._whole.let_go(unit)
        if self._depth == 0 and not in_backward:
            self._whole.casts.end()
            kind, self._pass = self._pass, None
            if torch.is_grad_enabled():
                self._tape.append(kind)
            # Other ranks may need units that this one's forward has skipped: it takes part in their
            # gathers before it goes on, or they would wait for ever.
            self._finish_turns(self._expected[kind], failed=failed)
            self._whole.let_go_of_all(but_lasting=self.is_awaited)
            self._whole.allow_writes(False)

    @property
    def is_awaited(self) -> bool:
        """Whether a backward is still to come over a forward that was recorded."""
        return bool(self._tape)

    def keep(self, number: int | None = None) -> None:
        """Keep unit `number`, or all that are whole, until the next backward has ended: autograd
        saves their parameters themselves, and no references to them."""
        self._whole.keep(number)

    # -- backward -------------------------------------------------------------------------

    def open_backward(self) -> None:
        """A backward over what was recorded since the last one begins."""
        self._end_dead_passes()
        self._backwards += 1
        self._open(("backward", self._backwards, self.part, *self._tape))

    def close_backward(self, *, keep_graph: bool = False, failed: bool = False) -> None:
        """A backward has ended, or failed; with `keep_graph` another one may follow over it."""
        if not self._is_backward():
            return
        self._finish_turns(self._recorded() if self._gathers.collective else (), failed=failed)
        self._pass = None
        if not keep_graph:
            self._forget_forwards()
        self._whole.let_go_of_all()
        self._whole.allow_writes(False)

    def _forget_forwards(self) -> None:
        """No backward will come over the forwards so far."""
        self._tape.clear()
        self._backwards = 0
        self._whole.end_keeping()

    def _recorded(self) -> list[int]:
        """The units that a backward may come to. What is lasting may be needed first or last: it
        comes first, and stays."""
        recorded = {unit for kind in self._tape for unit in self._expected[kind]}
        return sorted(recorded, key=lambda unit: (not self.units[unit].lasting, -unit))

    def touch(self, number: int) -> None:
        """Unit `number` is needed in a backward."""
        if self._pass is None:
            # A backward of the user's own: torch.autograd.grad, or another engine's.
            self.open_backward()
            Variable._execution_engine.queue_callback(self._close_stray)
        self._need(number)

    def _need(self, number: int) -> None:
        if self.units[number].is_whole:
            return
        if self._is_backward():
            # Backward has left the unit before: rest it first, so that its buffer can be borrowed.
            self._whole.let_go_of_all(but_lasting=True)
        self._acquire(number)

    def _close_stray(self) -> None:
        self.close_backward(keep_graph=True)

    def _end_dead_passes(self) -> None:
        """End backwards of the user's own that have failed: nothing else reports that."""
        self._order.end_dead_pass()
        self.end_dead_pass()

    def end_dead_pass(self) -> None:
        """End a backward through these units that has failed."""
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
        """Finds what to save instead of a tensor, if its memory is a shown unit's."""
        return self._whole.reference_of

    def fetch(self, reference: BucketReference) -> Tensor:
        """The tensor of `reference`, its unit shown. Raises UsageError after a step in between."""
        unit = self.units[reference.unit]
        if not self._whole.is_current(reference):
            raise UsageError(
                f"A backward came to {unit.name} through a forward from before the last change of "
                "its parameters (engine.step, or full_parameters with write=True). Compute the "
                "loss again after it."
            )
        if not unit.is_whole or self._pass is None:
            self.touch(reference.unit)
        return self._whole.tensor_at(reference)

    # -- between steps --------------------------------------------------------------------

    def settled(self) -> None:
        """Parameters have changed: show those that are always shown anew. Collective."""
        self._forget_forwards()
        self._whole.renew()

    @contextmanager
    def whole(
        self, numbers: Sequence[int], *, here: bool = True, write: bool = False
    ) -> Iterator[dict[ShardedBucket, Tensor]]:
        """Inside the block the units `numbers` are whole, in memory of their own, to read or to
        `write`. Collective.

        Yields their buckets, but for those that a block around has already: they are its to end. A
        rank that is not `here` takes part and keeps nothing.
        """
        if self._pass is not None:
            raise UsageError(
                "engine.full_parameters inside a forward or a backward: enter it outside of them."
            )
        if not self.in_block:  # what a block around has written is that block's to store
            self._parameters.check()
        self._whole.let_go_of_all()
        new = [number for number in numbers if number not in self._own]
        shown: dict[ShardedBucket, Tensor] = {}
        for number in new:
            shown |= self._whole.make_own(number, here=here)
        self._own |= dict.fromkeys(new, write)
        try:
            yield shown
        finally:
            self._whole.forget_writes()
            for number in new:
                del self._own[number]
                self._whole.end_own(number, here=here)
            self._whole.allow_writes(False)

    def check_passes(self) -> None:
        """Raise BrokenView where something was written in a pass, which reaches no shard. Waits
        until that is known of all so far."""
        self._whole.finish_checks()
        if not self.in_block:  # what a block around has written is that block's to store
            self._parameters.check()

    @property
    def in_block(self) -> bool:
        """Whether a block of the user's has units whole now."""
        return bool(self._own)

    def is_writable(self, numbers: Sequence[int]) -> bool:
        """Whether a block of the user's has all of `numbers` whole, to write."""
        return all(self._own.get(number, False) for number in numbers)

    def check_unwritten(self, shown: Mapping[ShardedBucket, Tensor]) -> None:
        """Raise BrokenView if one of `shown`, which `whole` gave to be read, was written to.
        Collective."""
        self._parameters.check_unwritten(shown)
        if not any(self._own.values()):
            self._parameters.check()

    def resting(self) -> list[Tensor]:
        """The parameters that are not whole."""
        return [t.parameter for unit in self.units if not unit.is_whole for t in unit.named]

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Inside the block each rank may run as many forwards as it likes; see Engine.uneven."""
        self._whole.let_go_of_all()
        with self._order.uneven() if self._gathers.collective else self._apart():
            yield

    @contextmanager
    def _apart(self) -> Iterator[None]:
        bring_back = self.set_aside()
        try:
            yield
        finally:
            bring_back()

    def check(self) -> None:
        """Nothing to look at: ranks that gather different units never do so."""

    def set_aside(self) -> Callable[[], None]:
        """Let what is recorded from now on be no other rank's; returns what ends that."""
        recorded = list(self._tape), self._backwards

        def bring_back() -> None:
            self.end_dead_pass()
            self._tape, self._backwards = recorded

        return bring_back

    def reset(self) -> None:
        """Forget what a forward or backward that failed has left."""
        self._depth, self._pass = 0, None
        self._order.drop(self)
        for unit in self.units:
            unit.depth = 0
        self._forget_forwards()
        self._whole.let_go_of_all()

    def rest_in_child(self) -> None:
        """In a forked child: take the values of gathered units away, which lie in buffers that the
        child does not have. Units in a block of the user's have memory of their own."""
        for number, unit in enumerate(self.units):
            for bucket in unit.buckets if unit.is_whole and number not in self._own else ():
                self._parameters.rest(bucket)

    def close(self) -> None:
        """Nothing will be shown any more."""
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
        """Take part in what other ranks still need of this pass."""
        if self._gathers.collective:
            numbers = [self._first + number for number in expected]
            self._order.close(self, numbers, failed=failed)

    def mode(self) -> None:
        """Passes of one kind are alike."""

    def is_past(self, number: int) -> None:
        """In the backward under way all ranks are past unit `number`."""
        if self._over is not None and self._is_backward() and not self.units[number].lasting:
            self._over(number)

    def run_entry(self, number: int, *, wanted: bool) -> None:
        """Gather unit `number` with all ranks, and show it if this one has `wanted` it. What is
        lasting stays from its first turn in a backward on."""
        unit = self.units[number]
        if wanted or (self._is_backward() and unit.lasting and not unit.is_whole):
            self._whole.show(number)
        else:
            self._whole.take_part(number)

    def _acquire(self, number: int) -> None:
        if not self._gathers.collective:
            self._whole.show(number)
            return
        with span("gather"):
            self._order.reach(self._first + number)

    def start_ahead(self, number: int) -> None:
        """Start the gather of unit `number`, whose turn comes next."""
        self._whole.start_ahead(number)
