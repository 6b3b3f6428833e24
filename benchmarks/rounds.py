"""Interleaved rounds: in each, every contender takes its turn, so a drift meets all alike."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import astuple, dataclass

import residents
from contenders import Contender
from crew import Crew, CrewFailed, NotInstalled
from figures import Line, mean_losses, step_times

WARM_UP = 3
"""Steps before any is timed: DDP rebuilds its buckets after the first, allocators settle."""
MEMORY_STEPS = 2

Start = Callable[[Contender], Crew]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How often and how long. `keep` holds all crews alive between their turns."""

    rounds: int
    steps: int
    keep: bool = False


def measure(
    contenders: Sequence[Contender],
    plan: Plan,
    start: Start,
    told: Callable[[str], None],
    kept: Callable[[list[Line]], None] = lambda lines: None,
) -> list[Line]:
    """One line per contender. `told` hears of each turn before it begins, `kept` gets the lines
    after every round."""
    lines = {c.key: Line(c.key, c.label) for c in contenders}
    with ExitStack() as alive:
        turns = _kept(start, alive) if plan.keep else start
        for number in range(plan.rounds):
            for contender in _rotated(contenders, number):
                told(f"round {number + 1} of {plan.rounds}: {contender.label}")
                _turn(lines[contender.key], contender, plan.steps, turns)
            kept(list(lines.values()))
    return list(lines.values())


def _turn(
    line: Line,
    contender: Contender,
    steps: int,
    start: Callable[[Contender], AbstractContextManager[Crew]],
) -> None:
    """Add one round to a contender's line; one that failed once is not tried again."""
    if line.note:
        return
    try:
        with start(contender) as crew:
            stint = crew.take(WARM_UP + steps)
            line.rounds.append(step_times(stint.ends)[WARM_UP - 1 :])
            if len(line.rounds) == 1:
                line.losses = mean_losses(stint.losses) if contender.same_work else []
                weights = weigh(crew)
                line.empty, line.resident, line.peak = astuple(weights)
    except NotInstalled as error:
        line.note = f"not installed: {error}"
    except CrewFailed as error:
        line.note = f"failed: {error}"
        line.rounds.clear()


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
