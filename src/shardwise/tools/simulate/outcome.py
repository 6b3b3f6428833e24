"""Outcome is what came of one simulated run; TimeSpent keeps the books of its time meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.tools.simulate.run_model import CAUSES

BINS = 100
"""Bins of time in the work of a run: for each a trial says where its wall time went."""

GIVES_UP = 20.0
"""A run that takes so many times its work is ended there: it may never end."""

USEFUL = "useful"


@dataclass(frozen=True)
class Outcome:
    """What came of a trial, in seconds: of `wall` in all, `useful` is work that counts, and `lost`
    is the rest by cause.

    `failures` are counts by class, `moments` when each came. `bins` are the seconds by USEFUL and
    cause in bins of `width`. `whole` says that the work was done. `stops` counts the
    failures after which nothing of the run went on.
    """

    wall: float
    useful: float
    lost: dict[str, float]
    failures: dict[str, int]
    moments: list[tuple[float, str]]
    bins: dict[str, list[float]]
    width: float
    whole: bool
    stops: int

    @property
    def goodput(self) -> float:
        """The fraction of the wall time that was work that counts."""
        return self.useful / self.wall


class TimeSpent:
    """Where the wall time went, in all and by bins of `width` seconds."""

    def __init__(self, width: float) -> None:
        self.now = 0.0
        self.width = width
        self.totals = dict.fromkeys((USEFUL, *CAUSES), 0.0)
        self.bins: dict[str, list[float]] = {kind: [0.0] for kind in self.totals}

    def spend(self, parts: dict[str, float]) -> None:
        """Let the seconds of `parts` pass, evenly mixed."""
        wall = sum(parts.values())
        if wall <= 0:
            return
        end = self.now + wall
        for kind, seconds in parts.items():
            self.totals[kind] += seconds
        while self.now < end:
            number = int(self.now / self.width)
            until = min(end, (number + 1) * self.width)
            if until <= self.now:  # rounding, at the border of a bin
                number, until = number + 1, min(end, (number + 2) * self.width)
            share = (until - self.now) / wall
            for kind, seconds in parts.items():
                _row(self.bins[kind], number)[number] += seconds * share
            self.now = until

    def lose(self, work: float) -> None:
        """Count the last `work` seconds that were useful as lost."""
        self.totals[USEFUL] -= work
        self.totals["lost"] += work
        useful = self.bins[USEFUL]
        number = len(useful) - 1
        while work > 0 and number >= 0:
            part = min(work, useful[number])
            useful[number] -= part
            _row(self.bins["lost"], number)[number] += part
            work -= part
            number -= 1

    def closed(
        self,
        *,
        failures: dict[str, int],
        moments: list[tuple[float, str]],
        whole: bool,
        stops: int,
    ) -> Outcome:
        """The outcome of a trial whose time this was."""
        return Outcome(
            wall=self.now,
            useful=self.totals[USEFUL],
            lost={cause: self.totals[cause] for cause in CAUSES},
            failures=failures,
            moments=moments,
            bins=self.bins,
            width=self.width,
            whole=whole,
            stops=stops,
        )


def _row(values: list[float], number: int) -> list[float]:
    """`values`, long enough for index `number`."""
    values.extend([0.0] * (number + 1 - len(values)))
    return values
