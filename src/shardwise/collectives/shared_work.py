"""Calls in flight between ranks that share memory: what they wait for, and who is missing.

A call is a generator. It tells the others what they need, yields the stage that it waits for all
of them to reach, and goes on with their messages. Whoever waits for one call moves all that can be
moved, also in other groups of this process, so ranks may wait for their calls in any order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Generator

import torch
from torch import Tensor

from shardwise.collectives.arena import Windows
from shardwise.collectives.base import Handle
from shardwise.collectives.progress_thread import Trip
from shardwise.collectives.roster import Roster
from shardwise.collectives.socket_mesh import INLINE, Mesh, Message, Watch
from shardwise.collectives.torch_backend import SAME_CALLS, late
from shardwise.errors import CollectiveError, PeerLost
from shardwise.timeline.recorder import Launched
from shardwise.watch.status_server import Lookout

READY, HALFWAY, DONE, ENDED, FAILED, OVER = range(6)
"""Stages: the buffer may be read; half of the work is done; all that was needed of the others has
been read. ENDED tells that a segment is no longer used, FAILED that a rank gives up. OVER is
nobody's message."""

KINDS = (
    "barrier",
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "broadcast",
    "all-to-all",
    "exchange of rows",
    "common memory",
)

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)

SPIN = 50e-6
"""Seconds to look again and again before going to sleep, where there is a core for every rank."""

Messages = dict[int, Message]
Plan = Generator[int | Trip, Messages, None]


class Flight(Handle):
    """One call of this rank; `opening` is the message that it starts with."""

    def __init__(self, flights: Flights, opening: Message, plan: Plan) -> None:
        super().__init__()
        self._flights = flights
        self.opening = opening
        self.plan = plan
        self.stage = READY
        self.trip: Trip | None = None

    def reach(self, step: int | Trip) -> None:
        """What the plan waits for now: a stage of all ranks here, or a trip between hosts."""
        self.trip = step if isinstance(step, Trip) else None
        if not isinstance(step, Trip):
            self.stage = step

    def noted(self, launched: Launched | None) -> Handle:
        self._noted = launched
        self.tell()
        return self

    def tell(self) -> None:
        """Note the end in the timeline, once the result is there."""
        if self._noted is not None and self.stage >= DONE:
            self._noted.done()

    @property
    def name(self) -> str:
        return f"{KINDS[self.opening.kind]} (call {self.opening.call})"

    def advance(self) -> None:
        self._flights.progress()

    def is_there(self) -> bool:
        self._flights.progress()
        return self.stage >= DONE

    def wait(self) -> None:
        self._flights.until(self, DONE)

    def reusable(self) -> None:
        self._flights.until(self, OVER)


class Fleet:
    """The calls of all groups of this process, and its `lookout`."""

    def __init__(self, lookout: Lookout) -> None:
        self.lookout = lookout
        self.watch = Watch()
        self.told: CollectiveError | None = None
        """Why a rank of this host, this one too, has given up, in whichever group."""
        self._flights: dict[Mesh, Flights] = {}

    def join(self, mesh: Mesh, flights: Flights) -> None:
        """Move the calls of `flights` from now on."""
        self._flights[mesh] = flights

    def leave(self, mesh: Mesh) -> None:
        """Leave those of `mesh` alone."""
        self._flights.pop(mesh, None)

    def progress(self, patience: float = 0.0) -> None:
        """Move every call as far as what has come allows; wait up to `patience` for a message."""
        for mesh, rank, message in self.watch.look(patience):
            self._flights[mesh].take(rank, message)
        for flights in list(self._flights.values()):
            flights.move()


class Flights:
    """The calls of this rank in one group, and what the others have said of theirs."""

    def __init__(
        self, mesh: Mesh, fleet: Fleet, rank: int, size: int, timeout: float, roster: Roster
    ) -> None:
        self._mesh = mesh
        self._fleet = fleet
        fleet.join(mesh, self)
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._roster = roster
        self._spin = SPIN if len(os.sched_getaffinity(0)) >= size else 0.0
        self._alive: dict[int, Flight] = {}
        self._inbox: dict[tuple[int, int], Messages] = {}
        self._failure: CollectiveError | None = None
        self.windows = Windows()

    def start(self, opening: Message, plan: Plan) -> Flight:
        """Begin a call."""
        self._refuse_after_failure()
        flight = self._alive[opening.call] = Flight(self, opening, plan)
        try:
            flight.reach(next(plan))
        except CollectiveError as error:
            raise self._cut_off(flight, error) from error
        for rank, message in self._inbox.get((opening.call, READY), {}).items():
            self._compare(flight, rank, message)
        self.progress()
        return flight

    def post(self, message: Message) -> None:
        """Tell all others."""
        for rank in self._mesh.peers:
            self._mesh.send(rank, message)

    def say(self, begin: Message, stage: int, only: int | None = None) -> None:
        """Tell all others, or one, that this rank has come to `stage` in a call."""
        message = Message(begin.call, stage)
        for rank in self._mesh.peers if only is None else [only]:
            self._mesh.send(rank, message)

    def progress(self, patience: float = 0.0) -> None:
        """Move every call of this process as far as what has come allows."""
        self._refuse_after_failure()
        self._fleet.progress(patience)

    def move(self) -> None:
        """Move every call of this group as far as what has come allows."""
        for flight in list(self._alive.values()):
            self._move(flight)

    def until(self, flight: Flight, stage: int) -> None:
        """Return when `flight` has come to `stage`."""
        if flight.stage < stage and not self._comes_soon(flight, stage):
            with self._fleet.lookout.waits.noted(flight.name, lambda: self._missing(flight)):
                self._sleep(flight, stage)

    def _comes_soon(self, flight: Flight, stage: int) -> bool:
        """Look again and again for a moment, which is faster than to sleep."""
        until = time.monotonic() + self._spin
        while True:
            self.progress()
            if flight.stage >= stage:
                return True
            if time.monotonic() >= until:
                return False

    def _sleep(self, flight: Flight, stage: int) -> None:
        begun = time.monotonic()
        while flight.stage < stage:
            if self._fleet.told is not None:
                self._failure = self._fleet.told  # the others have been told as well
                raise self._failure
            if flight.trip is not None:
                self.progress(self._timeout)  # what it waits for has a limit of its own
                continue
            missing = self._unheard(flight)
            if lost := missing & self._mesh.gone:
                raise self._lost(flight, lost)
            waited = time.monotonic() - begun
            if waited > self._timeout:
                raise self._late(flight, missing)
            self.progress(self._timeout - waited + 1e-3)

    def is_over(self) -> bool:
        """Whether all ranks have read all that this one has shown them, as far as it has heard."""
        if self._failure is None and self._fleet.told is None:
            self._fleet.progress()
        return not self._alive

    def close(self) -> None:
        """Forget all calls, unmap what the others share, close the sockets."""
        self._alive.clear()
        self._inbox.clear()
        self.windows.close()
        self._fleet.leave(self._mesh)
        self._mesh.close()

    def take(self, rank: int, message: Message) -> None:
        """Mind what `rank` said."""
        if message.fd >= 0:
            self.windows.learn(rank, message.segment, message.fd)
        if message.stage == ENDED:
            self.windows.forget(rank, message.segment)
            return
        if message.stage == FAILED:
            self._fleet.told = self._fleet.told or self._passed_on(rank, message)
            return
        self._inbox.setdefault((message.call, message.stage), {})[rank] = message
        flight = self._alive.get(message.call)
        if message.stage == READY and flight is not None:
            self._compare(flight, rank, message)

    def _move(self, flight: Flight) -> None:
        while (came := self._due(flight)) is not None:
            try:
                flight.reach(flight.plan.send(came))
                flight.tell()
            except StopIteration:
                flight.stage, flight.trip = OVER, None
                flight.tell()
                del self._alive[flight.opening.call]
                return
            except CollectiveError as error:
                raise self._cut_off(flight, error) from error

    def _due(self, flight: Flight) -> Messages | None:
        """What a flight has waited for, once all of it is here."""
        if flight.trip is not None:
            if flight.trip.error is not None:
                raise self._cut_off(flight, flight.trip.error)
            return {} if flight.trip.is_over else None
        if len(came := self._heard(flight)) < self._size - 1:
            return None
        self._inbox.pop((flight.opening.call, flight.stage), None)
        return came

    def _heard(self, flight: Flight) -> Messages:
        return self._inbox.get((flight.opening.call, flight.stage), {})

    def _unheard(self, flight: Flight) -> set[int]:
        return set(self._mesh.peers) - self._heard(flight).keys()

    def _missing(self, flight: Flight) -> Collection[int]:
        """The ranks of the run that a flight waits for."""
        if flight.trip is not None:
            return flight.trip.missing()
        return [self._roster.ranks[place] for place in self._unheard(flight)]

    def _compare(self, flight: Flight, rank: int, message: Message) -> None:
        """All ranks must be in the same collective."""
        mine, theirs = _claims(flight.opening), _claims(message)
        if mine == theirs:
            return
        said, heard = _text(flight.opening), _text(message)
        if said == heard:
            heard += ", cut otherwise or from another source"
        raise self._failed(
            CollectiveError,
            f"Call {message.call} is {said} on {self._name(self._rank)} and {heard} on "
            f"{self._name(rank)}, of {self._roster.size}. "
            f"{self._fleet.lookout.compared()}{SAME_CALLS}",
        )

    def _name(self, *places: int) -> str:
        return self._roster.named(places)

    def _lost(self, flight: Flight, lost: set[int]) -> CollectiveError:
        return self._failed(
            PeerLost,
            f"{self._roster.speaker(self._rank)} lost {self._name(*lost)} in {flight.name}: gone "
            "before it had done its part. The cause is on the rank that went away; see its own "
            "output.",
            tuple(self._roster.ranks[place] for place in sorted(lost)),
        )

    def _late(self, flight: Flight, missing: set[int]) -> CollectiveError:
        """The error of a rank that waited too long, or of the one that gave up before it."""
        ranks = [self._roster.ranks[place] for place in missing]
        speaker = self._roster.speaker(self._rank)
        error = late(self._fleet.lookout, speaker, flight.name, ranks, self._timeout)
        return self._failed(type(error), str(error), error.at_fault)

    def _cut_off(self, flight: Flight, error: Exception) -> Exception:
        """The error of messages between hosts; where a rank of this host is gone, that is why."""
        if isinstance(error, PeerLost) and self._mesh.gone:
            return self._lost(flight, self._mesh.gone)
        if isinstance(error, CollectiveError):
            return self._failed(type(error), str(error), error.at_fault)
        return error

    def _passed_on(self, rank: int, message: Message) -> CollectiveError:
        kind = PeerLost if message.kind else CollectiveError
        return kind(
            f"{self._roster.speaker(self._rank)} gave up with {self._name(rank)}, which says: "
            f"{message.payload.decode(errors='replace')}"
        )

    def _failed(
        self, kind: type[CollectiveError], text: str, at_fault: tuple[int, ...] = ()
    ) -> CollectiveError:
        """The error to raise, kept for later calls and told to the others."""
        self._failure = kind(text).blaming(at_fault)
        self._fleet.told = self._fleet.told or self._failure
        told = text.encode()[:INLINE]
        self.post(Message(0, FAILED, kind=int(kind is PeerLost), payload=told))
        self._fleet.lookout.tell(self._failure)
        return self._failure

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))


def first_message(call: int, kind: str, buffer: Tensor, check: int) -> Message:
    """What a rank says of a call, and all must say alike; `check` is any further number."""
    return Message(
        call,
        READY,
        kind=KINDS.index(kind),
        dtype=DTYPES.index(buffer.dtype),
        numel=buffer.numel(),
        check=check & 0xFFFFFFFF,
    )


def _claims(message: Message) -> tuple[int, ...]:
    return message.kind, message.dtype, message.numel, message.check


def _text(message: Message) -> str:
    dtype = str(DTYPES[message.dtype]).removeprefix("torch.")
    return f"{KINDS[message.kind]} of {message.numel} {dtype} values"
