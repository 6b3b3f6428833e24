"""Interleaved rounds: every contender takes its turn in each, so a drift affects all equally."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import residents
from contenders import Contender
from crew import Crew, CrewFailed, DoesNotFit, NotInstalled
from figures import Line, add_device_figures, mean_losses, step_times

WARM_UP = 3
"""Steps before any is timed: DDP rebuilds its buckets after the first, allocators settle."""

SAMPLED = 2
"""Steps for samples of the resident set. They are not timed, because sampling disturbs them."""

TRACED = 2
"""Steps that are profiled on a GPU."""

LEFT_OUT = "left out: no time was left for it"
"""The note of a contender if the budget had no time for it."""

Start = Callable[[Contender], AbstractContextManager[Crew]]

Look = Callable[[Line, Crew], None]
"""Measures more of a crew that has taken its timed steps, and writes it into its line."""


class Budget:
    """Seconds that a run may take; a turn that would end after them is left out.

    `until` is their end on the monotonic clock.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.until = time.monotonic() + seconds
        self._longest: dict[str, float] = {}

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.monotonic()

    def allows(self, turn: str) -> bool:
        """Return whether there is time for a turn of this name.

        It is expected to take as long as it did, or as the longest of all if it is the first.
        """
        longest = max(self._longest.values(), default=0.0)
        return self.left() > self._longest.get(turn, longest)

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Measure the duration of a turn."""
        begun = time.monotonic()
        yield
        self._longest[name] = max(time.monotonic() - begun, self._longest.get(name, 0.0))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Number of rounds, of timed steps in each, and of steps before those.

    `keep` holds all crews alive between their turns. The look at a contender follows its round
    `look_after`: for crews that stay alive the last one, because a profiler may slow down all
    steps after it.
    """

    rounds: int
    steps: int
    keep: bool = False
    warm_up: int = WARM_UP
    look_after: int = 1


def measure(
    contenders: Sequence[Contender],
    plan: Plan,
    start: Start,
    told: Callable[[str], None],
    kept: Callable[[list[Line]], None] = lambda lines: None,
    budget: Budget | None = None,
    look: Look | None = None,
) -> list[Line]:
    """Take all rounds; return one line per contender.

    Calls `told` before each turn and `kept` after every round, so that a run that is killed
    leaves its figures.
    """
    lines = {c.key: Line(c.key, c.label) for c in contenders}
    with ExitStack() as alive:
        turns = _kept(start, alive) if plan.keep else start
        for number in range(plan.rounds):
            take_round(number, contenders, lines, plan, turns, told, look, budget)
            kept(list(lines.values()))
    return list(lines.values())


def take_round(
    number: int,
    contenders: Sequence[Contender],
    lines: Mapping[str, Line],
    plan: Plan,
    start: Start,
    told: Callable[[str], None],
    look: Look | None = None,
    budget: Budget | None = None,
) -> None:
    """Add one round to each contender's line; a turn without time in the `budget` is left out.

    `look` weighs the resident sets by default.
    """
    budget = budget or Budget()
    # Another one begins each round, so that nobody always follows the same neighbour's heat.
    by = number % len(contenders)
    for contender in [*contenders[by:], *contenders[:by]]:
        line = lines[contender.key]
        if line.note:
            continue  # a contender that failed once is not tried again
        if not budget.allows(contender.key):
            line.note = "" if line.rounds else LEFT_OUT
            continue
        told(f"round {number + 1} of {plan.rounds}: {contender.label}")
        before = list(line.rounds)
        with budget.turn(contender.key):
            _turn(line, contender, plan, start, look or weigh)
        if line.note.startswith("failed") and budget.left() <= 0:
            # The end of the budget cut the turn off: earlier rounds count, and it is no failure.
            line.note, line.rounds = ("" if before else LEFT_OUT), before


def _turn(line: Line, contender: Contender, plan: Plan, start: Start, look: Look) -> None:
    """Add one round to a contender's line, or a note."""
    try:
        with start(contender) as crew:
            stint = crew.take(plan.warm_up + plan.steps)
            # There is one time less than steps: the first step only starts the clock.
            line.rounds.append(step_times(stint.ends)[plan.warm_up - 1 :])
            if peaks := [each["peak"] for each in stint.told if "peak" in each]:
                line.peak = max(peaks)
            if len(line.rounds) == 1:
                # Fresh ranks repeat the same losses in later rounds; kept ones train on.
                line.losses = mean_losses(stint.losses) if contender.same_work else []
            if len(line.rounds) == plan.look_after:
                look(line, crew)
    except NotInstalled as error:
        line.note = f"not installed: {error}"
    except DoesNotFit as error:
        line.note = f"does not fit: {error}"
        # Fewer rounds than the others have would be compared with other minutes of the machine.
        line.rounds.clear()
    except CrewFailed as error:
        line.note = f"failed: {error}"
        line.rounds.clear()


def weigh(line: Line, crew: Crew) -> None:
    """Write the resident bytes per rank into a line."""
    sums: list[int | None] = []
    between = residents.summed(crew.pids)
    crew.take(SAMPLED, lambda: sums.append(residents.summed(crew.pids)))
    highest = max((each for each in sums if each is not None), default=None)
    empty = None if None in crew.empty else sum(crew.empty)
    line.empty, line.resident, line.peak = (
        None if total is None else total / crew.size for total in (empty, between, highest)
    )


def look_at_cpu(line: Line, crew: Crew) -> None:
    """Do nothing: a profile counts nothing on a CPU."""


def look_at_gpu(line: Line, crew: Crew) -> None:
    """Profile some more steps, and write the figures of the GPU into the line."""
    try:
        stint = crew.take(TRACED, traced=True)
    except CrewFailed as error:  # the times stay: some systems let nobody profile
        line.device["not_profiled"] = str(error)
    else:
        add_device_figures(line, TRACED, stint.told, stint.seen)


def _kept(start: Start, alive: ExitStack) -> Start:
    """Return a `start` whose crews stay alive until `alive` ends."""
    crews: dict[str, Crew] = {}

    def turn(contender: Contender) -> AbstractContextManager[Crew]:
        if contender.key not in crews:
            _refuse_unless_it_fits(crews)
            crews[contender.key] = alive.enter_context(start(contender))
        return nullcontext(crews[contender.key])

    return turn


def _refuse_unless_it_fits(crews: Mapping[str, Crew]) -> None:
    """Raise CrewFailed before the machine swaps, or kills a process, and so spoils every figure."""
    free = residents.available()
    largest = max((residents.summed(crew.pids) or 0 for crew in crews.values()), default=0)
    if free is not None and free < 2 * largest:
        raise CrewFailed(
            f"{free / 1e9:.1f} GB are left with {len(crews)} contenders alive, and the largest of "
            f"them holds {largest / 1e9:.1f} GB; leave out --keep, or take fewer contenders."
        )
