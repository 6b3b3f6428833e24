"""If a rank is killed or stopped in any phase of training, all other ranks name it in time.

Each case runs once. With TEST_REPEATS=100 in the environment it runs 100 times, and ranks are
stopped in every phase.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.distributed.faults import PHASES, VICTIM, Case, Outcome, serve
from tests.distributed.group import FORKED, session_environment

REPEATS = int(os.environ.get("TEST_REPEATS", "1"))
TRANSPORTS: dict[str, dict[str, Any]] = {
    "shared": {"transport": "shared"},
    "gloo": {"transport": "gloo"},
    "hosts": {"transport": "auto", "hosts": (0, 0, 1, 1), "size": 4},
}
PAIR = {"transport": "gloo", "size": 2}
"""Two ranks, so that a survivor cannot fail because of another survivor."""

PATIENT, IMPATIENT = 60.0, 4.0
"""Timeout in seconds for killed ranks, which are detected earlier, and for stopped ranks."""

AT_ONCE = 5.0
"""Limit in seconds for immediate detection, on a machine that may be busy."""

KILLS = [(transport, phase) for transport in TRANSPORTS for phase in [*PHASES, "anywhere"]]
FEW_KILLS = [
    *(("shared", phase) for phase in [*PHASES, "anywhere"]),
    ("gloo", "gather"),  # the others: one of two, below
    ("hosts", "backward"),
]

STOPS = [(transport, phase) for transport in TRANSPORTS for phase in PHASES]
FEW_STOPS = [("gloo", "backward"), ("hosts", "step"), ("shared", "between")]
"""Stops inside a collective of shared memory are tested in test_shared.py."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops and kills processes")


TOGETHER = 4
"""Number of cases with stopped ranks, which all wait for the timeout, that run in parallel."""


class Faults:
    """`faults(case)` returns the outcomes of its ranks."""

    def __init__(self) -> None:
        self._connection, theirs = FORKED.Pipe()
        self._process = FORKED.Process(target=serve, args=(theirs, session_environment()))
        self._process.start()
        theirs.close()

    def __call__(self, case: Case) -> list[Outcome]:
        return self.at_once([case])[0]

    def at_once(self, cases: Sequence[Case]) -> list[list[Outcome]]:
        """Return the outcomes of several cases that run in parallel."""
        self._connection.send(list(cases))
        return self._connection.recv()

    def close(self) -> None:
        """Stop the process, whose ranks have already exited."""
        self._connection.close()
        self._process.join()
        self._process.close()


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    process = Faults()
    yield process
    process.close()


@pytest.fixture(scope="module")
def stopped(faults: Faults) -> Callable[[Case], list[Outcome]]:
    """`stopped(case)` returns the outcomes of one case in `_stops()`."""
    cases, ends = _stops(), []

    def outcomes(case: Case) -> list[Outcome]:
        while len(ends) <= cases.index(case):
            ends.extend(faults.at_once(cases[len(ends) : len(ends) + TOGETHER]))
        return ends[cases.index(case)]

    return outcomes


def _row(phase: str, repeat: int) -> int:
    """Return the ZeRO stage: 3 for gathers, which need sharded parameters, else each in turn."""
    return 3 if phase == "gather" else (repeat + [*PHASES, "anywhere"].index(phase)) % 4


def _check(outcomes: list[Outcome], kind: str, seconds: float) -> None:
    for outcome in outcomes:
        assert outcome.kind == kind, outcome
        # Over Gloo, a rank that exited because of the victim may be named next to it.
        assert re.search(rf"ranks? (\d, )*{VICTIM}\b", outcome.message), outcome
        assert outcome.seconds < seconds, outcome
        assert outcome.code == 3, outcome


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize(
    ("transport", "phase"),
    [
        pytest.param(*case, marks=() if REPEATS > 1 or case in FEW_KILLS else pytest.mark.full)
        for case in KILLS
    ],
)
def test_a_rank_that_is_killed_is_named_at_once(faults, transport, phase, repeat):
    case = Case(
        phase,
        signal.SIGKILL,
        zero=_row(phase, repeat),
        timeout=PATIENT,
        seed=repeat,
        **TRANSPORTS[transport],
    )
    _check(faults(case), "PeerLost", AT_ONCE)


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("phase", ["backward", "between", "anywhere"])
def test_one_of_two_that_is_killed_is_named_at_once(faults, phase, repeat):
    case = Case(phase, signal.SIGKILL, zero=0, timeout=PATIENT, seed=repeat, **PAIR)
    _check(faults(case), "PeerLost", AT_ONCE)


STOPS_OF_TWO = ["backward", "between"] if REPEATS > 1 else ["backward"]


def _stop_of_two(phase: str, repeat: int) -> Case:
    return Case(phase, signal.SIGSTOP, zero=0, timeout=IMPATIENT, seed=repeat, **PAIR)


def _stop(transport: str, phase: str, repeat: int) -> Case:
    return Case(
        phase,
        signal.SIGSTOP,
        zero=_row(phase, repeat),
        timeout=IMPATIENT,
        seed=repeat,
        **TRANSPORTS[transport],
    )


def _stops() -> list[Case]:
    """Return the cases with stopped ranks, in the order of their tests."""
    of_two = [_stop_of_two(phase, repeat) for phase in STOPS_OF_TWO for repeat in range(REPEATS)]
    stops = STOPS if REPEATS > 1 else FEW_STOPS
    return of_two + [_stop(*stop, repeat) for stop in stops for repeat in range(REPEATS)]


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("phase", STOPS_OF_TWO)
def test_one_of_two_that_is_stopped_is_named_in_time(stopped, phase, repeat):
    outcomes = stopped(_stop_of_two(phase, repeat))
    _check(outcomes, "CollectiveError", IMPATIENT + AT_ONCE)
    for outcome in outcomes:
        assert f"Rank {VICTIM} is stopped (T)." in outcome.message, outcome


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize(("transport", "phase"), STOPS if REPEATS > 1 else FEW_STOPS)
def test_a_rank_that_is_stopped_is_named_in_time(stopped, transport, phase, repeat):
    outcomes = stopped(_stop(transport, phase, repeat))
    _check(outcomes, "CollectiveError", IMPATIENT + AT_ONCE)
    for outcome in outcomes:  # whomever it waited for itself
        assert f"Rank {VICTIM} is stopped (T)." in outcome.message, outcome
