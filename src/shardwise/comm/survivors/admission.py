"""Lets spares join the group between two steps, with `--spares`.

    spare     prepares alone ─▶ "join" ──────────▶ loads the checkpoint ─▶ "ready" ──▶ connects
    members   train ─────────▶ save a checkpoint ─▶ wait for "ready" ──▶ gather states ─▶ connect

A spare repeats its request until the answer changes. Every member answers, because the member that
the spare has asked first may be lost.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError
from shardwise.net import environment, private_files
from shardwise.watch.status_server import RankAddress, StatusServer

JOIN = "join"
"""The kind of a spare's status server request to join."""

PAUSE = 0.1
"""Seconds after which a waiting spare asks again."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The group that a spare joins, as its members describe it.

    Args:
        run: Name that identifies the run.
        generation: Number of the group.
        confirmed: Number of commits that the members have confirmed.
        members: The members of the group.
        spares: The spares that join.
        full_size: Largest number of ranks so far.
        shares: True if the members share memory.
        channels: Number of separate channels of the group.
        state: Values that the engines of all ranks must have in common.
    """

    run: str
    generation: int
    confirmed: int
    members: tuple[RankAddress, ...]
    spares: tuple[RankAddress, ...]
    full_size: int
    shares: bool
    channels: int
    state: Mapping[str, Any]

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Entry:
        """Return the entry that `asdict` has turned into JSON values."""
        found = {each.name: plain[each.name] for each in fields(cls)}
        for name in ("members", "spares"):
            found[name] = tuple(RankAddress(**place) for place in found[name])
        return cls(**found)


class Admission:
    """The spares that have asked this member to join, and the answers to them.

    Args:
        server: This rank's status server, which receives the requests.
    """

    def __init__(self, server: StatusServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._waiting: dict[int, RankAddress] = {}
        self._growing: set[int] = set()
        """Waiting spares that join even if no rank was lost."""
        self._invited: set[tuple[int, str]] = set()
        """Ranks and names of the spares that receive the offer. The others continue to wait."""
        self._ready: set[int] = set()
        self._offer: dict[str, Any] | None = None
        self._entry: dict[str, Any] | None = None
        server.answers[JOIN] = self._answer

    def waiting(self, missing: int, members: Collection[int]) -> list[RankAddress]:
        """Return the spares that may join, and whose processes run.

        At most `missing` of them replace lost ranks.
        """
        with self._lock:
            # A request of a spare that is now one of the `members` may be late. If instead a lost
            # member was started again as a spare, it repeats its request.
            self._waiting = {
                rank: place
                for rank, place in self._waiting.items()
                if rank not in members and not self._server.is_silent(place)
            }
            growing = [p for rank, p in self._waiting.items() if rank in self._growing]
            others = [p for rank, p in self._waiting.items() if rank not in self._growing]
            # If the invitation is repeated after a loss, these may have loaded the checkpoint. They
            # cannot wait for another one.
            others.sort(key=lambda place: (place.rank, place.name) not in self._invited)
            return growing + others[: max(0, missing)]

    def invite(self, spares: Sequence[RankAddress], offer: Mapping[str, Any]) -> None:
        """Answer the spares with `offer`, which describes the checkpoint to load."""
        with self._lock:
            self._waiting |= {place.rank: place for place in spares}
            self._invited |= {(place.rank, place.name) for place in spares}
            if self._offer is None or self._offer["id"] != offer["id"]:
                self._ready.clear()
            self._offer = dict(offer)

    def wait_until_ready(self, spares: Sequence[RankAddress], timeout: float) -> list[RankAddress]:
        """Return the spares that have loaded the checkpoint. Drop those that do not in time."""
        until = time.monotonic() + timeout
        while True:
            with self._lock:
                ready = [place for place in spares if place.rank in self._ready]
            left = [place for place in spares if place not in ready]
            if all(self._server.is_silent(place) for place in left):
                return ready
            if time.monotonic() > until:
                with self._lock:
                    for place in left:
                        self._waiting.pop(place.rank, None)
                return ready
            time.sleep(PAUSE / 10)

    def admit(self, entry: Entry) -> None:
        """Answer spares that are ready with `entry`."""
        with self._lock:
            self._entry = asdict(entry)

    def finish(self, joined: Sequence[int]) -> None:
        """Forget the offer, because the spares have joined or were lost."""
        with self._lock:
            self._offer = self._entry = None
            self._invited.clear()
            self._ready.clear()
            for rank in joined:
                self._waiting.pop(rank, None)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a spare. Runs in the status server's thread."""
        place, held = RankAddress(**question["place"]), question["holds"]
        with self._lock:
            self._waiting[place.rank] = place
            (self._growing.add if question["grows"] else self._growing.discard)(place.rank)
            is_invited = (place.rank, place.name) in self._invited
            offer, entry = self._offer if is_invited else None, self._entry
            if held is None or offer is None or offer["id"] != held:
                return {"offer": offer}
            self._ready.add(place.rank)
            admitted = entry is not None and any(
                each["rank"] == place.rank and each["name"] == place.name
                for each in entry["spares"]
            )
            return {"offer": offer, "entry": entry if admitted else None}


class Applicant:
    """Asks the members of the group to admit this rank, which is a spare.

    Args:
        server: This rank's status server.
        place: The address of this rank's status server.
        timeout: Maximum seconds to wait for the others once the checkpoint is loaded.
    """

    def __init__(self, server: StatusServer, place: RankAddress, timeout: float) -> None:
        self._server = server
        self._place = place
        self._timeout = timeout
        self._held: str | None = None

    def wait_for_offer(self) -> Mapping[str, Any]:
        """Wait until the members offer a checkpoint, and return its description."""
        # Without a limit: a spare waits until a rank is lost. The launcher kills spares at the end
        # of the run, and the orphan reaper kills them after the launcher.
        while (offer := self._ask().get("offer")) is None:
            time.sleep(PAUSE)
        self._held = offer["id"]
        found: Mapping[str, Any] = offer["record"]
        return found

    def wait_for_entry(self) -> Entry:
        """Report that the checkpoint is loaded, and wait until the members admit this rank.

        Raises LaunchError if they have gone on without it.
        """
        until = time.monotonic() + self._timeout
        while True:
            answer = self._ask()
            if (entry := answer.get("entry")) is not None:
                return Entry.parse(entry)
            offer = answer.get("offer")
            if (offer is not None and offer["id"] != self._held) or time.monotonic() > until:
                raise LaunchError(
                    f"Spare rank {self._place.rank} was not ready in time, so the other ranks have "
                    "gone on without it. Between engine.resume and the first training batch, the "
                    "script should do no long work."
                )
            time.sleep(PAUSE / 10)

    def _ask(self) -> dict[str, Any]:
        grows = os.environ[environment.SPARE_VARIABLE] == environment.GROWS
        question = {
            "ask": JOIN,
            "place": asdict(self._place),
            "holds": self._held,
            "grows": grows,
        }
        for member in read_members():
            if answer := self._server.ask_at(member, question):
                return answer
        return {}


def publish_members(places: Sequence[RankAddress], generation: int) -> None:
    """Write the members' addresses to a file that spares on this host read."""
    if (folder := os.environ.get(environment.REPORTS_VARIABLE)) is not None:
        found = {"generation": generation, "members": [asdict(place) for place in places]}
        private_files.write(Path(folder) / environment.MEMBERS_FILE, json.dumps(found))


def read_members() -> list[RankAddress]:
    """Return the members' addresses, or [] if the group does not exist yet."""
    found: list[Any] = []
    latest = -1
    for name in (environment.MEMBERS_FILE, environment.OTHER_MEMBERS_FILE):
        with suppress(FileNotFoundError):
            file = Path(os.environ[environment.REPORTS_VARIABLE]) / name
            content = json.loads(file.read_text())
            if content["generation"] > latest:
                latest, found = content["generation"], content["members"]
    return [RankAddress(**each) for each in found]
