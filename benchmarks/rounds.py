"""Interleaved rounds: in each, every contender takes its turn, so a drift meets all alike."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass

import residents
from contenders import Contender
from crew import Crew, CrewFailed, DoesNotFit, NotInstalled
from figures import Line, mean_losses, step_times

WARM_UP = 3
"""Steps before any is timed: DDP rebuilds its buckets after the first, allocators settle."""
MEMORY_STEPS = 2

LEFT_OUT = "left out: no time was left for it"
"""The note of a contender for which the budget had no time."""

Start = Callable[[Contender], Crew]

Look = Callable[[Line, Crew], None]
"""Asks a crew that has taken its timed steps for more, and writes it into its line."""


class Budget:
    """Seconds that a run may take; a turn that would end after them is left out. `until` is when
    they are over, on the monotonic clock."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.until = time.monotonic() + seconds
        self._longest: dict[str, float] = {}

    def left(self) -> float:
        """The seconds that are left."""
        return self.until - time.monotonic()

    def allows(self, turn: str) -> bool:
        """Whether there is time for a turn of this name, which takes no longer than it did, or
        than the longest of all where it was not taken yet."""
        longest = max(self._longest.values(), default=0.0)
        return self.left() > self._longest.get(turn, longest)

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Around a turn."""
        begun = time.monotonic()
        yield
        took = time.monotonic() - begun
        self._longest[name] = max(took, self._longest.get(name, 0.0))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How often and how long: rounds, timed steps in each and those before them. `keep` holds all
    crews alive between their turns."""

    rounds: int
    steps: int
    keep: bool = False
    warm_up: int = WARM_UP
    look_after: int = 1
    """The round of a contender that is followed by the look at it. For crews that stay alive the
    last one, if the look slows down the steps after it, as a profiler may."""


def measure(
    contenders: Sequence[Contender],
    plan: Plan,
    start: Start,
    told: Callable[[str], None],
    kept: Callable[[list[Line]], None] = lambda lines: None,
    budget: Budget | None = None,
) -> list[Line]:
    """One line per contender. `told` hears of each turn before it begins, `kept` gets the lines
    after every round; turns for which the `budget` has no time are left out."""
    lines = {c.key: Line(c.key, c.label) for c in contenders}
    with ExitStack() as alive:
        turns = _kept(start, alive) if plan.keep else start
        for number in range(plan.rounds):
            take_round(number, contenders, lines, plan, turns, told, budget=budget)
            kept(list(lines.values()))
    return list(lines.values())


def take_round(
    number: int,
    contenders: Sequence[Contender],
    lines: Mapping[str, Line],
    plan: Plan,
    start: Callable[[Contender], AbstractContextManager[Crew]],
    told: Callable[[str], None],
    look: Look | None = None,
    budget: Budget | None = None,
) -> None:
    """Add one round to each contender's line. `look` comes after its timed steps of round
    `plan.look_after`, and weighs the resident sets if left out; a turn for which the `budget` has
    no time is left out."""
    budget = budget or Budget()
    for contender in _rotated(contenders, number):
        line = lines[contender.key]
        if line.note:
            continue  # one that failed once is not tried again
        if not budget.allows(contender.key):
            line.note = "" if line.rounds else LEFT_OUT
            continue
        told(f"round {number + 1} of {plan.rounds}: {contender.label}")
        before = list(line.rounds)
        with budget.turn(contender.key):
            _turn(line, contender, plan, start, look or weigh_line)
        if line.note.startswith("failed") and budget.left() <= 0:
            line.note, line.rounds = ("" if before else LEFT_OUT), before


def _turn(
    line: Line,
    contender: Contender,
    plan: Plan,
    start: Callable[[Contender], AbstractContextManager[Crew]],
    look: Look,
) -> None:
    """Add one round to a contender's line."""
    try:
        with start(contender) as crew:
            stint = crew.take(plan.warm_up + plan.steps)
            line.rounds.append(step_times(stint.ends)[plan.warm_up - 1 :])
            if peaks := [each["peak"] for each in stint.told if "peak" in each]:
                line.peak = max(peaks)
            if len(line.rounds) == 1:
                line.losses = mean_losses(stint.losses) if contender.same_work else []
            if len(line.rounds) == plan.look_after:
                look(line, crew)
    except NotInstalled as error:
        line.note = f"not installed: {error}"
    except DoesNotFit as error:
        line.note = f"does not fit: {error}"
        line.rounds.clear()
    except CrewFailed as error:
        line.note = f"failed: {error}"
        line.rounds.clear()


def weigh_line(line: Line, crew: Crew) -> None:
    """Write the resident sets into a line."""
    line.empty, line.resident, line.peak = astuple(weigh(crew))


@dataclass(frozen=True)
class Weights:
    """Resident bytes per rank: after the imports, between two steps, at the highest moment."""

    empty: float | None
    resident: float | None
    peak: float | None


def weigh(crew: Crew) -> Weights:
    """Sample the resident sets through some steps of their own: sampling disturbs the timing."""
    sums: list[int | None] = []
    between = residents.summed(crew.pids)
    crew.take(MEMORY_STEPS, lambda: sums.append(residents.summed(crew.pids)))
    known = [part for part in crew.empty if part is not None]
    return Weights(
        _per_rank(sum(known) if known else None, crew.size),
        _per_rank(between, crew.size),
        _per_rank(max((s for s in sums if s is not None), default=None), crew.size),
    )


def _per_rank(total: int | None, ranks: int) -> float | None:
    return None if total is None else total / ranks


def _rotated(contenders: Sequence[Contender], by: int) -> Iterator[Contender]:
    """Another one begins each round, so that nobody always follows the same neighbour's heat."""
    by %= len(contenders)
    yield from contenders[by:]
    yield from contenders[:by]


def _kept(start: Start, alive: ExitStack) -> Callable[[Contender], AbstractContextManager[Crew]]:
    """Like `start`, but a crew that was started stays until `alive` ends."""
    crews: dict[str, Crew] = {}

    def turn(contender: Contender) -> AbstractContextManager[Crew]:
        if contender.key not in crews:
            _refuse_unless_it_fits(crews)
            crews[contender.key] = alive.enter_context(start(contender))
        return nullcontext(crews[contender.key])

    return turn


def _refuse_unless_it_fits(crews: dict[str, Crew]) -> None:
    """Swapping or an out-of-memory kill would be the end of every figure; be told before."""
    free = residents.available()
    largest = max((residents.summed(crew.pids) or 0 for crew in crews.values()), default=0)
    if free is not None and free < 2 * largest:
        raise CrewFailed(
            f"{free / 1e9:.1f} GB are left with {len(crews)} contenders alive, and the largest of "
            f"them holds {largest / 1e9:.1f} GB; leave out --keep, or take fewer contenders."
        )
