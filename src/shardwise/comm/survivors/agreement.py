"""Exchanges reports after a loss, until all remaining ranks know the same decision.

    rank that lost another ── report ─▶ status server of the first rank that has not exited
                           ◀─ decision, or "wait": then it asks again

The first rank decides once it has a report from every rank whose process has not exited. If the
first rank exits before all ranks have met, the next one decides, and the others report to that
one. Spares that join the run report in the same way.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from shardwise.comm.survivors import membership
from shardwise.comm.survivors.membership import Decision, Report
from shardwise.errors import CollectiveError
from shardwise.messages.printable import ranks_in_words
from shardwise.net import network
from shardwise.watch.status_server import StatusServer

REGROUP = "regroup"
"""The kind of status server request that contains a report."""

PAUSE = 0.01
"""Seconds after which a rank that waits for the decision reports again."""

SPARE_SECONDS = 10.0
"""Maximum seconds to wait for a spare's report. The others then continue without this spare."""


class NotAdmitted(Exception):
    """The other ranks have formed a group without this spare."""


class Agreement:
    """The reports that this rank has received, and its last decision.

    Args:
        server: This rank's status server, which receives the reports.
        address: This rank's address, at which other ranks can reach it.
    """

    def __init__(self, server: StatusServer, address: str) -> None:
        self._server = server
        self._address = address
        self._lock = threading.Lock()
        self._reports: dict[int, Report] = {}
        self._decision: Decision | None = None
        server.answers[REGROUP] = self._answer

    def reach(
        self, mine: Report, members: Sequence[int], timeout: float, spares: Sequence[int] = ()
    ) -> tuple[Decision, socket.socket | None]:
        """Report to the first remaining rank, and return the decision.

        Args:
            mine: This rank's report.
            members: The ranks that were in the group before the loss.
            timeout: Limit for the wait, in seconds.
            spares: The ranks that join.

        Returns:
            The decision and, on its first member, the socket that accepts the others.

        Raises:
            CollectiveError: A rank has not reported in time, or the reports contradict each other.
            NotAdmitted: This rank is a spare, and the other ranks continue without it.
        """
        now = time.monotonic()
        until, until_spares = now + timeout, now + min(SPARE_SECONDS, timeout / 2)
        while True:
            ended = {rank for rank in (*members, *spares) if self._server.has_ended(rank)}
            if time.monotonic() > until_spares:
                with self._lock:
                    ended |= set(spares) - self._reports.keys() - {mine.rank}
            leader = membership.leader(members, ended)
            if leader == mine.rank:
                if (found := self._decide(mine, members, ended, spares)) is not None:
                    return found
            elif (decision := self._ask(leader, mine)) is not None:
                return decision, None
            if time.monotonic() > until:
                with self._lock:
                    missing = sorted(set(members) - ended - self._reports.keys() - {mine.rank})
                waited = missing if leader == mine.rank else [leader]
                raise CollectiveError(
                    f"Rank {mine.rank} lost another rank, and waited {timeout:g} s (--timeout) for "
                    f"{ranks_in_words(waited)} to agree on who is left. Are they "
                    "stopped, or in a call that does not take part in the step?"
                ).blaming(waited)
            time.sleep(PAUSE)

    def _decide(
        self, mine: Report, members: Sequence[int], ended: set[int], spares: Sequence[int]
    ) -> tuple[Decision, socket.socket] | None:
        """Return the decision and a listening socket, or None if a report is missing."""
        with self._lock:
            self._reports[mine.rank] = mine
            decision = membership.decide(self._reports, members, ended, spares)
            if decision is None:
                return None
            # Listen first, because a rank that receives the decision connects at once.
            listener = network.listen(self._address, 0)
            port = listener.getsockname()[1]
            self._decision = replace(decision, address=self._address, port=port)
            # If this group cannot be formed, all ranks report again.
            self._reports.clear()
            return self._decision, listener

    def _ask(self, leader: int, mine: Report) -> Decision | None:
        question = {"ask": REGROUP, "report": asdict(mine)}
        answer = self._server.ask_one(leader, question)
        if "without" in answer and mine.rank in mine.admits:
            raise NotAdmitted
        found = answer.get("decision")
        if found is None:
            return None
        return Decision(**(found | {"members": tuple(found["members"])}))

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer another rank's report. Runs in the status server's thread."""
        found = question["report"]
        report = Report(**found | {"admits": tuple(found["admits"])})
        with self._lock:
            made = self._decision
            if made is not None and made.generation > report.generation:
                # The other ranks continue without a rank that was stopped until now.
                is_in = report.rank in made.members
                return {"decision": asdict(made)} if is_in else {"without": made.generation}
            self._reports[report.rank] = report
        return {}
