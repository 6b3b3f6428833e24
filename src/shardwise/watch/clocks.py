"""By how much a clock of this rank is ahead of that of another one.

A question and its answer are a round trip: what the other clock showed was between its two ends
here (Cristian, "Probabilistic clock synchronization", 1989). The quickest of a few says it best.
"""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

from shardwise.watch.status_server import Lookout

ROUNDS = 8

Which = Literal["monotonic", "wall"]


class Ahead(NamedTuple):
    """`ns` ahead, wrong by `error` ns at most."""

    ns: int
    error: int


def ahead(lookout: Lookout, rank: int, which: Which) -> Ahead | None:
    """How far this rank's clock is ahead of that of `rank`; None where it does not answer."""
    if rank == lookout.rank:
        return Ahead(0, 0)
    found = []
    for _ in range(ROUNDS):
        asked = _shown(which)
        answer = lookout.ask_clock(rank)
        heard = _shown(which)
        if answer is None:
            break
        found.append(Ahead((asked + heard) // 2 - answer[which], (heard - asked) // 2))
    return min(found, key=lambda one: one.error, default=None)


def _shown(which: Which) -> int:
    return time.monotonic_ns() if which == "monotonic" else time.time_ns()
