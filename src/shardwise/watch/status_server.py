"""A thread that answers other ranks: where this rank is, and why it aborted.

Also the questions of this rank to others: their status, their clocks, and for whom they wait.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakSet, WeakValueDictionary

from shardwise.errors import CollectiveError, PeerLost
from shardwise.net import rpc
from shardwise.watch import process_status, wait_graph
from shardwise.watch.hang_report import call_difference
from shardwise.watch.wait_graph import Abort, BlockingRanks, RankStatus
from shardwise.watch.waits import Waits

ANSWER_SECONDS = 2.0
"""Seconds to wait for an answer."""

ABORT_SECONDS = 0.5
"""Seconds to spend on telling other ranks why this rank aborts, before it does."""

KEEPERS = 16
"""Number of ranks that are told why others aborted. Any rank can ask one of them."""

SETTLE = 0.05
"""Seconds before asking a rank again that waits for nobody. It may be between two waits."""

CLOCK_ROUNDS = 8
"""Number of round trips to measure a clock; the quickest one counts."""

HEARING = 1.0
"""Seconds within which a rank that has connected must send its question."""

Message = dict[str, Any]

Clock = Literal["monotonic", "wall"]

_living: WeakSet[StatusServer] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """The address of a rank's status server: `port` of `address`; port 0 if it cannot be asked.

    `host` is the same for ranks that see each other's processes. The process `pid` began at
    `begun`. `name` is a random name that this rank has drawn.
    """

    rank: int
    address: str = ""
    port: int = 0
    host: str = ""
    pid: int = 0
    begun: int | None = None
    name: str = ""

    @property
    def role(self) -> bytes:
        """The role of its authentication (see authentication.py), unique to this process."""
        return f"status {self.rank} {self.name}".encode()


class ClockOffset(NamedTuple):
    """The offset of a clock from another one, in ns, and its largest possible error, in ns."""

    ns: int
    error: int


class Channel(Protocol):
    """A group whose transport does not detect that ranks are in different calls."""

    def sent(self, call: int, to: int) -> list[Any] | None:
        """Return the messages of this rank to a place in a call, as JSON; None before the call."""

    def let_go(self, to: int, awaited: list[Any]) -> None:
        """Send a place the message it waits for (described as by `sent`), so that its wait ends."""


class StatusServer:
    """Answers for rank `rank` of `size`, and asks the other ranks.

    waits          the open waits of this process
    step           number of the last completed step
    abort          why the first rank aborted; None while none has
    is_aborting    True once this rank's own code knows of the abort
    report_is_due  True when this rank has been asked to report a long wait to the user
    channels       groups of this process, by a name that is the same on all their ranks

    Before `start` it neither answers nor asks.
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
        self._places: dict[int, RankAddress] = {}
        self._name = secrets.token_hex()
        self._listener: socket.socket | None = None
        self._server: rpc.Server | None = None
        _living.add(self)

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks that can be asked: all, or with elastic islands the ranks of this island."""
        return sorted(self._places) or range(self.size)

    # -- from the start to the end --------------------------------------------------------

    def listen(self, address: str, host: str) -> RankAddress:
        """Listen at `address`, and return the address to send to the other ranks."""
        mine: dict[str, Any] = {
            "rank": self.rank,
            "host": host,
            "pid": os.getpid(),
            "begun": process_status.process_start(),
            "name": self._name,
        }
        try:
            self._listener = rpc.listen(address)
        except OSError:  # this rank can ask, but not be asked
            return RankAddress(**mine)
        # The system chooses a free port.
        port = self._listener.getsockname()[1]
        return RankAddress(**mine, address=address, port=port)

    def start(self, places: Sequence[RankAddress]) -> None:
        """Start to answer. `places` are the addresses of all ranks."""
        self._places = {place.rank: place for place in places}
        # All ranks take over rank 0's name: it identifies the run.
        self._name = places[0].name
        if self._listener is not None:
            # Answers are quick, so one thread serves all questions.
            role, name = self._places[self.rank].role, "shardwise-status"
            self._server = rpc.Server(
                self._listener, self.secret, role, self._answer, name=name, one_by_one=True
            )

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close(ANSWER_SECONDS)
        elif self._listener is not None:
            self._listener.close()
        self._listener = self._server = None
        self._places = {}

    # -- answering ------------------------------------------------------------------------

    def _answer(self, asker: rpc.Connection) -> None:
        """Answer one question and close the connection."""
        # A rank that connects and stops must not block the answers to others.
        asker.socket.settimeout(HEARING)
        if (question := asker.receive()) is not None:
            asker.send(rpc.encode(self._reply(rpc.decode(question))))

    def _reply(self, question: Message) -> Message:
        """Return the answer to a question of another rank."""
        # Keep the first abort: later ones are its consequences.
        if question["ask"] == "abort":
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
        """Return the status of this rank, read from the frames of its main thread."""
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
        """Return the status of `ranks`, or a text with the reason why one does not answer."""
        question = {"ask": "where", "stack": stack}
        # A stopped or ended process on this host is not asked: that would only cost the time-out.
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
        # This rank does not ask itself over the network.
        silent = [rank for rank in ranks if rank not in statuses]
        if self.rank in silent:
            statuses[self.rank] = self.status(stack=stack)
            silent.remove(self.rank)
        return statuses | self._explain_silence(silent)

    def _ask(self, ranks: Collection[int], question: Message, patience: float) -> Any:
        """Ask all `ranks` at once; return the answers of those that answer in time."""
        known = {rank: self._places[rank] for rank in ranks if rank in self._places}
        places = {
            rank: rpc.Endpoint(place.address, place.port, place.role)
            for rank, place in known.items()
            if rank != self.rank and place.port
        }
        return rpc.call_all(places, self.secret, question, patience)

    def _explain_silence(self, ranks: Collection[int]) -> dict[int, str]:
        """Return why these ranks do not answer, as far as a rank on their host can see."""
        reasons = {}
        for rank in ranks:
            state = self._known_state(rank) or self._state_from_neighbour(rank)
            if state in (None, *process_status.SILENT):
                reasons[rank] = f"is {state}" if state else "does not answer: is its host cut off?"
            else:
                reasons[rank] = f"does not answer; its process is {state}"
        return reasons

    def _known_state(self, rank: int) -> str | None:
        """Return the state of a rank's process if it is on this host, else None."""
        mine, place = self._places.get(self.rank), self._places.get(rank)
        if mine is None or place is None or mine.host != place.host:
            return None
        return self._state_here(place)

    @staticmethod
    def _state_here(place: RankAddress) -> str | None:
        return process_status.process_state(place.pid, place.begun)

    def _state_from_neighbour(self, rank: int) -> str | None:
        """Return the state of a rank's process as seen by a rank on its host."""
        host = self._places[rank].host if rank in self._places else ""
        neighbours = [
            one.rank for one in self._places.values() if one.host == host and one.rank != rank
        ]
        # A process cannot be seen from another host, so ask a rank on the same one.
        question = {"ask": "states", "ranks": [rank]}
        for answer in self._ask(neighbours, question, ANSWER_SECONDS).values():
            state = answer["states"][0]
            # The first answer is enough: all ranks of a host see the same processes.
            return None if state is None else str(state)
        return None

    def ask_sent(self, rank: int, channel: str, call: int, to: int) -> list[Any] | None:
        """Ask `rank` for its messages in a call to the rank at place `to` of the channel."""
        question = {"ask": "sent", "channel": channel, "call": call, "to": to}
        return self._ask([rank], question, ANSWER_SECONDS).get(rank, {}).get("sent")  # type: ignore[no-any-return]

    def ask_to_let_go(self, rank: int, channel: str, to: int, awaited: list[Any]) -> None:
        """Ask `rank` to send the message that place `to` waits for, so that its wait ends."""
        question = {"ask": "let go", "channel": channel, "to": to, "awaited": awaited}
        self._ask([rank], question, ANSWER_SECONDS)

    def ask_to_report(self, rank: int) -> bool:
        """Ask `rank` to report a long wait to the user. Return whether it will."""
        if rank == self.rank:
            self.report_is_due = True
            return True
        return self._known_state(rank) not in process_status.SILENT and bool(
            rank in self._ask([rank], {"ask": "report"}, ANSWER_SECONDS)
        )

    def ask_clock(self, rank: int) -> dict[str, int] | None:
        """Return the clocks "monotonic" and "wall" of `rank`, in ns; None if it does not answer."""
        return self._ask([rank], {"ask": "clock"}, ANSWER_SECONDS).get(rank)  # type: ignore[no-any-return]

    def clock_offset(self, rank: int, which: Clock) -> ClockOffset | None:
        """Measure how far this rank's clock is ahead of the clock of `rank`.

        None if it does not answer.

        The other clock was read between the start and the end of a round trip, so half of its
        duration bounds the error (Cristian, "Probabilistic clock synchronization", 1989). The
        quickest of several round trips is the most accurate.
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
        """Return whether `rank` is on this host; True for a group of one."""
        mine, place = self._places.get(self.rank), self._places.get(rank)
        return mine is None or place is None or mine.host == place.host

    @property
    def hosts(self) -> int:
        """Number of hosts of the ranks."""
        return len({place.host for place in self._places.values()}) or 1

    @property
    def run(self) -> str:
        """A unique name of this run, the same on all its ranks."""
        return sha256(self._name.encode()).hexdigest()[:16]

    # -- aborting -------------------------------------------------------------------------

    def blocking_ranks(self, missing: Collection[int]) -> BlockingRanks:
        """Return the ranks that block this one, which waits for the ranks `missing`."""
        return wait_graph.find_blocking_ranks(self.rank, missing, self._ask_twice)

    def _ask_twice(self, ranks: Collection[int]) -> dict[int, RankStatus | str]:
        """Ask, and ask the ranks again that wait for nobody: they may be between two waits."""
        statuses = self.ask(ranks)
        unsure = [r for r, w in statuses.items() if isinstance(w, RankStatus) and not w.missing]
        if unsure:
            time.sleep(SETTLE)
            statuses.update(self.ask(unsure))
        return statuses

    def call_difference(self) -> str:
        """Describe ranks that are in different calls, as a sentence and a space; "" if none are."""
        sentence = call_difference(self.ask(self.ranks[:KEEPERS]))
        return f"{sentence} " if sentence else ""

    def announce_abort(self, error: CollectiveError) -> None:
        """Tell other ranks why this rank aborts, before it does."""
        abort = Abort(rank=self.rank, text=str(error), lost=isinstance(error, PeerLost))
        self.is_aborting = True
        # A rank that aborts because of another one adds no news.
        if self.abort is None:
            self.abort = abort
            wait = self.waits.longest()
            # The ranks this one waits for may never start a wait, and so never ask a keeper.
            awaited = wait.missing() if wait else ()
            question = {"ask": "abort", "abort": asdict(abort)}
            self._ask({*self.ranks[:KEEPERS], *awaited}, question, ABORT_SECONDS)

    def refuse_after_failure(self) -> None:
        """Raise the error of this rank's abort again, if it has aborted, in place of a new wait."""
        if self.abort is not None and self.abort.rank == self.rank:
            raise (PeerLost if self.abort.lost else CollectiveError)(self.abort.text)

    def error_of_another(self, speaker: str, abort: Abort | None = None) -> CollectiveError | None:
        """Return the error to raise here if another rank has aborted; else None.

        `speaker` is the subject of its message, such as the collective.
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
    """Close our socket in a forked child, which is no rank.

    It must not answer for this rank, and its collectives must not reach the other ranks.
    """
    for server in list(_living):
        server._listener = server._server = None  # rpc.py has closed its sockets
        server._places = {}
        server.abort = Abort(rank=server.rank, text=forked_from(server.rank), lost=False)


def forked_from(rank: int) -> str:
    """Return why a forked child of `rank` cannot take part in collectives."""
    return (
        f"Process {os.getpid()} was forked from rank {rank} and is not a rank itself, so it cannot "
        "take part in collectives: engines, barriers, reductions, checkpoints. Use the model here "
        "as in plain PyTorch, and send results to the process that forked this one."
    )


os.register_at_fork(after_in_child=_in_forked_child)
