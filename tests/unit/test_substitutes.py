"""Workers that are added to a run with `--survive`, or started again, without processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwise.engine.spares import RETRY, SpareReturns
from shardwise.errors import CheckpointNotWritten, LaunchError, UsageError
from shardwise.launch.failure_report import ExitStatus
from shardwise.launch.local_workers import RankExit
from shardwise.launch.supervisor import EARLY, MOST_EARLY, Supervisor
from shardwise.net.progress import Progress
from shardwise.net.restarts import SAVED


class Substitutes:
    """Starts spares with the ranks below `limit`. All except those in `waiting` have joined."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.started: list[int] = []
        self.lost: list[int] = []
        self.met = {0, 1, 2}
        self.waiting: set[int] = set()
        self.cleared: list[int] = []

    def mark_lost(self, ranks: Sequence[int]) -> None:
        self.lost += ranks

    def clear_away(self, rank: int) -> None:
        self.cleared.append(rank)

    def start_spare(self, rank: int, *, grows: bool = False) -> None:
        if rank >= self.limit:
            raise LaunchError(f"Rank {rank} cannot be started.")
        self.started.append(rank)

    def has_joined(self, rank: int) -> bool:
        return rank not in self.waiting

    def have_met(self, ranks: Collection[int]) -> bool:
        return self.met.issuperset(ranks)


class Run:
    """A supervisor of three ranks, one of them a spare, without processes."""

    def __init__(self, signals: Any, hosts: Mapping[int, str] | None = None) -> None:
        self.said: list[str] = []
        output = SimpleNamespace(close=lambda: None, tail=SimpleNamespace(text=str))
        self.supervisor = Supervisor(
            cast(Any, SimpleNamespace(say=self.said.append, broken=False)),
            cast(Any, [output] * 3),
            signals,
            grace=1,
            hosts=hosts,
            survives=True,
            spares=1,
            output_of=lambda rank: cast(Any, output),
        )
        self.substitutes = self.supervisor.substitutes = Substitutes(5)

    def kill(self, rank: int, joined: int | None, step: int | None) -> None:
        """Report that `rank` was killed after `step`, or before it recorded any progress."""
        found = None if step is None else Progress(step=step, kept=0, joined=joined)
        end = ExitStatus(rank=rank, code=-signal.SIGKILL, time=0)
        exit_ = RankExit(end=end, how="SIGKILL", report=None, progress=found, alone=True)
        self.supervisor.left(exit_)

    def finish(self, rank: int) -> None:
        """Report that `rank` has finished."""
        end = ExitStatus(rank=rank, code=0, time=0)
        progress = Progress(step=9, kept=0, ended=True)
        exit_ = RankExit(end=end, how="", report=None, progress=progress, alone=True)
        self.supervisor.left(exit_)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Return a Run, on a single host or on the hosts in the fixture's parameter."""
    reads, writes = os.pipe()
    found = Run(SimpleNamespace(fd=reads), getattr(request, "param", None))
    with closing(found.supervisor):
        yield found
    os.close(reads)
    os.close(writes)


THREE_HOSTS = {0: "h0", 1: "h1", 2: "h2"}


def test_workers_that_were_started_are_named_if_another_cannot_be_started(run: Run) -> None:
    with pytest.raises(LaunchError, match=r"2 of 3 workers were started \(ranks 3, 4\)\. Rank"):
        run.supervisor.add_workers(3)
    assert run.said == ["shardwise: started ranks 3, 4\n"]
    run.substitutes.limit = 6
    assert run.supervisor.add_workers(1) == [5]


def test_an_error_of_the_first_worker_leaves_nothing_behind(run: Run) -> None:
    run.substitutes.limit = 3
    with pytest.raises(LaunchError, match=r"^Rank 3 cannot be started\.$"):
        run.supervisor.add_workers(2)
    assert not run.said
    run.substitutes.limit = 4
    assert run.supervisor.add_workers(1) == [3]


def test_a_rank_that_always_ends_early_is_not_started_again(run: Run) -> None:
    run.kill(1, joined=None, step=2)  # it did not start as a spare
    for _ in range(MOST_EARLY - 1):
        run.kill(1, joined=7, step=0)  # before its first step
    assert run.substitutes.started == [1] * MOST_EARLY
    run.kill(1, joined=20, step=20 + EARLY)  # late, so the count begins again
    for _ in range(MOST_EARLY):
        run.kill(1, joined=50, step=50 + EARLY - 1)
    assert run.substitutes.started == [1] * (2 * MOST_EARLY)
    assert run.said[-1] == (
        "shardwise: rank 1 is not started again, because it has ended 3 times in succession within "
        "10 steps after it joined the others (--spares).\n"
    )
    run.kill(2, joined=60, step=61)
    assert run.substitutes.started[-1] == 2


def test_a_run_that_saves_after_a_loss_ends_as_saved(run: Run) -> None:
    run.substitutes.limit = 0
    run.kill(1, joined=None, step=2)
    for rank in (0, 2):
        end = ExitStatus(rank=rank, code=SAVED, time=1)
        progress = Progress(step=6, kept=6, ended=True)
        exit_ = RankExit(end=end, how="", report=None, progress=progress, alone=True)
        run.supervisor.left(exit_)
    assert run.supervisor._conclude().code == SAVED


def test_the_others_do_not_wait_for_a_rank_that_was_killed_before_it_joined(run: Run) -> None:
    run.kill(1, joined=None, step=None)
    assert run.said == []
    assert run.substitutes.lost == run.substitutes.started == []


def test_the_others_continue_once_a_lost_host_has_ended_its_ranks(run: Run) -> None:
    """Before that, a rank that is cut off could still write to a checkpoint."""
    run.supervisor.lost([1], "h2 (rank 1) is lost: no sign of life.", 0.1)
    assert run.said == [
        "shardwise: h2 (rank 1) is lost: no sign of life. The others continue without it "
        "(--survive).\n"
    ]
    run.supervisor.turn(0)
    assert run.substitutes.lost == []
    until = time.monotonic() + 10
    while not run.substitutes.lost and time.monotonic() < until:
        run.supervisor.turn(0.1)
    assert run.substitutes.lost == [1]


def lose_before_meeting(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lose rank 1's host while rank 2 waits in `sw.init`. Return the schedules of signals."""
    schedules: list[Any] = []
    monkeypatch.setattr(run.supervisor._plan, "make", schedules.append)
    run.substitutes.met = {0}
    run.supervisor.lost([1], "h2 (rank 1) is lost.", 0.1)
    run.supervisor.turn(0)
    assert run.said == schedules == []
    return schedules


def test_a_host_that_is_lost_before_the_ranks_have_met_ends_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks would wait in sw.init until --timeout."""
    schedules = lose_before_meeting(run, monkeypatch)
    time.sleep(0.1)
    run.supervisor.turn(0)
    assert schedules == [[(0, signal.SIGTERM), (1, signal.SIGKILL)]]
    assert run.substitutes.lost == run.said == []
    assert "h2 (rank 1) is lost." in run.supervisor._conclude().words


def test_the_report_that_the_ranks_have_met_may_come_after_a_loss(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = lose_before_meeting(run, monkeypatch)
    run.substitutes.met = {0, 2}
    run.supervisor.turn(0)
    assert run.said == [
        "shardwise: h2 (rank 1) is lost. The others continue without it (--survive).\n"
    ]
    assert run.substitutes.lost == []
    time.sleep(0.1)
    run.supervisor.turn(0)
    assert run.substitutes.lost == [1]
    assert schedules == []


def test_the_loss_of_the_last_ranks_host_ends_the_run(run: Run) -> None:
    run.supervisor.lost([0, 1, 2], "h1 (ranks 0-2) is lost.", 0.1)
    assert run.said == []


@pytest.mark.parametrize("run", [THREE_HOSTS], indirect=True)
@pytest.mark.parametrize(
    ("first", "fails"), [("lost", True), ("killed", True), ("finished", False)]
)
def test_a_spare_that_no_rank_needs_is_killed(
    run: Run, monkeypatch: pytest.MonkeyPatch, first: str, *, fails: bool
) -> None:
    """Rank 2 is the spare. Rank 0 ends as `first` says, and then the host of rank 1 is lost."""
    schedules: list[Any] = []
    monkeypatch.setattr(run.supervisor._plan, "make", schedules.append)
    run.substitutes.waiting = {2}
    if first == "lost":
        run.supervisor.lost([0], "h0 (rank 0) is lost.")
    elif first == "killed":
        run.kill(0, joined=None, step=3)
    else:
        run.finish(0)
    assert 2 not in run.substitutes.cleared
    run.supervisor.lost([1], "h1 (rank 1) is lost.")
    assert run.substitutes.cleared[-1] == 2
    assert bool(schedules) == fails
    run.supervisor.turn(0)
    run.kill(2, joined=None, step=None)
    assert not run.supervisor._running
    assert bool(run.supervisor._conclude().code) == fails
    assert not any("rank 2" in line for line in run.said)


@pytest.mark.parametrize("run", [THREE_HOSTS], indirect=True)
def test_a_lost_rank_is_not_started_again_on_several_hosts(run: Run) -> None:
    run.kill(1, joined=None, step=2)
    assert run.substitutes.started == []
    assert len(run.said) == 1
    assert "rank 1" in run.said[0]


class Saves:
    """Saves checkpoints for spares, or fails with `error`."""

    def __init__(self, error: CheckpointNotWritten | None = None) -> None:
        self.error, self.count = error, 0
        self.untracked: list[str] = []
        self.tracked = SimpleNamespace(
            describe_untracked=lambda optimizers, streams: iter(self.untracked)
        )

    def save_for_return(self) -> dict[str, str]:
        self.count += 1
        if self.error is not None:
            raise self.error
        return {"path": "saved/step-7"}


class Member:
    """A rank that admits spares after step 7, without other ranks."""

    def __init__(self, saves: Saves, steps_made: int = 7) -> None:
        self.said: list[str] = []
        self.offers: list[Any] = []
        world = SimpleNamespace(
            preemption=SimpleNamespace(agreed=False),
            current_batch=SimpleNamespace(training_streams=list),
            print=lambda line, file: self.said.append(line),
            say_once=self.said.append,
            steps_made=steps_made,
        )
        spec = SimpleNamespace(settings=SimpleNamespace(spares=1), optimizers=[])
        self.engine = SimpleNamespace(spec=spec, world=world, steps=7, is_between_steps=True)
        group = SimpleNamespace(
            is_waiting=False,
            joins_due=True,
            generation=2,
            steadily=lambda work: work(),
            invite=self.offers.append,
            dismiss=lambda: None,
        )
        self.survival = SimpleNamespace(group=group, admit=lambda stream: None)
        returns = SpareReturns(cast(Any, self.engine), cast(Any, self.survival), cast(Any, saves))
        returns.are_expected()


def test_a_failed_save_for_spares_is_not_repeated_in_each_step() -> None:
    saves = Saves(CheckpointNotWritten("The disk is full."))
    member = Member(saves)
    for member.engine.steps in range(7, 7 + RETRY + 1):
        member.survival.admit(None)
    assert saves.count == 2
    line = "shardwise: The disk is full. Spares wait for 50 more steps, because this save failed."
    assert member.said == [line] * 2


def test_members_make_the_same_offer_even_if_one_has_joined_later() -> None:
    first, later = Member(Saves()), Member(Saves(), steps_made=2)
    for member in (first, later):
        member.survival.admit(None)
    assert first.offers == later.offers
    assert len(first.offers) == 1


def test_an_untracked_loader_is_refused_only_before_the_first_step() -> None:
    saves = Saves()
    member = Member(saves)
    member.survival.admit(None)
    saves.untracked = ["a Loader is not tracked."]
    member.survival.admit(None)
    assert member.said == ["no worker can join, because a Loader is not tracked."]
    assert saves.count == 1
    with pytest.raises(UsageError, match=r"must load the whole state .*, but a Loader is not"):
        Member(saves).survival.admit(None)
