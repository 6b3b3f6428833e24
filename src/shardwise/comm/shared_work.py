"""Moves the calls in flight between ranks that share memory, and finds who is missing.

A call is a generator of steps. It sends the others what they need, yields the stage that it waits
for all of them to reach, and goes on with their messages. Whoever waits for one call moves all
calls that can be moved, also in other groups of this process: so ranks may wait for their calls in
any order, and none waits in a circle.
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
"""Stages: the buffer may be read; half of the work is done; all that was needed of the others has
been read. ENDED says that a segment is no longer used, FAILED that a rank aborts. OVER is
nobody's message."""

SPIN = 50e-6
"""Seconds to look again and again before going to sleep, where there is a core for every rank."""

Messages = dict[int, MeshMessage]
"""By rank, its message about a stage."""

Steps = Generator[int | PendingWork, Messages, None]
"""The steps of a call; yields the stage, or the work between hosts, that it waits for."""


class SharedWork(Handle):
    """The handle of one call of this rank; `opening` is the message that it starts with."""

    def __init__(self, work: GroupWork, opening: MeshMessage, steps: Steps) -> None:
        super().__init__()
        self._work = work
        self.opening = opening
        self.steps = steps
        self.stage = READY
        self.pending: PendingWork | None = None

    def reach(self, step: int | PendingWork) -> None:
        """Note what the call waits for now: a stage of all ranks here, or work between hosts."""
        self.pending = step if isinstance(step, PendingWork) else None
        if not isinstance(step, PendingWork):
            self.stage = step

    def noted(self, launched: Launched | None) -> Handle:
        self._noted = launched
        self.note_end()
        return self

    def note_end(self) -> None:
        """Note the end in the timeline, once the result is there."""
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
        self._work.until(self, OVER)


class ProcessWork:
    """The calls of all groups of this process, which any wait of it moves."""

    def __init__(self, status_server: StatusServer) -> None:
        self.status_server = status_server
        self.poll = MeshPoll()
        self.error: CollectiveError | None = None
        """Why a rank of this host, this one too, has aborted, in whichever group."""
        self._work: dict[SocketMesh, GroupWork] = {}

    def join(self, mesh: SocketMesh, work: GroupWork) -> None:
        """Move the calls of `work` from now on."""
        self._work[mesh] = work

    def leave(self, mesh: SocketMesh) -> None:
        """Move the calls of `mesh` no longer."""
        self._work.pop(mesh, None)

    def progress(self, patience: float = 0.0) -> None:
        """Move every call as far as what has come allows; wait up to `patience` for a message."""
        for mesh, rank, message in self.poll.look(patience):
            self._work[mesh].receive(rank, message)
        for work in list(self._work.values()):
            work.move()


class GroupWork:
    """The calls of this rank in one group, and the messages of the others about theirs."""

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
        self._spin = SPIN if len(os.sched_getaffinity(0)) >= size else 0.0
        self._alive: dict[int, SharedWork] = {}
        self._inbox: dict[tuple[int, int], Messages] = {}
        self._failure: CollectiveError | None = None
        self.segments = MappedSegments()

    def start(self, opening: MeshMessage, steps: Steps) -> SharedWork:
        """Begin a call: run its `steps` up to the first wait."""
        self._refuse_after_failure()
        call = self._alive[opening.call] = SharedWork(self, opening, steps)
        try:
            call.reach(next(steps))
        except CollectiveError as error:
            raise self._cut_off(call, error) from error
        for rank, message in self._inbox.get((opening.call, READY), {}).items():
            self._compare(call, rank, message)
        self.progress()
        return call

    def post(self, message: MeshMessage) -> None:
        """Send a message to all others."""
        for rank in self._mesh.peers:
            self._mesh.send(rank, message)

    def announce(self, begin: MeshMessage, stage: int, only: int | None = None) -> None:
        """Send all others, or one, that this rank has come to `stage` in a call."""
        message = MeshMessage(begin.call, stage)
        for rank in self._mesh.peers if only is None else [only]:
            self._mesh.send(rank, message)

    def progress(self, patience: float = 0.0) -> None:
        """Move every call of this process as far as what has come allows."""
        self._refuse_after_failure()
        self._process_work.progress(patience)

    def move(self) -> None:
        """Move every call of this group as far as what has come allows."""
        for call in list(self._alive.values()):
            self._move(call)

    def until(self, call: SharedWork, stage: int) -> None:
        """Return when `call` has come to `stage`."""
        if call.stage < stage and not self._comes_soon(call, stage):
            with self._process_work.status_server.waits.noted(
                call.name, lambda: self._missing(call)
            ):
                self._sleep(call, stage)

    def _comes_soon(self, call: SharedWork, stage: int) -> bool:
        """Look again and again for a moment, which is faster than to sleep."""
        until = time.monotonic() + self._spin
        while True:
            self.progress()
            if call.stage >= stage:
                return True
            if time.monotonic() >= until:
                return False

    def _sleep(self, call: SharedWork, stage: int) -> None:
        begun = time.monotonic()
        while call.stage < stage:
            if self._process_work.error is not None:
                self._failure = self._process_work.error  # the others know of it as well
                raise self._failure
            if call.pending is not None:
                self.progress(self._timeout)  # what it waits for has a limit of its own
                continue
            missing = self._unheard(call)
            if lost := missing & self._mesh.gone:
                raise self._lost(call, lost)
            waited = time.monotonic() - begun
            if waited > self._timeout:
                raise self._late(call, missing)
            self.progress(self._timeout - waited + 1e-3)

    def is_over(self) -> bool:
        """Whether all ranks have read all that this one has shown them, as far as it has heard."""
        if self._failure is None and self._process_work.error is None:
            self._process_work.progress()
        return not self._alive

    def close(self) -> None:
        """Forget all calls, unmap what the others share, close the sockets."""
        self._alive.clear()
        self._inbox.clear()
        self.segments.close()
        self._process_work.leave(self._mesh)
        self._mesh.close()

    def receive(self, rank: int, message: MeshMessage) -> None:
        """Take a message of `rank`."""
        if message.fd >= 0:
            self.segments.learn(rank, message.segment, message.fd)
        if message.stage == ENDED:
            self.segments.forget(rank, message.segment)
            return
        if message.stage == FAILED:
            self._process_work.error = self._process_work.error or self._error_of_another(
                rank, message
            )
            return
        self._inbox.setdefault((message.call, message.stage), {})[rank] = message
        call = self._alive.get(message.call)
        if message.stage == READY and call is not None:
            self._compare(call, rank, message)

    def _move(self, call: SharedWork) -> None:
        while (came := self._due(call)) is not None:
            try:
                call.reach(call.steps.send(came))
                call.note_end()
            except StopIteration:
                call.stage, call.pending = OVER, None
                call.note_end()
                del self._alive[call.opening.call]
                return
            except CollectiveError as error:
                raise self._cut_off(call, error) from error

    def _due(self, call: SharedWork) -> Messages | None:
        """The messages that a call has waited for, once all are here; None until then."""
        if call.pending is not None:
            if call.pending.error is not None:
                raise self._cut_off(call, call.pending.error)
            return {} if call.pending.is_over else None
        if len(came := self._heard(call)) < self._size - 1:
            return None
        self._inbox.pop((call.opening.call, call.stage), None)
        return came

    def _heard(self, call: SharedWork) -> Messages:
        return self._inbox.get((call.opening.call, call.stage), {})

    def _unheard(self, call: SharedWork) -> set[int]:
        return set(self._mesh.peers) - self._heard(call).keys()

    def _missing(self, call: SharedWork) -> Collection[int]:
        """The ranks of the run that a call waits for."""
        if call.pending is not None:
            return call.pending.missing()
        return [self._group_ranks.ranks[place] for place in self._unheard(call)]

    def _compare(self, call: SharedWork, rank: int, message: MeshMessage) -> None:
        """Raise CollectiveError where a rank is in another collective in this call."""
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
        return self._failed(
            PeerLost,
            f"{self._group_ranks.speaker(self._rank)} lost {self._name(*lost)} in {call.name}: "
            "gone before it had done its part. The cause is on the rank that went away; see its "
            "own output.",
            tuple(self._group_ranks.ranks[place] for place in sorted(lost)),
        )

    def _late(self, call: SharedWork, missing: set[int]) -> CollectiveError:
        """The error of a rank that waited too long, or of the one that aborted before it."""
        ranks = [self._group_ranks.ranks[place] for place in missing]
        speaker = self._group_ranks.speaker(self._rank)
        error = timeout_error(
            self._process_work.status_server, speaker, call.name, ranks, self._timeout
        )
        return self._failed(type(error), str(error), error.at_fault)

    def _cut_off(self, call: SharedWork, error: Exception) -> Exception:
        """The error of messages between hosts, or of the rank of this host that is to blame."""
        if isinstance(error, PeerLost) and self._mesh.gone:
            return self._lost(call, self._mesh.gone)
        if isinstance(error, CollectiveError):
            return self._failed(type(error), str(error), error.at_fault)
        return error

    def _error_of_another(self, rank: int, message: MeshMessage) -> CollectiveError:
        kind = PeerLost if message.kind else CollectiveError
        return kind(
            f"{self._group_ranks.speaker(self._rank)} aborted because {self._name(rank)} failed: "
            f"{message.payload.decode(errors='replace')}"
        )

    def _failed(
        self, kind: type[CollectiveError], text: str, at_fault: tuple[int, ...] = ()
    ) -> CollectiveError:
        """The error to raise; later calls raise it again, and the others are told."""
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
    """The message that opens a call, alike on all ranks; `check` is any further number."""
    return MeshMessage(
        call,
        READY,
        kind=KINDS.index(kind),
        dtype=DTYPES.index(buffer.dtype),
        numel=buffer.numel(),
        check=check & 0xFFFFFFFF,
    )
