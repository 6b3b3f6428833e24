"""Sends the gradient sums of a step to the other islands; has the sum of all some steps later.

    send     pack the sums of this island    | packed sum |    all-gather over peers of equal place
    land     unpack, add in the order of the islands, so that all have the same bits
    use      in the place of this island's own sums
    stepped  forget those that were used, keep what the wire has lost
    forget   tell the others that nothing follows, and wait for what is on its way

Until `stepped` a step may be abandoned and begun again: what it has sent is dropped then.

Each rank has a part of every bucket: its interval, which in the rows that replicate optimizer state
is gathered over the island when it is used. So an island of n ranks sends each element once.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.errors import NonFiniteError, UsageError
from shardwise.islands.island_exchange import Message, send
from shardwise.islands.wire import Wire
from shardwise.model.precision import NARROW
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.storage.storage import Storage
from shardwise.states.storage.storage_factory import StorageFactory
from shardwise.world import exit_handlers

Rows = list[list[float]]
"""What each island reported."""


@dataclass(eq=False)
class Flight:
    """The sums of one step, from when they were sent until they are used.

    By bucket the messages of all islands, or once they have landed their sum; so with the report
    that goes beside.
    """

    step: int
    report: Message | Rows
    sums: list[Message | Tensor]
    lost: list[Tensor] = field(default_factory=list)
    """By bucket, what the wire has lost by then of this island's sums, until the step is made."""

    def wait(self) -> None:
        """Return when what was sent has come to all."""
        for sent in [*self.sums, self.report]:
            if isinstance(sent, Message):
                sent.wait()


class DelayedSums:
    """What is on its way of the gradient sums of `gradients`.

    `group` shards the states, where `scattered`; `peers` are the ranks of equal place in all
    islands, and `run` all ranks. Sums are used `behind` steps later, and a report of so many
    numbers is `told` before them. What the wire loses rests where `factory` says, and is sent with
    the next sums.
    """

    def __init__(
        self,
        parameters: Parameters,
        gradients: Gradients,
        wire: Wire,
        factory: StorageFactory,
        group: Collectives,
        peers: Collectives,
        run: Collectives,
        behind: int,
        told: int,
        *,
        scattered: bool,
    ) -> None:
        self._parameters = parameters
        self._gradients = gradients
        self._buckets = gradients.reducer.buckets
        self._wire = wire
        self._group = group
        self._peers = peers
        self._run = run
        self._behind = behind
        self._told = told
        self._scattered = scattered
        self.parts = [bucket.layout.interval(group.rank) for bucket in self._buckets]
        """By bucket, the elements [first, end) that this rank sends."""
        self._kinds = [_wide(*bucket.kind) for bucket in self._buckets]
        self.residuals = self._room(factory) if wire.loses else []
        """By bucket, what the wire has lost so far of this island's sums."""
        self.flights: deque[Flight] = deque()
        """What was sent and is not used yet, the oldest first."""
        self.updates = 0
        """How many updates have been made since there are these states."""
        self._sent = 0
        """How many times sums have been sent; once they are forgotten, alike on all ranks."""
        _await_later(self)

    def _room(self, factory: StorageFactory) -> list[Storage]:
        lengths = [end - first for first, end in self.parts]
        made = factory.make("residual", lengths, self._kinds)
        for held in made:
            held.store(torch.zeros(held.numel, dtype=held.dtype, device=held.device))
        return made

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends to each other island in a step, the report left out."""
        kinds = zip(self.parts, self._kinds, strict=True)
        return sum(self._wire.nbytes(end - first, kind[0]) for (first, end), kind in kinds)

    @property
    def state_bytes(self) -> int:
        """Bytes that this rank keeps from step to step: of what the wire has lost, and of the
        messages of all islands that are on their way once there are so many."""
        flying = self._behind * self._peers.size * self.nbytes
        return sum(held.nbytes for held in self.residuals) + flying

    # -- out ----------------------------------------------------------------------------------

    def send(self, step: int, report: Tensor, factor: float, *, counts: bool) -> None:
        """Let the sums of `step`, times `factor`, go on their way, after a flat fp64 `report`;
        zeros where they do not count, since they are not finite. Collective over the peers.

        Raises NonFiniteError for what the wire cannot tell, before anything is sent.
        """
        self._drop_unmade(step)
        lost: list[Tensor] = []
        parts = range(len(self.parts))
        packed = [
            self._packed(index, factor, lost) if counts else self._none(index) for index in parts
        ]
        told = self._tell(report)
        self.flights.append(Flight(step, told, [send(self._peers, part) for part in packed], lost))
        self._sent += 1

    def _tell(self, report: Tensor) -> Message:
        return send(self._peers, report.view(torch.uint8).to(self._peers.small_device))

    def _drop_unmade(self, step: int) -> None:
        """Forget what an earlier beginning of `step` has sent: it was abandoned."""
        while self.flights and self.flights[-1].step >= step:
            self.flights.pop().wait()

    def _none(self, index: int) -> Tensor:
        """Packed zeros in place of a bucket's sum."""
        (first, end), (dtype, device) = self.parts[index], self._kinds[index]
        return self._wire.pack(torch.zeros(end - first, dtype=dtype, device=device))

    def _packed(self, index: int, factor: float, lost: list[Tensor]) -> Tensor:
        """This rank's part of a bucket's sum, packed; adds to `lost` what goes with the next."""
        (first, end), (dtype, device) = self.parts[index], self._kinds[index]
        own = self._buckets[index].own[0]
        held = self._buckets[index].reduced.loaded(device)[first - own : end - own]
        value = held.to(dtype) * factor
        if self._wire.loses:
            value.add_(self.residuals[index].loaded(device))
        try:
            packed = self._wire.pack(value)
        except ValueError as error:
            raise NonFiniteError(self._refusal(index, error)) from None
        if self._wire.loses:
            lost.append(value.sub_(self._unpacked(index, packed)))
        return packed

    def _refusal(self, index: int, error: ValueError) -> str:
        names = [
            self._parameters.named[piece.parameter].name
            for piece in self._buckets[index].layout.pieces(*self.parts[index])
        ]
        return (
            f"The weighted sum of the gradient of {names[0]} or of what lies beside it has {error} "
            "in it, which no other island is to get. Lower the learning rate, clip with "
            "engine.step(max_norm=1.0), or send as --wire fp32."
        )

    def _unpacked(self, index: int, packed: Tensor) -> Tensor:
        (first, end), (dtype, _) = self.parts[index], self._kinds[index]
        return self._wire.unpack(packed, end - first, dtype)

    # -- and in -------------------------------------------------------------------------------

    def land(self, flight: Flight) -> None:
        """Wait for the sums of all islands."""
        for index, sent in enumerate(flight.sums):
            if isinstance(sent, Message):
                flight.sums[index] = self._sum(index, sent.wait())

    def reported(self, flight: Flight) -> Rows:
        """What all islands reported, zeros of one that no sums follow from. Waits for it."""
        if isinstance(flight.report, Message):
            rows = flight.report.wait().cpu().contiguous()
            flight.report = rows.view(torch.float64).tolist()
        assert not isinstance(flight.report, Message)
        return flight.report

    def _sum(self, index: int, rows: Tensor) -> Tensor:
        total = self._unpacked(index, rows[0])
        for row in rows[1:]:
            total.add_(self._unpacked(index, row))
        return total

    def due(self, step: int) -> Flight | None:
        """The sums of `step`; forgets those before it. None where there are none."""
        while self.flights and self.flights[0].step < step:
            self.flights.popleft().wait()
        found = self.flights and self.flights[0].step == step
        return self.flights[0] if found else None

    def stepped(self, step: int) -> None:
        """`step` is made: what it used is forgotten, and what the wire has lost of it is kept."""
        for residual, lost in zip(self.residuals, self.flights[-1].lost, strict=False):
            residual.store(lost)
        self.flights[-1].lost = []
        while self.flights and self.flights[0].step <= step - self._behind:
            self.flights.popleft().wait()

    def use(self, flight: Flight, factor: float) -> None:
        """Let the gradients be the landed sums of `flight`, times `factor`. Collective over the
        island."""
        for index, total in enumerate(flight.sums):
            assert isinstance(total, Tensor)
            value = total * factor
            self._buckets[index].reduced.store(
                value if self._scattered else self.whole(index, value)
            )
        self._gradients.norm.renew(range(len(self._buckets)))

    def spoil(self, used: Sequence[bool]) -> None:
        """Let the gradients of `used` parameters be NaN, as those of a step are that is not finite,
        and nothing else: who writes finite ones in their place has mended the step."""
        for bucket in self._buckets:
            value, first = torch.zeros_like(bucket.reduced.loaded()), bucket.own[0]
            for piece in bucket.layout.pieces(*bucket.own):
                if used[piece.parameter]:
                    value[piece.start - first : piece.end - first] = torch.nan
            bucket.reduced.store(value)
        self._gradients.norm.renew(range(len(self._buckets)))

    def whole(self, index: int, part: Tensor) -> Tensor:
        """All of bucket `index`, from the parts of this island's ranks. Collective over it."""
        if self._group.size == 1:
            return part
        layout, (first, end) = self._buckets[index].layout, self.parts[index]
        flat = part.new_zeros(layout.numel)
        flat[first:end] = part
        self._group.all_gather(flat, layout.cuts).wait()
        return flat

    def forget(self) -> None:
        """Let what is on its way be used by nobody, once it is there. Collective over all ranks.

        Raises UsageError, on all of them, where islands have not sent as many steps. Those that go
        on with steps meanwhile read in a report of zeros that no more of this island follow.
        """
        zeros = torch.zeros(self._told, dtype=torch.float64)
        rest = [self._tell(zeros)]
        sent = self._run.gather_plain(self._sent)
        while self._sent < max(sent):  # those who have sent more wait for as much
            rest += [send(self._peers, self._none(index)) for index in range(len(self.parts))]
            rest.append(self._tell(zeros))
            self._sent += 1
        while self.flights:
            self.flights.popleft().wait()
        for message in rest:
            message.wait()
        if len(set(sent)) > 1:
            most, least = sent.index(max(sent)), sent.index(min(sent))
            raise UsageError(
                f"Rank {most} has sent gradients {max(sent)} times, and rank {least} "
                f"{min(sent)} times: those of the same steps of all islands are added. Let all "
                "make as many steps, and begin a step anew on all or on none."
            )

    def restart(self) -> None:
        """Begin anew: nothing was sent, nothing was lost. Called by all islands alike."""
        self.forget()
        self.updates = 0
        for held in self.residuals:
            held.store(torch.zeros(held.numel, dtype=held.dtype, device=held.device))

    def expect(self, step: int, report: Rows) -> None:
        """Go on where the sums of `step` were sent before; they are to be filled with those of all
        islands."""
        sums: list[Message | Tensor] = [
            torch.zeros(end - first, dtype=dtype, device=device)
            for (first, end), (dtype, device) in zip(self.parts, self._kinds, strict=True)
        ]
        self.flights.append(Flight(step, report, sums))


_PRESENT: weakref.WeakSet[DelayedSums] = weakref.WeakSet()
"""Those of engines that are there."""

_ORPHANED: list[deque[Flight]] = []
"""What engines had on its way that were dropped without a close."""


def _await_later(sums: DelayedSums) -> None:
    """See to it that what `sums` sends comes to all, even if nobody uses it here any more: an
    island that is early must not close its connections while others wait for its last."""
    if not _PRESENT:
        exit_handlers.unregister(_await_all)
        exit_handlers.register(_await_all)
    _await(_ORPHANED)  # all islands make this engine, so they have sent all of the earlier ones
    _PRESENT.add(sums)
    weakref.finalize(sums, _adopt, sums.flights).atexit = False


def _adopt(flights: deque[Flight]) -> None:
    """See to what an engine that has gone had on its way."""
    if flights:
        _ORPHANED.append(flights)


def _await_all() -> None:
    _await([*_ORPHANED, *(sums.flights for sums in _PRESENT)])


def _await(several: list[deque[Flight]]) -> None:
    """Return when what was sent has come to all, unless this process ends by an error."""
    while several and not hasattr(sys, "last_value"):
        flights = several.pop()
        while flights:
            flights.popleft().wait()


def _wide(dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, torch.device]:
    """In which dtype the sums of a bucket are added over the islands."""
    return (torch.float32 if dtype in NARROW else dtype), device
