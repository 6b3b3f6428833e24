"""Answers other ranks in a thread of its own: where this rank is, and why it aborted.

Also what a rank asks of the others: their status, their clocks, and for whom they wait.
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
"""Seconds that a rank gets to answer."""

ABORT_SECONDS = 0.5
"""Seconds to let others know why this rank aborts, before it does."""

KEEPERS = 16
"""So many ranks remember why others aborted; more need not know."""

SETTLE = 0.05
"""Seconds until a rank that is between two waits is asked again."""

CLOCK_ROUNDS = 8
"""So many round trips measure a clock; the quickest one counts."""

HEARING = 1.0
"""Seconds within which a rank that has connected must send its question."""

Message = dict[str, Any]

Clock = Literal["monotonic", "wall"]

_living: WeakSet[StatusServer] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """Where rank `rank` is asked: `port` of `address`, 0 where it cannot be.

    `host` is alike for ranks that see each other's processes; `pid` began at `begun`. `name` was
    drawn by this rank alone.
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
        """The role in which it answers (see authentication.py): that of this very process."""
        return f"status {self.rank} {self.name}".encode()


class ClockOffset(NamedTuple):
    """A clock is `ns` ahead of another one, wrong by `error` ns at most."""

    ns: int
    error: int


class Channel(Protocol):
    """A group whose transport cannot see by itself that ranks are in different calls."""

    def sent(self, call: int, to: int) -> list[Any] | None:
        """What this rank has sent to a place in a call, as JSON; None before it came to it."""

    def let_go(self, to: int, awaited: list[Any]) -> None:
        """Send to a place what it waits for, as `sent` describes it."""


class StatusServer:
    """What rank `rank` of `size` reports of itself and asks of the others.

    `waits` are those of this process, `step` is the last that was made. `abort` says why the first
    of the other ranks aborted, None while none has; `is_aborting` is set once this rank's own code
    knows of that. `report_is_due` is set when this rank shall report a long wait to the user.
    `channels` are groups of this process by a name that is alike on all their ranks.

    Until `start` it hears and asks nobody.
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
        """The ranks that can be asked: all, but for those of other elastic islands."""
        return sorted(self._places) or range(self.size)

    # -- from the start to the end --------------------------------------------------------

    def listen(self, address: str, host: str) -> RankAddress:
        """Listen at `address`; returns what the others must know of it."""
        mine: dict[str, Any] = {
            "rank": self.rank,
            "host": host,
            "pid": os.getpid(),
            "begun": process_status.process_start(),
            "name": self._name,
        }
        try:
            self._listener = rpc.listen(address)
        except OSError:  # it asks, and is not asked
            return RankAddress(**mine)
        port = self._listener.getsockname()[1]
        return RankAddress(**mine, address=address, port=port)

    def start(self, places: Sequence[RankAddress]) -> None:
        """Answer from now on; `places` says where all ranks are asked."""
        self._places = {place.rank: place for place in places}
        self._name = places[0].name
        if self._listener is not None:
            # Answers are quick: one thread for all spares a busy rank a thread per question.
            role, name = self._places[self.rank].role, "shardwise-status"
            self._server = rpc.Server(
                self._listener, self.secret, role, self._answer, name=name, one_by_one=True
            )

    def close(self) -> None:
        """Answer no longer."""
        if self._server is not None:
            self._server.close(ANSWER_SECONDS)
        elif self._listener is not None:
            self._listener.close()
        self._listener = self._server = None
        self._places = {}

    # -- answering ------------------------------------------------------------------------

    def _answer(self, asker: rpc.Connection) -> None:
        """Answer one question and hang up."""
        asker.socket.settimeout(HEARING)
        if (question := asker.receive()) is not None:
            asker.send(rpc.encode(self._reply(rpc.decode(question))))

    def _reply(self, question: Message) -> Message:
        """Answer a question of another rank."""
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
        """The status of this rank, read from the frames of its main thread."""
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
        """The status of `ranks`, or in words why they give none."""
        question = {"ask": "where", "stack": stack}
        states = {rank: self._known_state(rank) for rank in ranks}
        asked = [rank for rank, state in states.items() if state not in process_status.SILENT]
        answers = self._ask(asked, question, ANSWER_SECONDS)
        found: dict[int, RankStatus | str] = {}
        for rank, answer in answers.items():  # JSON has no tuples, and no dataclasses
            abort = answer.pop("abort")
            lists: dict[str, Any] = {name: tuple(answer.pop(name)) for name in ("missing", "stack")}
            found[rank] = RankStatus(
                **answer, **lists, abort=None if abort is None else Abort(**abort)
            )
        silent = [rank for rank in ranks if rank not in found]
        if self.rank in silent:
            found[self.rank] = self.status(stack=stack)
            silent.remove(self.rank)
        return found | self._silence(silent)

    def _ask(self, ranks: Collection[int], question: Message, patience: float) -> Any:
        found = {rank: self._places[rank] for rank in ranks if rank in self._places}
        places = {
            rank: rpc.Endpoint(place.address, place.port, place.role)
            for rank, place in found.items()
            if rank != self.rank and place.port
        }
        return rpc.call_all(places, self.secret, question, patience)

    def _silence(self, ranks: Collection[int]) -> dict[int, str]:
        """Why these do not answer, as far as somebody on their hosts can tell."""
        said = {}
        for rank in ranks:
            state = self._known_state(rank) or self._state_from_neighbour(rank)
            if state in (None, *process_status.SILENT):
                said[rank] = f"is {state}" if state else "does not answer: is its host cut off?"
            else:
                said[rank] = f"does not answer; its process is {state}"
        return said

    def _known_state(self, rank: int) -> str | None:
        """The state of a rank's process, where that is on this host."""
        mine, place = self._places.get(self.rank), self._places.get(rank)
        if mine is None or place is None or mine.host != place.host:
            return None
        return self._state_here(place)

    @staticmethod
    def _state_here(place: RankAddress) -> str | None:
        return process_status.process_state(place.pid, place.begun)

    def _state_from_neighbour(self, rank: int) -> str | None:
        """The state of a rank's process, as a rank on its host sees it."""
        host = self._places[rank].host if rank in self._places else ""
        beside = [one.rank for one in self._places.values() if one.host == host]
        question = {"ask": "states", "ranks": [rank]}
        neighbours = [one for one in beside if one != rank]
        for answer in self._ask(neighbours, question, ANSWER_SECONDS).values():
            state = answer["states"][0]
            return None if state is None else str(state)
        return None

    def ask_sent(self, rank: int, channel: str, call: int, to: int) -> list[Any] | None:
        """What `rank` has sent in a call to the rank at place `to` of the channel."""
        question = {"ask": "sent", "channel": channel, "call": call, "to": to}
        return self._ask([rank], question, ANSWER_SECONDS).get(rank, {}).get("sent")  # type: ignore[no-any-return]

    def ask_to_let_go(self, rank: int, channel: str, to: int, awaited: list[Any]) -> None:
        """Let `rank` send what the one at place `to` waits for, so that it waits no longer."""
        question = {"ask": "let go", "channel": channel, "to": to, "awaited": awaited}
        self._ask([rank], question, ANSWER_SECONDS)

    def ask_to_report(self, rank: int) -> bool:
        """Let `rank` report a long wait to the user; whether it will."""
        if rank == self.rank:
            self.report_is_due = True
            return True
        return self._known_state(rank) not in process_status.SILENT and bool(
            rank in self._ask([rank], {"ask": "report"}, ANSWER_SECONDS)
        )

    def ask_clock(self, rank: int) -> dict[str, int] | None:
        """What the clocks of `rank` show, in ns: "monotonic" and "wall"."""
        return self._ask([rank], {"ask": "clock"}, ANSWER_SECONDS).get(rank)  # type: ignore[no-any-return]

    def clock_offset(self, rank: int, which: Clock) -> ClockOffset | None:
        """How far this rank's clock is ahead of that of `rank`; None where it does not answer.

        What the other clock showed was between the two ends of a round trip here (Cristian,
        "Probabilistic clock synchronization", 1989). The quickest of a few says it best.
        """
        if rank == self.rank:
            return ClockOffset(0, 0)
        found = []
        for _ in range(CLOCK_ROUNDS):
            asked = _clock_now(which)
            answer = self.ask_clock(rank)
            heard = _clock_now(which)
            if answer is None:
                break
            found.append(ClockOffset((asked + heard) // 2 - answer[which], (heard - asked) // 2))
        return min(found, key=lambda one: one.error, default=None)

    def shares_host(self, rank: int) -> bool:
        """Whether `rank` is known to be on this host; in a group of one it is."""
        mine, place = self._places.get(self.rank), self._places.get(rank)
        return mine is None or place is None or mine.host == place.host

    @property
    def hosts(self) -> int:
        """On how many hosts the ranks are."""
        return len({place.host for place in self._places.values()}) or 1

    @property
    def run(self) -> str:
        """A name of this run, alike on all its ranks and of no other run."""
        return sha256(self._name.encode()).hexdigest()[:16]

    # -- aborting -------------------------------------------------------------------------

    def blocking_ranks(self, missing: Collection[int]) -> BlockingRanks:
        """The ranks that block this one, which misses the ranks `missing`."""
        return wait_graph.find_blocking_ranks(self.rank, missing, self._ask_twice)

    def _ask_twice(self, ranks: Collection[int]) -> dict[int, RankStatus | str]:
        """Ask again who waits for nobody: it may have been between one wait and the next."""
        found = self.ask(ranks)
        unsure = [r for r, w in found.items() if isinstance(w, RankStatus) and not w.missing]
        if unsure:
            time.sleep(SETTLE)
            found.update(self.ask(unsure))
        return found

    def call_difference(self) -> str:
        """Where ranks are that are in different calls, as a sentence and a space."""
        said = call_difference(self.ask(self.ranks[:KEEPERS]))
        return f"{said} " if said else ""

    def announce_abort(self, error: CollectiveError) -> None:
        """Let the others know why this rank aborts, before it does."""
        abort = Abort(rank=self.rank, text=str(error), lost=isinstance(error, PeerLost))
        self.is_aborting = True
        if self.abort is None:
            self.abort = abort
            wait = self.waits.longest()
            awaited = wait.missing() if wait else ()  # they may never come to ask a keeper
            question = {"ask": "abort", "abort": asdict(abort)}
            self._ask({*self.ranks[:KEEPERS], *awaited}, question, ABORT_SECONDS)

    def refuse_after_failure(self) -> None:
        """Raise why this rank has aborted, if it has: it waits for nobody again."""
        if self.abort is not None and self.abort.rank == self.rank:
            raise (PeerLost if self.abort.lost else CollectiveError)(self.abort.text)

    def error_of_another(self, speaker: str, abort: Abort | None = None) -> CollectiveError | None:
        """The error of this rank, the `speaker`, where another one has aborted before."""
        abort = abort or self.abort
        if abort is None or abort.rank == self.rank:
            return None
        self.is_aborting = True
        kind = PeerLost if abort.lost else CollectiveError
        return kind(f"{speaker} aborted because rank {abort.rank} failed: {abort.text}")


def _clock_now(which: Clock) -> int:
    return time.monotonic_ns() if which == "monotonic" else time.time_ns()


def _in_forked_child() -> None:
    """Close our socket in a forked child, which is no rank: it must not answer for this one, and
    its collectives must not reach the other ranks."""
    for server in list(_living):
        server._listener = server._server = None  # rpc.py has closed its sockets
        server._places = {}
        server.abort = Abort(rank=server.rank, text=forked_from(server.rank), lost=False)


def forked_from(rank: int) -> str:
    """Return why a forked child of `rank` cannot take part in collectives."""
    return (
        f"Process {os.getpid()} was forked from rank {rank} and is not a rank itself, so it cannot "
        "call what all ranks do together: engines, barriers, reductions, checkpoints. Use the "
        "model here as in plain PyTorch, and send results to the process that forked this one."
    )


os.register_at_fork(after_in_child=_in_forked_child)
