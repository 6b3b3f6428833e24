"""Runs the script with losses, and compares the end with the undisturbed run."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from shardwise.net.restarts import SAVED
from tests.random_losses.drawing import Run, draw
from tests.random_losses.reference import STEPS, check
from tests.seeded import Command, Result
from tests.system.launcher import Launcher, Ran, script

TIMEOUT = 20.0
"""Seconds of --timeout. A stopped rank is killed after half of it."""

COMMAND = Command(
    name="random_losses",
    about="Lose ranks at random moments, and compare the end with the undisturbed run.",
    thing="loss",
    things="losses",
    fine=(
        "exact",
        "exact, joined",
        "exact, lost too late",
        "too many at once",
        "pair lost",
        "no replica left",
        "saved",
        "in the evaluation",
    ),
    wrong=("other result", "ended", "late", "hang", "left behind"),
)
_CONTINUED = re.compile(r"continues? after (\d+\.\d+) s")
_JOINED = re.compile(r"shardwise: ranks? ([\d, ]+) joined after step")
_FINISHED = re.compile(rf"rank (\d+) is (\d+) of \d+ after step {STEPS}\b")
_LOST = re.compile(r"^shardwise: rank (\d+) ended", re.MULTILINE)


class Runner:
    """Tries losses in `folder`. `environ` starts the programs warm."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = dict(environ)
        self.continued: list[float] = []
        """Seconds after which the others continued, for each loss of all runs."""

    def __call__(self, seed: int) -> Result:
        """Try the losses of `seed`."""
        run = self.draw(seed)
        folder = self._folder / f"loss-{seed}"
        folder.mkdir()
        launcher, began = self.launcher(folder), time.monotonic()
        try:
            ran = self.run(run, launcher)
            kind, words = judge(
                run, ran, folder, lost=self.lost_ranks(ran.err), is_pair=self.is_pair(run)
            )
            if alive := self.left(launcher):
                kind, words = "left behind", f"processes {alive}"
            self.continued += map(float, _CONTINUED.findall(ran.out))
            story = f"exit code {ran.code}\n{ran.out[-3000:]}{ran.err[-6000:]}"
        except AssertionError as error:  # it did not end
            kind, words, story = "hang", "", str(error)
        finally:
            launcher.close()
            shutil.rmtree(folder, ignore_errors=True)
        return Result(
            kind=kind,
            of=run.losses[0].moment,
            words=f"{run}: {words}",
            story=story,
            seconds=time.monotonic() - began,
        )

    def draw(self, seed: int) -> Run:
        """Draw the run of `seed`."""
        return draw(seed)

    def launcher(self, folder: Path) -> Launcher:
        """Return a launcher whose runs are in `folder`."""
        return Launcher(folder)

    def left(self, launcher: Launcher) -> list[str]:
        """Return the processes that a run has left behind."""
        return [str(pid) for pid in launcher.wait_until_gone(4)]

    def lost_ranks(self, err: str) -> set[int]:
        """Return the ranks that the launcher has named as lost."""
        return lost_ranks(err)

    def is_pair(self, run: Run) -> bool:
        """Return whether a rank may have been lost together with its second copy."""
        return len(run.losses) > 1

    def run(self, run: Run, launcher: Launcher) -> Ran:
        """Run the script with the losses of `run`."""
        flags = ["-n", str(run.size), "--survive", str(run.most), *run.placement]
        flags += ["--spares", str(run.spares)] if run.spares else []
        flags += ["--transport", run.transport, "--timeout", str(TIMEOUT), "--device", "cpu"]
        losses = [loss.word for loss in run.losses]
        words = ["run", *flags, script("survives"), run.loop, run.kind, "out", *losses]
        environ = self._environ | ({"TESTS_RANKS": str(run.size)} if run.spares else {})
        return launcher.finish(launcher.start(*words, env=environ), limit=150)


def lost_ranks(err: str) -> set[int]:
    """Return the ranks that the launcher has named as lost."""
    return {int(rank) for rank in _LOST.findall(err)}


def judge(run: Run, ran: Ran, folder: Path, *, lost: set[int], is_pair: bool) -> tuple[str, str]:
    """Return the kind of result, and a few words about it.

    The launcher has named the ranks in `lost`. If `is_pair` is true, a rank may have been lost
    together with its second copy.
    """
    last = ran.err.strip().splitlines()[-1][:300] if ran.err.strip() else ""
    names = [loss.name for loss in run.losses]
    # The second signal leaves no complete replica, or reaches the last rank.
    if ran.code == SAVED and (names == ["TERM", "TERM"] or (run.replica > 1 and "TERM" in names)):
        return "saved", last
    if ran.code:
        # Two ranks that were lost at nearly the same time may have been lost at once.
        if len(run.losses) > run.most and "were lost at once" in ran.err:
            return "too many at once", last
        calls = ("assert world.sum(", "seen = sum(")
        if " after an evaluation whose rows" in ran.err or any(call in ran.err for call in calls):
            return "in the evaluation", last
        if run.replica > 1 and len(run.losses) > 1 and "no complete group of" in ran.err:
            return "no replica left", last
        pair = run.zero and is_pair and "held the second copy of" in ran.err
        return ("pair lost" if pair else "ended"), last
    joined = {int(rank) for ranks in _JOINED.findall(ran.out) for rank in ranks.split(", ")}
    # A lost rank may have joined again as a spare, and a spare may be lost after it has joined.
    places = {int(place): int(rank) for rank, place in _FINISHED.findall(ran.out)}
    left = [places[place] for place in sorted(places)]
    joined |= {rank for rank in left if rank >= run.size}  # a lost main rank has not printed it
    missing = set(range(run.size)) - lost - set(left)
    if missing or not left or sorted(places) != list(range(len(left))):
        return "ended", f"ranks {sorted(missing)} did not finish: {last}"
    if f"of {len(left)} after step {STEPS}" not in ran.out:
        return "ended", f"{len(left)} ranks finished, but had others: {last}"
    try:
        check(folder, run.kind, left, joined=joined)
    except AssertionError as error:
        return "other result", str(error)[:300]
    waits = [float(seconds) for seconds in _CONTINUED.findall(ran.out)]
    is_stopped = any(loss.name in ("STOP", "CUT") for loss in run.losses)
    if waits and max(waits) > TIMEOUT / 2 and not is_stopped:
        return "late", f"the others continued after {max(waits)} s"
    if "shardwise: lost rank" not in ran.out:
        return "exact, lost too late", ""
    return ("exact, joined" if joined else "exact"), ""
