"""Sends a step's gradient sums to the other islands, and adds them up some steps later.

    send             pack this island's sums    | packed sum |    all-gather over the peers
    receive          unpack, add in the order of the islands (bit-identical on all islands)
    use              replace this island's sums with the total
    commit           drop the sums that were used, store the rounding errors
    forget           tell the other islands that no sums follow, wait for messages in transit

Until `commit`, a step may be abandoned and repeated. The sums that it has sent are then dropped.

Each rank sends its interval of every bucket, so an island sends each element only once. If the
optimizer state is replicated, the intervals are gathered within the island when they are used.
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
"""The reports of all islands, in the order of the islands."""


@dataclass(eq=False)
class Flight:
    """One step's sums, from sending until they are used.

    `sums` has one entry per bucket: the message with all islands' sums, which `receive` replaces
    with their total. `report` is the message with all islands' reports, which `receive_reports`
    replaces with their rows.
    """

    step: int
    report: Message | Rows
    sums: list[Message | Tensor]
    losses: list[Tensor] = field(default_factory=list)
    """Per bucket, the rounding errors in this island's sums of this step.

    They replace the residual only at `commit`, because an abandoned step is sent again.
    """

    def wait(self) -> None:
        """Wait until all islands have received this island's messages."""
        for sent in [*self.sums, self.report]:
            if isinstance(sent, Message):
                sent.wait()


class DelayedSums:
    """Exchanges gradient sums between islands, and holds them until they are used.

    Args:
        parameters: The engine's parameters.
        gradients: This island's sums, which `use` replaces.
        wire: The format of the messages.
        factory: Creates the storage for the residuals (rounding errors, added to the next sums).
        group: The ranks that shard the states.
        peers: The ranks with the same index in all islands.
        run: All ranks.
        behind: The number of steps after which sums are used.
        report_length: The number of fp64 values in a report.
        scattered: True if the optimizer state is sharded, False if it is replicated.
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
        """Per bucket, the range [first, end) of elements that this rank sends."""
        # Add 16-bit gradients over islands in fp32, because each addition rounds.
        self._kinds = [
            (torch.float32 if dtype in NARROW else dtype, device)
            for dtype, device in (bucket.kind for bucket in self._buckets)
        ]
        self.residuals: list[Storage] = []
        """Per bucket, this island's rounding errors that were not sent yet."""
        if wire.loses:
            lengths = [end - first for first, end in self.parts]
            self.residuals = factory.make("residual", lengths, self._kinds)
            self._clear_residuals()
        self.flights: deque[Flight] = deque()
        """Steps whose sums were sent but have not been used yet, oldest first."""
        self.updates = 0
        """The number of updates to the weights since these states were created."""
        self._sent = 0
        """The number of times that sums were sent. After `forget` it is the same on all ranks."""
        _await_later(self)

    def _clear_residuals(self) -> None:
        for residual in self.residuals:
            zeros = torch.zeros(residual.numel, dtype=residual.dtype, device=residual.device)
            residual.store(zeros)

    @property
    def nbytes(self) -> int:
        """Number of bytes that this rank sends to each other island per step, excluding reports."""
        kinds = zip(self.parts, self._kinds, strict=True)
        return sum(self._wire.nbytes(end - first, kind[0]) for (first, end), kind in kinds)

    @property
    def state_bytes(self) -> int:
        """Size in bytes of this rank's residuals and pending messages between steps."""
        in_transit = self._behind * self._peers.size * self.nbytes
        return sum(residual.nbytes for residual in self.residuals) + in_transit

    # -- out ----------------------------------------------------------------------------------

    def send(self, step: int, report: Tensor, factor: float, *, counts: bool) -> None:
        """Send a report, then the sums of step `step`. Collective over the peers.

        Args:
            step: The number of the step.
            report: The report, shape (report_length,), fp64.
            factor: The sums are multiplied by this factor before they are sent.
            counts: True if the sums are finite. If False, zeros are sent instead.

        Raises:
            NonFiniteError: The wire format cannot represent a value. In this case, nothing has been
                sent.
        """
        # If an earlier attempt at this step was abandoned, drop its messages. No island uses them.
        while self.flights and self.flights[-1].step >= step:
            self.flights.pop().wait()
        losses: list[Tensor] = []
        parts = range(len(self.parts))
        packed = [
            # Send zeros rather than nothing, because the other islands wait for a message per
            # bucket.
            self._pack(index, factor, losses) if counts else self._zeros(index)
            for index in parts
        ]
        # Send the report first, because `forget` sends only a report that says that no sums follow.
        report_message = self._send_report(report)
        sums: list[Message | Tensor] = [send(self._peers, part) for part in packed]
        self.flights.append(Flight(step, report_message, sums, losses))
        self._sent += 1

    def _send_report(self, report: Tensor) -> Message:
        return send(self._peers, report.view(torch.uint8).to(self._peers.small_device))

    def _zeros(self, index: int) -> Tensor:
        """Return packed zeros of the same length as bucket `index`'s packed sum."""
        (first, end), (dtype, device) = self.parts[index], self._kinds[index]
        return self._wire.pack(torch.zeros(end - first, dtype=dtype, device=device))

    def _pack(self, index: int, factor: float, losses: list[Tensor]) -> Tensor:
        """Pack this rank's part of bucket `index`'s sum. Append its rounding errors to `losses`."""
        (first, end), (dtype, device) = self.parts[index], self._kinds[index]
        own = self._buckets[index].own[0]
        gradient = self._buckets[index].reduced.loaded(device)[first - own : end - own]
        value = gradient.to(dtype) * factor
        if self._wire.loses:
            # Error feedback: add the rounding errors of earlier steps.
            value.add_(self.residuals[index].loaded(device))
        try:
            packed = self._wire.pack(value)
        except ValueError as error:
            raise NonFiniteError(self._refusal(index, error)) from None
        if self._wire.loses:
            losses.append(value.sub_(self._unpack(index, packed)))
        return packed

    def _refusal(self, index: int, error: ValueError) -> str:
        names = [
            self._parameters.named[piece.parameter].name
            for piece in self._buckets[index].layout.pieces(*self.parts[index])
        ]
        return (
            f"The weighted sum of the gradient of {names[0]}, or of a parameter in the same "
            f"bucket, contains {error}, so it was not sent to the other islands. Lower the "
            "learning rate, clip with engine.step(max_norm=1.0), or use --wire fp32."
        )

    def _unpack(self, index: int, packed: Tensor) -> Tensor:
        (first, end), (dtype, _) = self.parts[index], self._kinds[index]
        return self._wire.unpack(packed, end - first, dtype)

    # -- and in -------------------------------------------------------------------------------

    def receive(self, flight: Flight) -> None:
        """Wait for all islands' sums and add them up."""
        for index, sent in enumerate(flight.sums):
            if isinstance(sent, Message):
                rows = sent.wait()
                # Every rank adds in the order of the islands, because the order affects rounding.
                total = self._unpack(index, rows[0])
                for row in rows[1:]:
                    total.add_(self._unpack(index, row))
                flight.sums[index] = total

    def receive_reports(self, flight: Flight) -> Rows:
        """Wait for all islands' reports and return them.

        A report that contains only zeros means that its island sends no sums.
        """
        if isinstance(flight.report, Message):
            rows = flight.report.wait().cpu().contiguous()
            flight.report = rows.view(torch.float64).tolist()
        assert not isinstance(flight.report, Message)
        return flight.report

    def take_due(self, step: int) -> Flight | None:
        """Drop the sums of steps before `step`, and return the sums of that step.

        Returns None if the step has sent no sums.
        """
        while self.flights and self.flights[0].step < step:
            self.flights.popleft().wait()
        is_due = self.flights and self.flights[0].step == step
        return self.flights[0] if is_due else None

    def commit(self, step: int) -> None:
        """Commit step `step`: drop the sums that it used, and store its rounding errors."""
        for residual, loss in zip(self.residuals, self.flights[-1].losses, strict=False):
            residual.store(loss)
        self.flights[-1].losses = []
        while self.flights and self.flights[0].step <= step - self._behind:
            self.flights.popleft().wait()

    def use(self, flight: Flight, factor: float) -> None:
        """Replace the gradients with the totals in `flight`, times `factor`.

        Collective over the island.
        """
        for index, total in enumerate(flight.sums):
            assert isinstance(total, Tensor)
            # Create a new tensor, because a repeated step uses the total again.
            value = total * factor
            self._buckets[index].reduced.store(
                value if self._scattered else self.whole(index, value)
            )
        self._gradients.forget_squares(range(len(self._buckets)))

    def fill_with_nan(self, used: Sequence[bool]) -> None:
        """Set the gradients of parameters flagged in `used` to NaN, as in a non-finite step.

        Other gradients become 0. If the user replaces the NaN values, the step is therefore
        repaired.
        """
        for bucket in self._buckets:
            value, first = torch.zeros_like(bucket.reduced.loaded()), bucket.own[0]
            for piece in bucket.layout.pieces(*bucket.own):
                if used[piece.parameter]:
                    value[piece.start - first : piece.end - first] = torch.nan
            bucket.reduced.store(value)
        self._gradients.forget_squares(range(len(self._buckets)))

    def whole(self, index: int, part: Tensor) -> Tensor:
        """Gather the full bucket `index` from the ranks' parts. Collective over the island."""
        if self._group.size == 1:
            return part
        layout, (first, end) = self._buckets[index].layout, self.parts[index]
        # The all-gather is in place: each rank fills its interval first.
        flat = part.new_zeros(layout.numel)
        flat[first:end] = part
        self._group.all_gather(flat, layout.cuts).wait()
        return flat

    def forget(self) -> None:
        """Wait for messages in transit and drop them. Collective over all ranks.

        An island that is still in a step receives a report that contains only zeros, because no
        sums follow. Raises UsageError on all ranks if the islands have not all sent sums equally
        often.
        """
        # Send the report before the gather. An island that is still in a step waits for this
        # island's report, and would never reach the gather.
        zeros = torch.zeros(self._report_length, dtype=torch.float64)
        messages = [self._send_report(zeros)]
        sent = self._run.gather_plain(self._sent)
        # Islands that have sent more messages wait for the same number from this island.
        while self._sent < max(sent):
            messages += [send(self._peers, self._zeros(index)) for index in range(len(self.parts))]
            messages.append(self._send_report(zeros))
            self._sent += 1
        while self.flights:
            self.flights.popleft().wait()
        for message in messages:
            message.wait()
        if len(set(sent)) > 1:
            most, least = sent.index(max(sent)), sent.index(min(sent))
            raise UsageError(
                f"Rank {most} has sent gradients {max(sent)} times, but rank {least} "
                f"{min(sent)} times. Islands add the gradients of the same step, so all must make "
                "the same number of steps, and repeat a step on all or on none."
            )

    def restart(self) -> None:
        """Drop all pending sums and the residuals. Must be called on all islands."""
        self.forget()
        self.updates = 0
        self._clear_residuals()

    def expect(self, step: int, report: Rows) -> None:
        """Add zeros as the pending sums of step `step`. Loading a checkpoint overwrites them."""
        sums: list[Message | Tensor] = [
            torch.zeros(end - first, dtype=dtype, device=device)
            for (first, end), (dtype, device) in zip(self.parts, self._kinds, strict=True)
        ]
        self.flights.append(Flight(step, report, sums))


_PRESENT: weakref.WeakSet[DelayedSums] = weakref.WeakSet()
"""The DelayedSums of all existing engines."""

_ORPHANED: list[deque[Flight]] = []
"""Pending flights of engines that were dropped without close()."""


def _await_later(sums: DelayedSums) -> None:
    """Make the process wait at exit until all islands have received the messages from `sums`.

    An island that finishes first must not close its connections while other islands wait for its
    last message.
    """
    if not _PRESENT:
        # Unregister and register again, because exit handlers run in reverse order and this one
        # must run before transports close.
        exit_handlers.unregister(_await_all)
        exit_handlers.register(_await_all)
    # All islands create this engine, so they have already sent all messages of earlier engines.
    _await(_ORPHANED)
    _PRESENT.add(sums)
    # Do not run the finalizer at exit, because `_await_all` waits for the remaining flights.
    weakref.finalize(sums, _ORPHANED.append, sums.flights).atexit = False


def _await_all() -> None:
    _await([*_ORPHANED, *(sums.flights for sums in _PRESENT)])


def _await(queues: list[deque[Flight]]) -> None:
    """Wait until all islands have received the messages, unless this process exits with an error.

    After an error, the other islands may also have exited, and would never receive the messages.
    """
    while queues and not hasattr(sys, "last_value"):
        flights = queues.pop()
        while flights:
            flights.popleft().wait()
