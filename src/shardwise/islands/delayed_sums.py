"""Sends the gradient sums of a step to the other islands, and adds them up some steps later.

    send     pack the sums of this island    | packed sum |    all-gather over peers of equal place
    land     unpack, add in the order of the islands, so that all have the same bits
    use      replace this island's own sums by the total
    stepped  drop the sums that were used, keep what the wire has lost
    forget   tell the others that nothing follows, and wait for messages in transit

Until `stepped`, a step may be abandoned and begun again. What it has sent is dropped then.

Each rank sends its interval of every bucket, so an island of n ranks sends each element once. If
the optimizer state is replicated, intervals are gathered over the island when they are used.
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
from shardwise.islands.difference_exchange import Message, send
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
    """The sums of one step, from when they are sent until they are used.

    `sums` has by bucket the message of all islands, and their total once it has landed. `report` is
    the message that was sent with them, and the rows of all islands once it was read.
    """

    step: int
    report: Message | Rows
    sums: list[Message | Tensor]
    lost: list[Tensor] = field(default_factory=list)
    """By bucket, what the wire has lost of this island's sums with this step. It replaces the
    residual only when the step is made, since an abandoned step is sent again."""

    def wait(self) -> None:
        """Wait until all islands have the messages."""
        for sent in [*self.sums, self.report]:
            if isinstance(sent, Message):
                sent.wait()


class DelayedSums:
    """The gradient sums in transit between islands.

    Args:
        gradients: The sums of this island, which `use` replaces.
        wire: The format of the messages.
        factory: Makes the storage of what the wire loses, which is sent with the next sums.
        group: The ranks that shard the states.
        peers: The ranks of equal place in all islands.
        run: All ranks.
        behind: Number of steps after which sums are used.
        report_length: Number of fp64 numbers in a report.
        scattered: Whether the optimizer state is sharded.
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
        report_length: int,
        *,
        scattered: bool,
    ) -> None:
        self._parameters = parameters
        self._gradients = gradients
        self._buckets = gradients.buckets
        self._wire = wire
        self._group = group
        self._peers = peers
        self._run = run
        self._behind = behind
        self._report_length = report_length
        self._scattered = scattered
        self.parts = [bucket.layout.interval(group.rank) for bucket in self._buckets]
        """By bucket, the elements [first, end) that this rank sends."""
        # Sums of 16-bit gradients are added over the islands in fp32: each sum would round again.
        self._kinds = [
            (torch.float32 if dtype in NARROW else dtype, device)
            for dtype, device in (bucket.kind for bucket in self._buckets)
        ]
        self.residuals: list[Storage] = []
        """By bucket, what the wire has lost so far of this island's sums."""
        if wire.loses:
            lengths = [end - first for first, end in self.parts]
            self.residuals = factory.make("residual", lengths, self._kinds)
            self._clear_residuals()
        self.flights: deque[Flight] = deque()
        """Steps whose sums were sent and are not used yet, the oldest first."""
        self.updates = 0
        """Number of updates since these states exist."""
        self._sent = 0
        """How many times sums have been sent. `forget` makes it the same on all ranks."""
        _await_later(self)

    def _clear_residuals(self) -> None:
        for held in self.residuals:
            held.store(torch.zeros(held.numel, dtype=held.dtype, device=held.device))

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends to each other island in a step, without the report."""
        kinds = zip(self.parts, self._kinds, strict=True)
        return sum(self._wire.nbytes(end - first, kind[0]) for (first, end), kind in kinds)

    @property
    def state_bytes(self) -> int:
        """Bytes that this rank keeps from step to step: what the wire has lost, and the messages
        of all islands for as many steps as sums wait."""
        flying = self._behind * self._peers.size * self.nbytes
        return sum(held.nbytes for held in self.residuals) + flying

    # -- out ----------------------------------------------------------------------------------

    def send(self, step: int, report: Tensor, factor: float, *, counts: bool) -> None:
        """Send the sums of `step`, times `factor`, after a flat fp64 `report`. Collective over the
        peers.

        Args:
            counts: Whether the sums are finite; zeros are sent if not.

        Raises NonFiniteError for values that the wire cannot hold, before anything is sent.
        """
        # An earlier attempt at this step was abandoned: nobody uses what it has sent.
        while self.flights and self.flights[-1].step >= step:
            self.flights.pop().wait()
        lost: list[Tensor] = []
        parts = range(len(self.parts))
        packed = [
            # Zeros, not nothing: the others wait for a message of every bucket in any case.
            self._packed(index, factor, lost) if counts else self._zeros(index)
            for index in parts
        ]
        told = self._tell(report)
        self.flights.append(Flight(step, told, [send(self._peers, part) for part in packed], lost))
        self._sent += 1

    def _tell(self, report: Tensor) -> Message:
        return send(self._peers, report.view(torch.uint8).to(self._peers.small_device))

    def _zeros(self, index: int) -> Tensor:
        """Return packed zeros of the length of a bucket's sum."""
        (first, end), (dtype, device) = self.parts[index], self._kinds[index]
        return self._wire.pack(torch.zeros(end - first, dtype=dtype, device=device))

    def _packed(self, index: int, factor: float, lost: list[Tensor]) -> Tensor:
        """Return this rank's part of a bucket's sum, packed; append the wire's loss to `lost`."""
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
        """Wait for the sums of all islands, and add them up."""
        for index, sent in enumerate(flight.sums):
            if isinstance(sent, Message):
                rows = sent.wait()
                # In the order of the islands on every rank: floating-point sums depend on it.
                total = self._unpacked(index, rows[0])
                for row in rows[1:]:
                    total.add_(self._unpacked(index, row))
                flight.sums[index] = total

    def reported(self, flight: Flight) -> Rows:
        """Wait for the reports of all islands, and return them. One of zeros says that its island
        sends no sums."""
        if isinstance(flight.report, Message):
            rows = flight.report.wait().cpu().contiguous()
            flight.report = rows.view(torch.float64).tolist()
        assert not isinstance(flight.report, Message)
        return flight.report

    def due(self, step: int) -> Flight | None:
        """Return the sums of `step`, None if there are none; drop those before it."""
        while self.flights and self.flights[0].step < step:
            self.flights.popleft().wait()
        found = self.flights and self.flights[0].step == step
        return self.flights[0] if found else None

    def stepped(self, step: int) -> None:
        """Commit `step`: drop the sums that it used, and keep what the wire lost of its own."""
        for residual, lost in zip(self.residuals, self.flights[-1].lost, strict=False):
            residual.store(lost)
        self.flights[-1].lost = []
        while self.flights and self.flights[0].step <= step - self._behind:
            self.flights.popleft().wait()

    def use(self, flight: Flight, factor: float) -> None:
        """Replace the gradients by the landed sums of `flight`, times `factor`. Collective over the
        island."""
        for index, total in enumerate(flight.sums):
            assert isinstance(total, Tensor)
            value = total * factor
            self._buckets[index].reduced.store(
                value if self._scattered else self.whole(index, value)
            )
        self._gradients.forget_squares(range(len(self._buckets)))

    def spoil(self, used: Sequence[bool]) -> None:
        """Set the gradients of `used` parameters to NaN, as in a step that is not finite.

        Only those, so that a user who replaces them by finite ones has repaired the step.
        """
        for bucket in self._buckets:
            value, first = torch.zeros_like(bucket.reduced.loaded()), bucket.own[0]
            for piece in bucket.layout.pieces(*bucket.own):
                if used[piece.parameter]:
                    value[piece.start - first : piece.end - first] = torch.nan
            bucket.reduced.store(value)
        self._gradients.forget_squares(range(len(self._buckets)))

    def whole(self, index: int, part: Tensor) -> Tensor:
        """Return all of bucket `index`. Collective over the island."""
        if self._group.size == 1:
            return part
        layout, (first, end) = self._buckets[index].layout, self.parts[index]
        flat = part.new_zeros(layout.numel)
        flat[first:end] = part
        self._group.all_gather(flat, layout.cuts).wait()
        return flat

    def forget(self) -> None:
        """Wait for messages in transit, and drop them. Collective over all ranks.

        Raises UsageError on all ranks if islands have sent different numbers of steps. An island
        that continues with a step meanwhile reads in a report of zeros that no sums follow.
        """
        # First the report, then the exchange: an island in a step waits for a report of this one,
        # and would never come to the exchange.
        zeros = torch.zeros(self._report_length, dtype=torch.float64)
        rest = [self._tell(zeros)]
        sent = self._run.gather_plain(self._sent)
        # Islands that have sent more wait for as many messages of this one.
        while self._sent < max(sent):
            rest += [send(self._peers, self._zeros(index)) for index in range(len(self.parts))]
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
        """Forget all earlier steps, and what the wire has lost. All islands call it."""
        self.forget()
        self.updates = 0
        self._clear_residuals()

    def expect(self, step: int, report: Rows) -> None:
        """Add zeros as the landed sums of `step`; a load fills them in."""
        sums: list[Message | Tensor] = [
            torch.zeros(end - first, dtype=dtype, device=device)
            for (first, end), (dtype, device) in zip(self.parts, self._kinds, strict=True)
        ]
        self.flights.append(Flight(step, report, sums))


_PRESENT: weakref.WeakSet[DelayedSums] = weakref.WeakSet()
"""The sums of engines that exist."""

_ORPHANED: list[deque[Flight]] = []
"""Steps in transit of engines that were dropped without a close."""


def _await_later(sums: DelayedSums) -> None:
    """Wait at the exit of the process until all islands have what `sums` sends.

    An island that is early must not close its connections while others wait for its last message.
    """
    if not _PRESENT:
        exit_handlers.unregister(_await_all)
        exit_handlers.register(_await_all)
    _await(_ORPHANED)  # all islands make this engine, so they have sent all of the earlier ones
    _PRESENT.add(sums)
    # Not at exit: `_await_all` looks at those that are left.
    weakref.finalize(sums, _ORPHANED.append, sums.flights).atexit = False


def _await_all() -> None:
    _await([*_ORPHANED, *(sums.flights for sums in _PRESENT)])


def _await(several: list[deque[Flight]]) -> None:
    """Wait until all islands have what was sent, unless this process ends by an error: the others
    may have ended then, and never receive it."""
    while several and not hasattr(sys, "last_value"):
        flights = several.pop()
        while flights:
            flights.popleft().wait()
