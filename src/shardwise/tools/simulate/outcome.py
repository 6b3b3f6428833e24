"""The result of a simulated run, and the account of its time."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.tools.simulate.run_model import CAUSES

BINS = 100
"""Number of bins per run without losses. A trial records the use of its wall time in each bin."""

GIVES_UP = 20.0
"""A run that takes this many times its work is stopped, because it may never end."""

USEFUL = "useful"


@dataclass(frozen=True)
class Outcome:
    """The result of a trial, in seconds.

    `wall` is the total time, `useful` the work that counts, and `lost` the rest by cause.
    `failures` are counts by class, `moments` their times. `bins` are the seconds by USEFUL and
    cause in bins of `width`. `whole`: the work was completed. `stops` counts the failures that
    stopped the whole run.
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
        """The fraction of the wall time that was useful work."""
        return self.useful / self.wall


class TimeSpent:
    """The use of the wall time, in total and by bins of `width` seconds."""

    def __init__(self, width: float) -> None:
        self.now = 0.0
        self.width = width
        self.totals = dict.fromkeys((USEFUL, *CAUSES), 0.0)
        self.bins: dict[str, list[float]] = {kind: [0.0] for kind in self.totals}

    def spend(self, parts: dict[str, float]) -> None:
        """Spend the seconds of `parts`, evenly mixed."""
        wall = sum(parts.values())
        if wall <= 0:
            return
        end = self.now + wall
        for kind, seconds in parts.items():
            self.totals[kind] += seconds
        # Divide the span among the bins that it covers, in proportion to the time in each.
        while self.now < end:
            number = int(self.now / self.width)
            until = min(end, (number + 1) * self.width)
            if until <= self.now:  # rounding at the edge of a bin: use the next one
                number, until = number + 1, min(end, (number + 2) * self.width)
            share = (until - self.now) / wall
            for kind, seconds in parts.items():
                _row(self.bins[kind], number)[number] += seconds * share
            self.now = until

    def lose(self, work: float) -> None:
        """Count the last `work` useful seconds as lost."""
        self.totals[USEFUL] -= work
        self.totals["lost"] += work
        # From the newest bin backwards: a failure loses the most recent work.
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
        """Return the outcome of the trial."""
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
    """Return `values`, extended to contain index `number`."""
    values.extend([0.0] * (number + 1 - len(values)))
    return values
