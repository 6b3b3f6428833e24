"""Runs pending calls between ranks that share memory, and detects missing ranks.

A call is a generator of steps. It sends messages to the other ranks, yields the stage that all of
them must reach, and continues with their messages. A wait for one call advances every call of this
process, including calls in other groups. So ranks may wait for their calls in any order, and two
ranks cannot deadlock in different calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Generator

from torch import Tensor

from shardwise.comm.arena import MappedSegments
from shardwise.comm.base import GroupRanks, Handle
from shardwise.comm.mismatched_calls import DTYPES, KINDS, mismatch, mismatch_error
from shardwise.comm.progress_thread import PendingWork
from shardwise.comm.socket_mesh import INLINE, MeshMessage, MeshPoll, SocketMesh
from shardwise.comm.torch_backend import timeout_error
from shardwise.errors import CollectiveError, PeerLost
from shardwise.messages.printable import as_utf8
from shardwise.timeline.recorder import Launched
from shardwise.watch.status_server import StatusServer

READY, HALFWAY, DONE, ENDED, FAILED, OVER = range(6)
"""Stages of a call, which ranks announce to each other.

READY: the buffer may be read. HALFWAY: half of the work is done. DONE: this rank no longer needs
the others' buffers. ENDED: a segment is no longer used. FAILED: a rank aborts. OVER is local: all
ranks are done.
"""

SPIN = 50e-6
"""Seconds of polling before sleeping, if there is a core for every rank."""

Messages = dict[int, MeshMessage]
"""Each other rank's message about a stage."""

Steps = Generator[int | PendingWork, Messages, None]
"""The steps of a call. Each yields the stage, or the work between hosts, that it waits for."""


class SharedWork(Handle):
    """Handle of one of this rank's calls, which began with the message `opening`."""

    def __init__(self, work: GroupWork, opening: MeshMessage, steps: Steps) -> None:
        super().__init__()
        self._work = work
        self.opening = opening
        self.steps = steps
        self.stage = READY
        self.pending: PendingWork | None = None
        self.reads_copy = False
        """True if the other ranks read a copy of this rank's buffer, never the buffer itself."""

    def reach(self, step: int | PendingWork) -> None:
        """Set what the call waits for next: a stage of this host's ranks, or work between hosts."""
        self.pending = step if isinstance(step, PendingWork) else None
        if not isinstance(step, PendingWork):
            self.stage = step

    def noted(self, launched: Launched | None) -> Handle:
        self._noted = launched
        self.note_end()
        return self

    def note_end(self) -> None:
        """If the call's result has arrived, record the end of the call in the timeline."""
        if self._noted is not None and self.stage >= DONE:
            self._noted.done()

    @property
    def name(self) -> str:
        return f"{KINDS[self.opening.kind]} (call {self.opening.call})"

    def advance(self) -> None:
        self._work.progress()

    def is_there(self) -> bool:
        self._work.progress()
        return self.stage >= DONE

    def wait(self) -> None:
        self._work.until(self, DONE)

    def reusable(self) -> None:
        # A copy stays in use until all ranks are done, but the caller need not wait for them.
        self._work.until(self, DONE if self.reads_copy else OVER)


class ProcessWork:
    """The pending calls in all groups of this process. Waiting for one call advances them all."""

    def __init__(self, status_server: StatusServer) -> None:
        self.status_server = status_server
        self.poll = MeshPoll()
        self.error: CollectiveError | None = None
        """First error on this host in any group, from another rank or this one."""
        self._work: dict[SocketMesh, GroupWork] = {}

    def join(self, mesh: SocketMesh, work: GroupWork) -> None:
        """Start advancing the calls of `work`."""
        self._work[mesh] = work

    def leave(self, mesh: SocketMesh) -> None:
        """Stop advancing the calls of `mesh`."""
        self._work.pop(mesh, None)

    def settle(self) -> None:
        """Advance every call until no other rank needs this one to complete it."""
        for work in list(self._work.values()):
            work.settle()

    def progress(self, patience: float = 0.0) -> None:
        """Wait up to `patience` seconds for a message, and advance every call."""
        for mesh, rank, message in self.poll.look(patience):
            self._work[mesh].receive(rank, message)
        for work in list(self._work.values()):
            work.move()


class GroupWork:
    """This rank's calls in one group, and the other ranks' messages about their calls."""

    def __init__(
        self,
        mesh: SocketMesh,
        process_work: ProcessWork,
        rank: int,
        size: int,
        timeout: float,
        group_ranks: GroupRanks,
    ) -> None:
        self._mesh = mesh
        self._process_work = process_work
        process_work.join(mesh, self)
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._group_ranks = group_ranks
        # With fewer cores than ranks, polling would take the core away from the rank it waits for.
        self._spin = SPIN if len(os.sched_getaffinity(0)) >= size else 0.0
        self._alive: dict[int, SharedWork] = {}
        self._inbox: dict[tuple[int, int], Messages] = {}
        self._failure: CollectiveError | None = None
        self.segments = MappedSegments()

    def start(self, opening: MeshMessage, steps: Steps) -> SharedWork:
        """Start a call by running its `steps` up to the first wait."""
        self._refuse_after_failure()
        call = self._alive[opening.call] = SharedWork(self, opening, steps)
        try:
            call.reach(next(steps))
        except CollectiveError as error:
            raise self._cut_off(call, error) from error
        # Faster ranks may already have opened this call. Later messages are compared on arrival.
        for rank, message in self._inbox.get((opening.call, READY), {}).items():
            self._compare(call, rank, message)
        self.progress()
        return call

    def post(self, message: MeshMessage) -> None:
        """Send a message to all other ranks."""
        for rank in self._mesh.peers:
            self._mesh.send(rank, message)

    def announce(self, begin: MeshMessage, stage: int, only: int | None = None) -> None:
        """Tell all other ranks (or only rank `only`) that this one has reached a call's `stage`."""
        message = MeshMessage(begin.call, stage)
        for rank in self._mesh.peers if only is None else [only]:
            self._mesh.send(rank, message)

    def progress(self, patience: float = 0.0) -> None:
        """Wait up to `patience` seconds for a message, and advance every call of this process."""
        self._refuse_after_failure()
        self._process_work.progress(patience)

    def move(self) -> None:
        """Advance every call of this group as far as the received messages allow."""
        # Iterate over a copy, because finished calls are removed from the dict.
        for call in list(self._alive.values()):
            self._move(call)

    def settle(self) -> None:
        """Advance every call until this rank has done its part of it."""
        for call in list(self._alive.values()):
            self.until(call, DONE)

    def until(self, call: SharedWork, stage: int) -> None:
        """Block until `call` has reached `stage`."""
        if call.stage < stage and not self._poll_briefly(call, stage):

            def missing() -> Collection[int]:
                """Return the ranks of the run that the call waits for, for hang reports."""
                if call.pending is not None:
                    return call.pending.missing()
                return [self._group_ranks.ranks[place] for place in self._missing(call)]

            with self._process_work.status_server.waits.noted(call.name, missing):
                self._sleep(call, stage)

    def _poll_briefly(self, call: SharedWork, stage: int) -> bool:
        """Poll briefly, and return whether `call` has reached `stage`."""
        # A reply often arrives within microseconds, and then polling is cheaper than sleeping.
        until = time.monotonic() + self._spin
        while True:
            self.progress()
            if call.stage >= stage:
                return True
            if time.monotonic() >= until:
                return False

    def _sleep(self, call: SharedWork, stage: int) -> None:
        start = time.monotonic()
        while call.stage < stage:
            if self._process_work.error is not None:
                self._failure = self._process_work.error  # already announced: do not send it again
                raise self._failure
            if call.pending is not None:
                self.progress(self._timeout)  # messages between hosts have their own timeout
                continue
            # Check only peers whose message is missing, because a rank may exit after its last
            # message.
            missing = self._missing(call)
            if lost := missing & self._mesh.gone:
                raise self._lost(call, lost)
            waited = time.monotonic() - start
            if waited > self._timeout:
                raise self._late(call, missing)
            self.progress(self._timeout - waited + 1e-3)

    def is_over(self) -> bool:
        """Return whether all ranks are known to have finished reading this rank's buffers."""
        if self._failure is None and self._process_work.error is None:
            self._process_work.progress()
        return not self._alive

    def close(self) -> None:
        """Discard all calls, unmap the other ranks' memory, and close the sockets."""
        self._alive.clear()
        self._inbox.clear()
        self.segments.close()
        self._process_work.leave(self._mesh)
        self._mesh.close()

    def receive(self, rank: int, message: MeshMessage) -> None:
        if message.fd >= 0:
            self.segments.learn(rank, message.segment, message.fd)
        if message.stage == ENDED:
            self.segments.forget(rank, message.segment)
            return
        if message.stage == FAILED:
            # Keep the first error, because later errors are usually its consequences.
            if self._process_work.error is None:
                self._process_work.error = (PeerLost if message.kind else CollectiveError)(
                    f"{self._group_ranks.speaker(self._rank)} aborted because {self._name(rank)} "
                    f"failed: {message.payload.decode(errors='replace')}"
                )
            return
        # This rank may not have started the call yet. Until it does, messages wait in the inbox.
        self._inbox.setdefault((message.call, message.stage), {})[rank] = message
        call = self._alive.get(message.call)
        if message.stage == READY and call is not None:
            self._compare(call, rank, message)

    def _move(self, call: SharedWork) -> None:
        while (messages := self._collect_messages(call)) is not None:
            try:
                call.reach(call.steps.send(messages))
                call.note_end()
            except StopIteration:
                call.stage, call.pending = OVER, None
                call.note_end()
                del self._alive[call.opening.call]
                return
            except CollectiveError as error:
                raise self._cut_off(call, error) from error

    def _collect_messages(self, call: SharedWork) -> Messages | None:
        """Return the messages that `call` waits for, or None if some are missing."""
        if call.pending is not None:
            if call.pending.error is not None:
                raise self._cut_off(call, call.pending.error)
            return {} if call.pending.is_over else None
        if len(messages := self._arrived(call)) < self._size - 1:
            return None
        self._inbox.pop((call.opening.call, call.stage), None)
        return messages

    def _arrived(self, call: SharedWork) -> Messages:
        return self._inbox.get((call.opening.call, call.stage), {})

    def _missing(self, call: SharedWork) -> set[int]:
        return set(self._mesh.peers) - self._arrived(call).keys()

    def _compare(self, call: SharedWork, rank: int, message: MeshMessage) -> None:
        """Raise CollectiveError if `message` shows that `rank` is in a different collective."""
        said = mismatch(call.opening, message)
        if said is None:
            return
        here, there = f"{said[0]} on {self._name(self._rank)}", f"{said[1]} on {self._name(rank)}"
        server, size = self._process_work.status_server, self._group_ranks.size
        error = mismatch_error(server, message.call, here, there, size)
        raise self._failed(CollectiveError, str(error))

    def _name(self, *places: int) -> str:
        return self._group_ranks.named(places)

    def _lost(self, call: SharedWork, lost: set[int]) -> CollectiveError:
        """Return the error that names the ranks `lost`, or why they exited if they told it."""
        speaker = self._group_ranks.speaker(self._rank)
        theirs = self._process_work.status_server.error_of_another(speaker)
        if theirs is not None:
            return self._failed(type(theirs), str(theirs))
        return self._failed(
            PeerLost,
            f"{speaker} lost {self._name(*lost)} in {call.name}: it ended before it had done its "
            "part. The cause is on the rank that ended: see its output.",
            tuple(self._group_ranks.ranks[place] for place in sorted(lost)),
        )

    def _late(self, call: SharedWork, missing: set[int]) -> CollectiveError:
        """Return a timeout error or, if another rank has already aborted, that rank's error."""
        ranks = [self._group_ranks.ranks[place] for place in missing]
        speaker = self._group_ranks.speaker(self._rank)
        error = timeout_error(
            self._process_work.status_server, speaker, call.name, ranks, self._timeout
        )
        return self._failed(type(error), str(error), error.at_fault)

    def _cut_off(self, call: SharedWork, error: Exception) -> Exception:
        """Return the error to raise if the communication between hosts has failed."""
        # A rank of this host may have sent the cause and exited before this rank looked.
        if self._process_work.error is not None:
            self._failure = self._process_work.error
            return self._failure
        # A lost host is often the consequence of a rank that exited on this host, so blame that
        # rank.
        if isinstance(error, PeerLost) and self._mesh.gone:
            return self._lost(call, self._mesh.gone)
        if isinstance(error, CollectiveError):
            return self._failed(type(error), str(error), error.at_fault)
        return error

    def _failed(
        self, kind: type[CollectiveError], text: str, at_fault: tuple[int, ...] = ()
    ) -> CollectiveError:
        """Create an error, send it to the other ranks, and return it.

        Later calls raise the same error.
        """
        self._failure = kind(text).blaming(at_fault)
        self._process_work.error = self._process_work.error or self._failure
        reason = as_utf8(text)[:INLINE]
        self.post(MeshMessage(0, FAILED, kind=int(kind is PeerLost), payload=reason))
        self._process_work.status_server.announce_abort(self._failure)
        return self._failure

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))


def first_message(call: int, kind: str, buffer: Tensor, check: int) -> MeshMessage:
    """Return the message that opens a call. All ranks must pass the same `check`."""
    return MeshMessage(
        call,
        READY,
        kind=KINDS.index(kind),
        dtype=DTYPES.index(buffer.dtype),
        numel=buffer.numel(),
        check=check & 0xFFFFFFFF,
    )
