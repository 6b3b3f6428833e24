"""Kills of one or all ranks at a random moment around a save, and the result of the next run."""

import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.checkpoint_damage.training import built
from tests.distributed.group import Group, RankFailed, RankLate
from tests.seeded import Command, Result

STEPS = 4
LIMIT = 60.0
"""Maximum seconds of a run."""

MOST = 0.02
"""Maximum seconds between the start of a save and a kill. Most saves take less."""

SIZE = 2
_WHOLE = re.compile(r"step-\d+")

COMMAND = Command(
    name="save_kills",
    about="Kill ranks at random moments around a save, and check the next run.",
    thing="kill",
    things="kills",
    fine=("same bits", "same bits, too late to kill"),
    wrong=("other bits", "lost more", "left behind", "refused", "hang"),
)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The ranks in `victims` die `delay` seconds after they started to save `step`."""

    victims: tuple[int, ...]
    step: int
    delay: float
    row: int
    split: float
    keep: int

    def __str__(self) -> str:
        who = "all ranks" if len(self.victims) == SIZE else f"rank {self.victims[0]}"
        return (
            f"{who} {self.delay * 1e3:.2f} ms into the save of step {self.step} (row {self.row}, "
            f"files of {self.split} GB, keep={self.keep})"
        )


def draw(seed: int) -> Kill:
    """Return the kill of `seed`."""
    rng = Random(seed)
    return Kill(
        victims=rng.choice([(0,), (1,), (0, 1)]),
        step=rng.randrange(1, STEPS + 1),
        delay=max(1e-5, rng.random() ** 2 * MOST),
        row=rng.randrange(4),
        split=rng.choice([5.0, 2e-6]),
        keep=rng.choice([1, 2, 3]),
    )


def goes(world: Any, folder: Path, kill: Kill, *, lives: bool) -> tuple[int, str]:
    """Train to the end from the checkpoints in `folder`; return the first step and the final
    digest."""
    made = built(world, kill.row, 5)
    made.engine.resume(folder)
    began = made.engine.steps
    while made.engine.steps < STEPS:
        made.step(world)
        dies = not lives and world.rank in kill.victims and made.engine.steps == kill.step
        if dies:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, kill.delay)
        made.engine.save(folder, split_gb=kill.split, keep=kill.keep)
        if dies:
            signal.setitimer(signal.ITIMER_REAL, 0)
    digest = made.digest()
    made.engine.close()
    world.barrier()
    return began, digest


class Runner:
    """Tries kills in `folder`, on ranks of `group`."""

    def __init__(self, group: Group, folder: Path) -> None:
        self._group, self._folder = group, folder
        self._wanted: dict[int, str] = {}

    def __call__(self, seed: int) -> Result:
        """Try the kill of `seed`."""
        kill, folder = draw(seed), self._folder / f"kill-{seed}"
        began = time.monotonic()
        try:
            kind, words, story = self._tried(kill, folder)
        except RankLate as error:
            kind, words, story = "hang", "", str(error)
        except RankFailed as error:
            kind, words, story = "refused", str(error).strip().splitlines()[-1], str(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Result(
            kind=kind,
            of="all ranks" if len(kill.victims) == SIZE else "one rank",
            words=f"{kill}: {words}",
            story=story,
            seconds=time.monotonic() - began,
        )

    def _tried(self, kill: Kill, folder: Path) -> tuple[str, str, str]:
        wanted = self._undisturbed(kill)
        outcomes = self._group.outcomes(_dies, folder, kill, limit=LIMIT)
        late = all(each.error is None for each in outcomes)
        seen = sorted(each.name for each in folder.iterdir()) if folder.exists() else []
        went = self._group(_lives, folder, kill, limit=LIMIT)
        left = [each.name for each in folder.iterdir() if not _WHOLE.fullmatch(each.name)]
        kind, words = judged(kill, went, wanted, left, late=late)
        return kind, words, f"after the kill: {seen}"

    def _undisturbed(self, kill: Kill) -> str:
        """Return the final digest in this row of a run without a kill."""
        if kill.row not in self._wanted:
            folder = self._folder / f"undisturbed-{kill.row}"
            self._wanted[kill.row] = self._group(_lives, folder, kill, limit=LIMIT)[0][1]
        return self._wanted[kill.row]


def _dies(world: Any, folder: Path, kill: Kill) -> tuple[int, str]:
    return goes(world, folder, kill, lives=False)


def _lives(world: Any, folder: Path, kill: Kill) -> tuple[int, str]:
    return goes(world, folder, kill, lives=True)


def judged(
    kill: Kill, went: list[tuple[int, str]], wanted: str, left: list[str], *, late: bool
) -> tuple[str, str]:
    """Return kind and description of the result, if the next run `went` from a step to an end."""
    began = went[0][0]
    if any(digest != wanted or step != began for step, digest in went):
        return "other bits", f"from step {began}"
    if began < kill.step - 1:
        return "lost more", f"from step {began}"
    if left:
        return "left behind", ", ".join(left)
    return ("same bits, too late to kill" if late else "same bits"), f"from step {began}"
