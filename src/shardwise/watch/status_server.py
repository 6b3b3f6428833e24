"""A thread that tells other ranks where this rank is, and why it aborted.

The server object also asks other ranks for their status, their clocks and the ranks that they wait
for.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakSet, WeakValueDictionary

from shardwise.errors import CollectiveError, PeerLost
from shardwise.net import progress, rpc
from shardwise.watch import process_status, wait_graph
from shardwise.watch.hang_report import call_difference
from shardwise.watch.wait_graph import Abort, BlockingRanks, RankStatus
from shardwise.watch.waits import Waits

ANSWER_SECONDS = 2.0
"""Seconds to wait for an answer."""

ABORT_SECONDS = 0.5
"""Maximum seconds that a rank spends on telling the others why it is about to abort."""

KEEPERS = 16
"""Number of ranks that are told why a rank aborted. Any rank can ask one of them."""

SETTLE = 0.05
"""Seconds before asking a rank again if it waits for nobody, because it may be between two
waits."""

CLOCK_ROUNDS = 8
"""Number of round trips to measure a clock offset. The fastest one is used."""

HEARING = 1.0
"""Seconds within which a connected rank must send its request."""

Message = dict[str, Any]

Clock = Literal["monotonic", "wall"]

_living: WeakSet[StatusServer] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """The address of a rank's status server: `port` of `address`. Port 0 means no server.

    `others` are further addresses of the rank, at which Gloo may connect to it.
    `host` is equal for ranks that can see each other's processes. `pid` and its start time `begun`
    identify the process. `name` is a random name drawn by this rank.
    """

    rank: int
    address: str = ""
    port: int = 0
    others: Sequence[str] = ()
    host: str = ""
    pid: int = 0
    begun: int | None = None
    name: str = ""

    @property
    def role(self) -> bytes:
        """The role that authenticates the server (see authentication.py), unique per process."""
        return f"status {self.rank} {self.name}".encode()


class ClockOffset(NamedTuple):
    """The offset between two clocks, and its maximum error, both in ns."""

    ns: int
    error: int


class Channel(Protocol):
    """A process group whose transport does not check that all ranks are in the same call."""

    def sent(self, call: int, to: int) -> list[Any] | None:
        """Return this rank's messages in call number `call` to the rank at index `to`, as JSON.

        Returns None if this rank has not reached the call yet.
        """

    def let_go(self, to: int, awaited: list[Any]) -> None:
        """Unblock the rank at index `to` by sending the message that it waits for.

        `awaited` describes the message in the form that `sent` returns.
        """


class StatusServer:
    """Answers requests about rank `rank` of `size`, and sends requests to the other ranks.

    waits          the open waits of this process
    step           number of the last completed step
    abort          why the first rank aborted, or None if no rank has aborted
    is_aborting    True once this rank's own code knows of the abort
    report_is_due  True once this rank has been asked to report a long wait to the user
    channels       this process's groups, by a name that is the same on all their ranks
    answers        functions of other packages that answer further requests, by request name.
                   They run in the server's thread

    Before `start`, it neither answers nor sends requests.
    """

    def __init__(self, rank: int, size: int, secret: bytes = b"") -> None:
        self.rank = rank
        self.size = size
        self.secret = secret
        self.waits = Waits()
        self.step: int | None = None
        self.abort: Abort | None = None
        self.is_aborting = False
        self.report_is_due = False
        self.channels: WeakValueDictionary[str, Channel] = WeakValueDictionary()
        self.answers: dict[str, Callable[[Message], Message]] = {}
        self._generation = 0
        self._places: dict[int, RankAddress] = {}
        self._name = secrets.token_hex()
        self._listener: socket.socket | None = None
        self._server: rpc.Server | None = None
        _living.add(self)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that can be asked. With elastic islands, only the ranks of this island."""
        return sorted(self._places) or range(self.size)

    # -- from the start to the end --------------------------------------------------------

    def listen(self, address: str, host: str, others: Sequence[str] = ()) -> RankAddress:
        """Listen on `address`. Return the address to send to the other ranks."""
        mine: dict[str, Any] = {
            "rank": self.rank,
            "host": host,
            "pid": os.getpid(),
            "begun": process_status.process_start(),
            "name": self._name,
            "others": others,
        }
        try:
            self._listener = rpc.listen(address)
        except OSError:  # this rank can send requests, but not answer any
            return RankAddress(**mine)
        # The system chooses a free port.
        port = self._listener.getsockname()[1]
        return RankAddress(**mine, address=address, port=port)

    def start(self, places: Sequence[RankAddress]) -> None:
        """Start answering requests. `places` holds the addresses of all ranks."""
        self._places = {place.rank: place for place in places}
        # All ranks adopt rank 0's name, which identifies the run.
        self._name = places[0].name
        if self._listener is not None:
            # Answers are quick, so a single thread serves all requests.
            role, name = self._places[self.rank].role, "shardwise-status"
            self._server = rpc.Server(
                self._listener, self.secret, role, self._answer, name=name, one_by_one=True
            )

    def close(self) -> None:
        if self._server is not None:
            self._server.close(ANSWER_SECONDS)
        elif self._listener is not None:
            self._listener.close()
        self._listener = self._server = None
        self._places = {}

    # -- answering ------------------------------------------------------------------------

    def _answer(self, asker: rpc.Connection) -> None:
        # A rank that connects and then stops must not block the answers to others.
        asker.socket.settimeout(HEARING)
        if (question := asker.receive()) is not None:
            asker.send(rpc.encode(self._reply(rpc.decode(question))))

    def _reply(self, question: Message) -> Message:
        if (answer := self.answers.get(question["ask"])) is not None:
            return answer(question)
        # Keep the first abort, because later ones are consequences of it.
        if question["ask"] == "abort":
            if question["generation"] != self._generation:
                return {}  # it is about a group that the ranks have left
            self.abort = self.abort or Abort(**question["abort"])
            return {}
        if question["ask"] == "report":
            self.report_is_due = True
            return {}
        if question["ask"] == "clock":
            return {"monotonic": time.monotonic_ns(), "wall": time.time_ns()}
        if question["ask"] == "sent":
            channel = self.channels.get(question["channel"])
            return {"sent": channel.sent(question["call"], question["to"]) if channel else None}
        if question["ask"] == "let go":
            if (channel := self.channels.get(question["channel"])) is not None:
                channel.let_go(question["to"], question["awaited"])
            return {}
        if question["ask"] == "states":
            return {"states": [self._state_here(self._places[rank]) for rank in question["ranks"]]}
        return asdict(self.status(stack=bool(question.get("stack"))))

    def status(self, *, stack: bool = False) -> RankStatus:
        """Return this rank's status, read from the frames of its main thread."""
        frame = process_status.main_frame()
        wait = self.waits.longest()
        return RankStatus(
            rank=self.rank,
            call=wait.call if wait else "",
            missing=tuple(sorted(wait.missing())) if wait else (),
            seconds=time.monotonic() - wait.since if wait else 0.0,
            verb=process_status.library_call(frame),
            line=process_status.users_line(frame),
            step=self.step,
            abort=self.abort,
            stack=tuple(process_status.stack_lines(frame)) if stack else (),
        )

    # -- asking ---------------------------------------------------------------------------

    def ask(self, ranks: Collection[int], *, stack: bool = False) -> dict[int, RankStatus | str]:
        """Return the status of each of the `ranks`, or text that says why it does not answer."""
        question = {"ask": "where", "stack": stack}
        # Don't ask a stopped or exited process on this host: it would only cost the timeout.
        states = {rank: self._known_state(rank) for rank in ranks}
        reachable = [rank for rank, state in states.items() if state not in process_status.SILENT]
        answers = self._ask(reachable, question, ANSWER_SECONDS)
        statuses: dict[int, RankStatus | str] = {}
        for rank, answer in answers.items():  # JSON has no tuples, and no dataclasses
            abort = answer.pop("abort")
            lists: dict[str, Any] = {name: tuple(answer.pop(name)) for name in ("missing", "stack")}
            statuses[rank] = RankStatus(
                **answer, **lists, abort=None if abort is None else Abort(**abort)
            )
        # Don't ask this rank itself over the network.
        silent = [rank for rank in ranks if rank not in statuses]
        if self.rank in silent:
            statuses[self.rank] = self.status(stack=stack)
            silent.remove(self.rank)
        return statuses | self._explain_silence(silent)

    def _ask(self, ranks: Collection[int], question: Message, patience: float) -> Any:
        """Send `question` to all `ranks` at once. Return the answers that arrive in time.

        `patience` is the number of seconds to wait for them.
        """
        known = {rank: self._places[rank] for rank in ranks if rank in self._places}
        places = {
            rank: rpc.Endpoint(place.address, place.port, place.role)
            for rank, place in known.items()
            if rank != self.rank and place.port
        }
        return rpc.call_all(places, self.secret, question, patience)

    def _explain_silence(self, ranks: Collection[int]) -> dict[int, str]:
        """Return why each rank does not answer, if a rank on its host can tell."""
        reasons = {}
        for rank in ranks:
            state = self._known_state(rank) or self._state_from_neighbour(rank)
            if state in (None, *process_status.SILENT):
                reasons[rank] = f"is {state}" if state else "does not answer: is its host cut off?"
            else:
                reasons[rank] = f"does not answer; its process is {state}"
        return reasons

    def _known_state(self, rank: int) -> str | None:
        """Return the state of `rank`'s process if it is on this host, otherwise None."""
        mine, place = self._places.get(self.rank), self._places.get(rank)
        if mine is None or place is None or mine.host != place.host:
            return None
        return self._state_here(place)

    @staticmethod
    def _state_here(place: RankAddress) -> str | None:
        return process_status.process_state(place.pid, place.begun)

    def _state_from_neighbour(self, rank: int) -> str | None:
        """Return the state of `rank`'s process as seen by another rank on its host, or None."""
        host = self._places[rank].host if rank in self._places else ""
        neighbours = [
            one.rank for one in self._places.values() if one.host == host and one.rank != rank
        ]
        # A process is not visible from another host, so ask a rank on the same host.
        question = {"ask": "states", "ranks": [rank]}
        for answer in self._ask(neighbours, question, ANSWER_SECONDS).values():
            state = answer["states"][0]
            # The first answer is enough, because all ranks of a host see the same processes.
            return None if state is None else str(state)
        return None

    def ask_sent(self, rank: int, channel: str, call: int, to: int) -> list[Any] | None:
        """Return the messages that `rank` sent in call number `call` to the rank at index `to`.

        `channel` is the name of their group. Returns None if `rank` does not answer or has not
        reached the call yet.
        """
        question = {"ask": "sent", "channel": channel, "call": call, "to": to}
        return self._ask([rank], question, ANSWER_SECONDS).get(rank, {}).get("sent")  # type: ignore[no-any-return]

    def ask_to_let_go(self, rank: int, channel: str, to: int, awaited: list[Any]) -> None:
        """Ask `rank` to send the message that the rank at index `to` of `channel` waits for."""
        question = {"ask": "let go", "channel": channel, "to": to, "awaited": awaited}
        self._ask([rank], question, ANSWER_SECONDS)

    def ask_at(self, place: RankAddress, question: Message) -> Message:
        """Send `question` to the server at `place`, which may not be in this rank's group.

        Returns the answer, or {} if there is none.
        """
        end = rpc.Endpoint(place.address, place.port, place.role)
        found: Message = rpc.call_all({0: end}, self.secret, question, ANSWER_SECONDS).get(0, {})
        return found

    def is_silent(self, place: RankAddress) -> bool:
        """Return whether the process at `place` has exited or, on this host, is stopped."""
        mine = self._places.get(self.rank)
        if mine is not None and mine.host != place.host:
            return progress.is_lost(place.rank)
        return self._state_here(place) in process_status.SILENT

    def ask_one(self, rank: int, question: Message) -> Message:
        """Send `question` to `rank`, and return the answer, or {} if `rank` does not answer."""
        found: Message = self._ask([rank], question, ANSWER_SECONDS).get(rank, {})
        return found

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of `rank` has exited.

        If `rank` is on another host, return whether the launcher has reported this.
        """
        if self.shares_host(rank):
            return rank != self.rank and self._known_state(rank) == process_status.ENDED
        return progress.is_lost(rank)

    def lost_hosts(self) -> list[str]:
        """Return the addresses of each other host whose ranks have all ended."""
        known = list(self._places.values())  # the main thread may add ranks
        places = [place for place in known if not self.shares_host(place.rank)]
        left = {place.host for place in places if not progress.is_lost(place.rank)}
        lost = [place for place in places if place.host not in left]
        return sorted({address for place in lost for address in (place.address, *place.others)})

    def hosts_of(self, ranks: Sequence[int]) -> list[str]:
        """Return the host of each of `ranks`, or "" for each in a group of one."""
        return [self._places[rank].host if rank in self._places else "" for rank in ranks]

    def ask_to_report(self, rank: int) -> bool:
        """Ask `rank` to report a long wait to the user. Return whether it agreed."""
        if rank == self.rank:
            self.report_is_due = True
            return True
        return self._known_state(rank) not in process_status.SILENT and bool(
            rank in self._ask([rank], {"ask": "report"}, ANSWER_SECONDS)
        )

    def ask_clock(self, rank: int) -> dict[str, int] | None:
        """Return `rank`'s "monotonic" and "wall" clocks in ns, or None if it does not answer."""
        return self._ask([rank], {"ask": "clock"}, ANSWER_SECONDS).get(rank)  # type: ignore[no-any-return]

    def clock_offset(self, rank: int, which: Clock) -> ClockOffset | None:
        """Measure how far this rank's clock is ahead of `rank`'s clock.

        Returns None if `rank` does not answer.

        `rank` reads its clock between the start and the end of a round trip, so half the round-trip
        time bounds the error (Cristian, "Probabilistic clock synchronization", 1989). The fastest
        of several round trips is therefore the most accurate.
        """
        if rank == self.rank:
            return ClockOffset(0, 0)
        offsets = []
        for _ in range(CLOCK_ROUNDS):
            start = _clock_now(which)
            answer = self.ask_clock(rank)
            end = _clock_now(which)
            if answer is None:
                break
            offsets.append(ClockOffset((start + end) // 2 - answer[which], (end - start) // 2))
        return min(offsets, key=lambda one: one.error, default=None)

    def shares_host(self, rank: int) -> bool:
        """Return whether `rank` is on this host. Always True in a group of one."""
        mine, place = self._places.get(self.rank), self._places.get(rank)
        return mine is None or place is None or mine.host == place.host

    @property
    def hosts(self) -> int:
        """Number of hosts on which the ranks run."""
        return len({place.host for place in self._places.values()}) or 1

    @property
    def run(self) -> str:
        """A unique name for this run, the same on all its ranks."""
        return sha256(self._name.encode()).hexdigest()[:16]

    # -- aborting -------------------------------------------------------------------------

    def blocking_ranks(self, missing: Collection[int]) -> BlockingRanks:
        """Return the ranks that block this rank, which is waiting for the `missing` ranks."""
        return wait_graph.find_blocking_ranks(self.rank, missing, self._ask_twice)

    def _ask_twice(self, ranks: Collection[int]) -> dict[int, RankStatus | str]:
        """Return the status of each rank. Ranks that are not waiting are asked a second time.

        They may have been between two waits when they were first asked.
        """
        statuses = self.ask(ranks)
        unsure = [r for r, w in statuses.items() if isinstance(w, RankStatus) and not w.missing]
        if unsure:
            time.sleep(SETTLE)
            statuses.update(self.ask(unsure))
        return statuses

    def call_difference(self) -> str:
        """Return a sentence that describes which ranks are in different calls, or "" if none are.

        The sentence is followed by a space.
        """
        sentence = call_difference(self.ask(self.ranks[:KEEPERS]))
        return f"{sentence} " if sentence else ""

    def announce_abort(self, error: CollectiveError) -> None:
        """Tell other ranks why this rank is about to abort."""
        abort = Abort(rank=self.rank, text=str(error), lost=isinstance(error, PeerLost))
        self.is_aborting = True
        # A rank that aborts because of another rank has nothing to add.
        if self.abort is None:
            self.abort = abort
            wait = self.waits.longest()
            # Also tell the ranks that this one waits for: they may never wait, and so never ask.
            awaited = wait.missing() if wait else ()
            question = {
                "ask": "abort",
                "abort": asdict(abort),
                "generation": self._generation,
            }
            self._ask({*self.ranks[:KEEPERS], *awaited}, question, ABORT_SECONDS)

    def abort_too(self, error: CollectiveError) -> None:
        """Make all further waits of this rank raise `error`, until `continue_with` is called."""
        self.abort = Abort(rank=self.rank, text=str(error), lost=isinstance(error, PeerLost))

    def continue_with(self, ranks: Collection[int], generation: int) -> None:
        """After an abort, continue in a new group of `ranks`, the `generation`-th of the run.

        Later reports about aborts of earlier groups are ignored.
        """
        self._generation = generation
        self.abort, self.is_aborting = None, False
        self._places = {rank: place for rank, place in self._places.items() if rank in ranks}

    def introduce(self, places: Sequence[RankAddress], run: str | None = None) -> None:
        """Add the addresses of further ranks. A spare adopts the name of the run too."""
        self._places |= {place.rank: place for place in places}
        self._name = run or self._name

    @property
    def run_name(self) -> str:
        """The random name that identifies the run. All ranks have adopted rank 0's."""
        return self._name

    def places_of(self, ranks: Sequence[int]) -> list[RankAddress]:
        """Return the addresses of `ranks`."""
        return [self._places[rank] for rank in ranks]

    def refuse_after_failure(self) -> None:
        """Raise this rank's error again if it has aborted, so that it starts no new wait."""
        if self.abort is not None and self.abort.rank == self.rank:
            raise (PeerLost if self.abort.lost else CollectiveError)(self.abort.text)

    def error_of_another(self, speaker: str, abort: Abort | None = None) -> CollectiveError | None:
        """Return the error to raise on this rank if another rank has aborted, otherwise None.

        `speaker` is the subject of the message, such as the name of the collective.
        """
        abort = abort or self.abort
        if abort is None or abort.rank == self.rank:
            return None
        self.is_aborting = True
        kind = PeerLost if abort.lost else CollectiveError
        return kind(f"{speaker} aborted because rank {abort.rank} failed: {abort.text}")


def _clock_now(which: Clock) -> int:
    return time.monotonic_ns() if which == "monotonic" else time.time_ns()


def _in_forked_child() -> None:
    """Detach a forked child from the run, because it is not a rank.

    It must not answer requests addressed to its parent, or take part in collectives.
    """
    for server in list(_living):
        server._listener = server._server = None  # rpc.py has already closed the sockets
        server._places = {}
        server.abort = Abort(rank=server.rank, text=forked_from(server.rank), lost=False)


def forked_from(rank: int) -> str:
    """Return the error message for a collective call in a forked child of `rank`."""
    return (
        f"Process {os.getpid()} was forked from rank {rank} and is not a rank itself, so it cannot "
        "take part in collectives: engines, barriers, reductions, checkpoints. Use the model here "
        "as in plain PyTorch, and send results to the process that forked this one."
    )


os.register_at_fork(after_in_child=_in_forked_child)
