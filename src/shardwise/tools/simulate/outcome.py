"""Records how a simulated run spends its time, and holds its result."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.tools.simulate.run_model import CAUSES

BINS = 100
"""Number of time bins for a run that loses no time. Trials record how they spend each bin."""

GIVES_UP = 20.0
"""A trial is stopped if its wall time reaches this many times its work, because it might never
end."""

USEFUL = "useful"


@dataclass(frozen=True)
class Outcome:
    """The result of a trial. Times are in seconds.

    Attributes:
        wall: Total wall time.
        useful: Time spent on work that was not lost.
        lost: Lost time by cause.
        failures: Number of failures by class.
        moments: Time and class of each failure.
        bins: Time spent in each bin, by kind (USEFUL or a cause).
        width: Width of a bin.
        whole: True if the run completed all of its work.
        stops: Number of failures that stopped the entire run.
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
        """The fraction of the wall time spent on useful work."""
        return self.useful / self.wall


class TimeSpent:
    """Accumulates how the wall time is spent, in total and per bin of `width` seconds."""

    def __init__(self, width: float) -> None:
        self.now = 0.0
        self.width = width
        self.totals = dict.fromkeys((USEFUL, *CAUSES), 0.0)
        self.bins: dict[str, list[float]] = {kind: [0.0] for kind in self.totals}

    def spend(self, parts: dict[str, float]) -> None:
        """Advance the time by the sum of `parts` (seconds by kind), which are spread evenly."""
        wall = sum(parts.values())
        if wall <= 0:
            return
        end = self.now + wall
        for kind, seconds in parts.items():
            self.totals[kind] += seconds
        # Divide the interval among the bins that it covers, in proportion to the overlap.
        while self.now < end:
            number = int(self.now / self.width)
            until = min(end, (number + 1) * self.width)
            if until <= self.now:  # rounding error at the edge of a bin, so use the next bin
                number, until = number + 1, min(end, (number + 2) * self.width)
            share = (until - self.now) / wall
            for kind, seconds in parts.items():
                _row(self.bins[kind], number)[number] += seconds * share
            self.now = until

    def lose(self, work: float) -> None:
        """Reclassify the last `work` seconds of useful time as lost."""
        self.totals[USEFUL] -= work
        self.totals["lost"] += work
        # Start with the newest bin, because a failure loses the most recent work.
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
    """Pad `values` with zeros so that it has an element with index `number`, and return it."""
    values.extend([0.0] * (number + 1 - len(values)))
    return values
