"""The thread of each rank that answers the others, and what a rank asks of them."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

from shardwise import authentication
from shardwise.errors import CollectiveError, PeerLost
from shardwise.watch import (
    hang_report,
    processes,
    questions,
    whereabouts,
)
from shardwise.watch import (
    wait_graph as roots,
)
from shardwise.watch.questions import Message
from shardwise.watch.wait_graph import Roots, Told, Whereabouts
from shardwise.watch.waits import Waits

ANSWER = 2.0
"""Seconds that a rank gets to answer."""

TELLING = 0.5
"""Seconds to tell others why this rank gives up, before it does."""

KEEPERS = 16
"""So many ranks remember why others gave up; more need not know."""

SETTLE = 0.05
"""Seconds until a rank that is between two waits is asked again."""

_living: WeakSet[Lookout] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class Place:
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


class Channel(Protocol):
    """A group whose transport cannot see by itself that ranks are in different calls."""

    def sent(self, call: int, to: int) -> list[Any] | None:
        """What this rank has sent to a place in a call, as JSON; None where it has not come to
        that call."""

    def let_go(self, to: int, awaited: list[Any]) -> None:
        """Send to a place what it waits for, as `sent` tells it."""


class Lookout:
    """What rank `rank` of `size` tells of itself and asks of the others.

    `waits` are those of this process, `step` is the last that was made, `told` why the first of
    the others gave up, None while none has; `gives_up` once its own code knows of that;
    `is_to_speak` when this rank shall tell the user of a long wait. `channels` are groups of this
    process by a name that is alike on all their ranks.
    Until `meet` it hears and asks nobody.
    """

    def __init__(self, rank: int, size: int, secret: bytes = b"") -> None:
        self.rank = rank
        self.size = size
        self.secret = secret
        self.waits = Waits()
        self.step: int | None = None
        self.told: Told | None = None
        self.gives_up = False
        self.is_to_speak = False
        self.channels: WeakValueDictionary[str, Channel] = WeakValueDictionary()
        self._places: dict[int, Place] = {}
        self._name = secrets.token_hex()
        self._listener: socket.socket | None = None
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    # -- from the start to the end --------------------------------------------------------

    def listen(self, address: str, host: str) -> Place:
        """Be there at `address`; what the others must know of it."""
        mine: dict[str, Any] = {
            "rank": self.rank,
            "host": host,
            "pid": os.getpid(),
            "begun": processes.begun(),
            "name": self._name,
        }
        try:
            self._listener = questions.listen(address)
        except OSError:  # it asks, and is not asked
            return Place(**mine)
        port = self._listener.getsockname()[1]
        return Place(**mine, address=address, port=port)

    def meet(self, places: Sequence[Place]) -> None:
        """Know where all ranks are asked, and answer from now on."""
        self._places = {place.rank: place for place in places}
        self._name = places[0].name
        if self._listener is None:
            return
        self._bell = socket.socketpair()
        # A daemon, since the end of a process must not wait for who asks.
        self._thread = threading.Thread(target=self._serve, name="shardwise-lookout", daemon=True)
        self._thread.start()
        _living.add(self)

    def close(self) -> None:
        """Answer no longer."""
        if self._bell is not None and self._thread is not None:
            self._bell[1].close()  # which wakes the thread
            self._thread.join(ANSWER)
        self._let_go()

    def _let_go(self) -> None:
        for opened in (self._listener, *(self._bell or ())):
            if opened is not None:
                opened.close()
        self._listener = self._bell = self._thread = None
        self._places = {}

    # -- answering ------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._listener is not None
        assert self._bell is not None
        with authentication.Acceptor(self._listener, self.secret, self._bell[0]) as acceptor:
            while (asker := acceptor.accept()) is not None:
                questions.answer(asker, self._reply)

    def _reply(self, question: Message) -> Message:
        """What this rank says to a question of another one."""
        if question["ask"] == "tell":
            self.told = self.told or Told(**question["told"])
            return {}
        if question["ask"] == "speak":
            self.is_to_speak = True
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
        return asdict(self.whereabouts(stack=bool(question.get("stack"))))

    def whereabouts(self, *, stack: bool = False) -> Whereabouts:
        """Where this rank is."""
        frame = whereabouts.main_frame()
        wait = self.waits.longest()
        return Whereabouts(
            rank=self.rank,
            call=wait.call if wait else "",
            missing=tuple(sorted(wait.missing())) if wait else (),
            seconds=time.monotonic() - wait.since if wait else 0.0,
            verb=whereabouts.verb(frame),
            line=whereabouts.users_line(frame),
            step=self.step,
            told=self.told,
            stack=tuple(whereabouts.stack(frame)) if stack else (),
        )

    # -- asking ---------------------------------------------------------------------------

    def ask(self, ranks: Collection[int], *, stack: bool = False) -> dict[int, Whereabouts | str]:
        """Where `ranks` are, or why they do not say."""
        question = {"ask": "where", "stack": stack}
        states = {rank: self._known_state(rank) for rank in ranks}
        asked = [rank for rank, state in states.items() if state not in processes.SILENT]
        answers = self._ask(asked, question, ANSWER)
        found: dict[int, Whereabouts | str] = {
            rank: _read(answer) for rank, answer in answers.items()
        }
        silent = [rank for rank in ranks if rank not in found]
        if self.rank in silent:
            found[self.rank] = self.whereabouts(stack=stack)
            silent.remove(self.rank)
        return found | self._silence(silent)

    def _ask(self, ranks: Collection[int], question: Message, patience: float) -> Any:
        places = {
            rank: (self._places[rank].address, self._places[rank].port)
            for rank in ranks
            if rank != self.rank and rank in self._places and self._places[rank].port
        }
        return questions.ask(places, self.secret, question, patience)

    def _silence(self, ranks: Collection[int]) -> dict[int, str]:
        """Why these say nothing, as far as somebody on their hosts can tell."""
        said = {}
        for rank in ranks:
            state = self._known_state(rank) or self._state_from_neighbour(rank)
            if state in (None, *processes.SILENT):
                said[rank] = f"is {state}" if state else "does not answer: is its host cut off?"
            else:
                said[rank] = f"does not answer; its process is {state}"
        return said

    def _known_state(self, rank: int) -> str | None:
        mine, place = self._places.get(self.rank), self._places.get(rank)
        if mine is None or place is None or mine.host != place.host:
            return None
        return self._state_here(place)

    @staticmethod
    def _state_here(place: Place) -> str | None:
        return processes.state(place.pid, place.begun)

    def _state_from_neighbour(self, rank: int) -> str | None:
        """What a rank on the host of `rank` sees of it."""
        host = self._places[rank].host if rank in self._places else ""
        beside = [one.rank for one in self._places.values() if one.host == host]
        question = {"ask": "states", "ranks": [rank]}
        for answer in self._ask([one for one in beside if one != rank], question, ANSWER).values():
            state = answer["states"][0]
            return None if state is None else str(state)
        return None

    def ask_sent(self, rank: int, channel: str, call: int, to: int) -> list[Any] | None:
        """What `rank` has sent in a call to the rank at place `to` of the channel."""
        question = {"ask": "sent", "channel": channel, "call": call, "to": to}
        return self._ask([rank], question, ANSWER).get(rank, {}).get("sent")  # type: ignore[no-any-return]

    def ask_clock(self, rank: int) -> dict[str, int] | None:
        """What the clocks of `rank` show, in ns: "monotonic" and "wall"."""
        return self._ask([rank], {"ask": "clock"}, ANSWER).get(rank)  # type: ignore[no-any-return]

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

    def ask_to_let_go(self, rank: int, channel: str, to: int, awaited: list[Any]) -> None:
        """Let `rank` send what the one at place `to` waits for, so that it waits no longer."""
        question = {"ask": "let go", "channel": channel, "to": to, "awaited": awaited}
        self._ask([rank], question, ANSWER)

    def let_speak(self, rank: int) -> bool:
        """Let `rank` tell the user of a long wait; whether it will."""
        if rank == self.rank:
            self.is_to_speak = True
            return True
        return self._known_state(rank) not in processes.SILENT and bool(
            rank in self._ask([rank], {"ask": "speak"}, ANSWER)
        )

    # -- giving up ------------------------------------------------------------------------

    def roots(self, missing: Collection[int]) -> Roots:
        """Those for whom this rank waits in the end, from the ranks `missing` on."""
        return roots.follow(self.rank, missing, self._ask_twice)

    def _ask_twice(self, ranks: Collection[int]) -> dict[int, Whereabouts | str]:
        """A rank that waits without knowing for whom is on its way from one wait to the next."""
        found = self.ask(ranks)
        unsure = [r for r, w in found.items() if isinstance(w, Whereabouts) and not w.missing]
        if unsure:
            time.sleep(SETTLE)
            found.update(self.ask(unsure))
        return found

    def compared(self) -> str:
        """Where ranks are that are found in different calls, as a sentence and a space."""
        said = hang_report.difference(self.ask(range(min(self.size, KEEPERS))))
        return f"{said} " if said else ""

    def tell(self, error: CollectiveError) -> None:
        """Let the others know why this rank gives up, before it does."""
        told = Told(rank=self.rank, text=str(error), lost=isinstance(error, PeerLost))
        self.gives_up = True
        if self.told is None:
            self.told = told
            wait = self.waits.longest()
            awaited = wait.missing() if wait else ()  # they may never come to ask a keeper
            question = {"ask": "tell", "told": asdict(told)}
            self._ask({*range(min(self.size, KEEPERS)), *awaited}, question, TELLING)

    def refuse_after_failure(self) -> None:
        """Raise why this rank has given up, if it has: it waits for nobody again."""
        if self.told is not None and self.told.rank == self.rank:
            raise (PeerLost if self.told.lost else CollectiveError)(self.told.text)

    def passed_on(self, speaker: str, told: Told | None = None) -> CollectiveError | None:
        """The error of `speaker`, this rank, where another one has given up before."""
        told = told or self.told
        if told is None or told.rank == self.rank:
            return None
        self.gives_up = True
        kind = PeerLost if told.lost else CollectiveError
        return kind(f"{speaker} gave up with rank {told.rank}, which says: {told.text}")


def _read(answer: Message) -> Whereabouts:
    told = answer.pop("told")
    lists: dict[str, Any] = {name: tuple(answer.pop(name)) for name in ("missing", "stack")}
    return Whereabouts(**answer, **lists, told=None if told is None else Told(**told))


def _in_forked_child() -> None:
    """A forked DataLoader worker must not hold our socket open, nor answer."""
    for lookout in list(_living):
        lookout._let_go()


os.register_at_fork(after_in_child=_in_forked_child)
