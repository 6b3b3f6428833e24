"""Records how far a rank has come, in numbers of a file that it and its launcher map.

    saves_when_asked | ended | resumes | steps, kept of engine 0 | steps, kept of engine 1 | ...

Recording one costs a store into memory, so a rank records every step, and the record is there
however the rank ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from shardwise.errors import LaunchError
from shardwise.net.environment import RANK_VARIABLE, REPORTS_VARIABLE

ENGINES = 60
"""Of so many engines of a process steps are recorded; not of those made later."""

_living: WeakSet[ProgressWriter] = WeakSet()

_HEEDS, _ENDED, _RESUMES, _FIRST = range(4)
_NUMBERS = _FIRST + 2 * ENGINES


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress that a rank has recorded, of the engine that has most to lose.

    `step` is how many steps it made, `kept` how many of them a restart has not to make again.
    `saves_when_asked`: asked to end, it saves first; `ended`: it has done so. `resumes`: it asks
    for the newest checkpoint when it starts.
    """

    step: int
    kept: int
    saves_when_asked: bool = False
    ended: bool = False
    resumes: bool = False


class ProgressWriter:
    """The rank's side; without a launcher it records into memory of its own."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._launcher = os.getppid() if REPORTS_VARIABLE in environ else None
        if REPORTS_VARIABLE not in environ:
            self._numbers = memoryview(bytearray(8 * _NUMBERS)).cast("q")
            return
        path = _path(Path(environ[REPORTS_VARIABLE]), int(environ[RANK_VARIABLE]))
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Written, since a store into a mapped hole is a SIGBUS where the disk is full.
                os.pwrite(fd, bytes(8 * _NUMBERS), 0)
                self._numbers = memoryview(mmap.mmap(fd, 8 * _NUMBERS)).cast("q")
            finally:
                os.close(fd)
        except OSError as error:
            raise LaunchError(
                f"This rank cannot record its progress for its launcher in {path.parent}: "
                f"{error.strerror}. Make room there, in bytes and in files, or name another place "
                "for temporary files with TMPDIR=FOLDER."
            ) from None
        _living.add(self)

    @property
    def is_orphan(self) -> bool:
        """Whether the launcher is gone."""
        return self._launcher is not None and os.getppid() != self._launcher

    def saves_when_asked(self, *, saves: bool) -> None:
        """From now on this rank saves before it ends, when asked to end; or no longer."""
        self._numbers[_HEEDS] = saves

    def ended(self) -> None:
        """It has saved, and ends because it was asked to."""
        self._numbers[_ENDED] = 1

    def resumes(self) -> None:
        """It goes on from the newest checkpoint when it is started again."""
        self._numbers[_RESUMES] = 1

    def stepped(self, engine: int, steps: int) -> None:
        """Engine number `engine` has made `steps` steps."""
        if engine < ENGINES:
            self._numbers[_FIRST + 2 * engine] = steps

    def kept(self, engine: int, steps: int) -> None:
        """Of those, `steps` are in a complete checkpoint."""
        if engine < ENGINES:
            self._numbers[_FIRST + 2 * engine + 1] = steps


def read(folder: Path, rank: int) -> Progress | None:
    """Read the progress of `rank` in `folder`; None where it never began to record."""
    try:
        data = _path(folder, rank).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < 8 * _NUMBERS:
        return None
    numbers = memoryview(data).cast("q")
    pairs = list(zip(numbers[_FIRST::2], numbers[_FIRST + 1 :: 2], strict=True))
    step, kept = max(pairs, key=lambda pair: (pair[0] - pair[1], pair[0]))
    return Progress(
        step=step,
        kept=kept,
        saves_when_asked=bool(numbers[_HEEDS]),
        ended=bool(numbers[_ENDED]),
        resumes=bool(numbers[_RESUMES]),
    )


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.progress"


# -- ranks that have ended before the others met ----------------------------------------------


def mark_ended_early(folder: Path, rank: int) -> None:
    """Let the ranks of this host, whose error files lie in `folder`, know that `rank`, of any host,
    ended well.

    For a rank of which no process is left: what goes on in the background may still come.
    """
    with suppress(OSError):  # a full disk: they wait until --timeout then
        _ended_mark(folder, rank).touch()


def ended_early(ranks: Iterable[int]) -> list[int]:
    """Those of `ranks` that have ended with code 0, as far as this process's launcher knows."""
    folder = os.environ.get(REPORTS_VARIABLE)
    return [] if folder is None else [r for r in ranks if _ended_mark(Path(folder), r).exists()]


def _ended_mark(folder: Path, rank: int) -> Path:
    return folder / f"ended-{rank}"


def _in_forked_child() -> None:
    """What a forked child does is no progress of the rank."""
    for writer in list(_living):
        writer._numbers = memoryview(bytearray(8 * _NUMBERS)).cast("q")


os.register_at_fork(after_in_child=_in_forked_child)
