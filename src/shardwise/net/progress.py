"""Records a rank's progress in a memory-mapped file that its launcher reads.

    saves_when_asked | ended | resumes | joined | stop limit | time of the checkpoint
    steps, kept of engine 0 | ... | path of the checkpoint

Each entry is a 64-bit integer, except the path. Recording a step is a
single store to memory, so it costs almost nothing. The launcher can read the record even after the
rank has been killed.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from shardwise.errors import LaunchError
from shardwise.net.environment import RANK_VARIABLE, REPORTS_VARIABLE

ENGINES = 60
"""Maximum number of engines per process whose steps are recorded. Later engines are ignored."""

_living: WeakSet[ProgressWriter] = WeakSet()

_SAVES, _ENDED, _RESUMES, _JOINED, _LIMIT, _PID, _BEGUN, _CHECKPOINT_AT, _FIRST = range(9)
_NUMBERS = _FIRST + 2 * ENGINES
_PATH_BYTES = 4096  # PATH_MAX of Linux
_BYTES = 8 * _NUMBERS + _PATH_BYTES


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A rank's recorded progress, for the engine that has the most unsaved steps.

    Args:
        step: The number of steps that the engine has completed.
        kept: The number of steps that a complete checkpoint covers. A restart does not repeat them.
        saves_when_asked: True if the rank saves a checkpoint when it is asked to stop.
        ended: True if the rank was asked to stop, has saved, and is exiting.
        resumes: True if the script resumes from the newest checkpoint when it starts.
        joined: The number of steps after which the rank, which started as a spare, has joined the
            other ranks. None if it has not joined.
        checkpoint: The absolute path of the checkpoint that the rank saved or loaded last, or "".
        checkpoint_at: The total number of steps of all engines then. All ranks count the same.
    """

    step: int
    kept: int
    saves_when_asked: bool = False
    ended: bool = False
    resumes: bool = False
    joined: int | None = None
    checkpoint: str = ""
    checkpoint_at: int = 0


class StopLimit(NamedTuple):
    """The time in seconds for which a rank may be stopped, and its process.

    `begun` is the process's start time in ticks since boot, which identifies it together with
    `pid`. The launcher may have started another process, such as a shell, which started this one.
    """

    seconds: float
    pid: int
    begun: int


class ProgressWriter:
    """Writes this rank's record. Without a launcher, it writes to private memory.

    Attributes:
        parts: Numbers of the engines in an `sw.Engines`. The paths of their own checkpoints are not
            recorded, because `Engines.resume` starts from a file that lists them.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.parts: set[int] = set()
        self._launcher = os.getppid() if REPORTS_VARIABLE in environ else None
        if REPORTS_VARIABLE not in environ:
            self._map(bytearray(_BYTES))
            return
        path = _path(Path(environ[REPORTS_VARIABLE]), int(environ[RANK_VARIABLE]))
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Write zeros rather than extending the file with truncate: if the disk is full, a
                # store to a hole in a mapped file raises SIGBUS.
                if os.pwrite(fd, bytes(_BYTES), 0) < _BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._map(mmap.mmap(fd, _BYTES))
            finally:
                os.close(fd)
        except OSError as error:
            raise LaunchError(
                f"This rank cannot record its progress for its launcher in {path.parent}: "
                f"{error.strerror}. Free some space or inodes there, or name another folder for "
                "temporary files with TMPDIR=FOLDER."
            ) from None
        _living.add(self)

    def _map(self, record: bytearray | mmap.mmap) -> None:
        whole = memoryview(record)
        self._numbers = whole[: 8 * _NUMBERS].cast("q")
        self._checkpoint = whole[8 * _NUMBERS :]

    @property
    def is_orphan(self) -> bool:
        """True if the launcher has exited."""
        # An orphaned process is assigned a new parent.
        return self._launcher is not None and os.getppid() != self._launcher

    def saves_when_asked(self, *, saves: bool) -> None:
        """Record whether this rank saves a checkpoint when it is asked to stop."""
        self._numbers[_SAVES] = saves

    def ended(self) -> None:
        """Record that this rank was asked to stop, has saved a checkpoint, and is exiting."""
        self._numbers[_ENDED] = 1

    def resumes(self) -> None:
        """Record that this rank will resume from the newest checkpoint after a restart."""
        self._numbers[_RESUMES] = 1

    def joined(self, steps: int) -> None:
        """Record that this rank, a spare, has joined the other ranks after step `steps`."""
        self._numbers[_JOINED] = steps + 1

    def limit_stops(self, seconds: float, begun: int) -> None:
        """Ask the launcher to kill this process, which began at `begun`, if it is stopped too long.

        See `StopLimit`.
        """
        self._numbers[_PID], self._numbers[_BEGUN] = os.getpid(), begun
        self._numbers[_LIMIT] = round(1000 * seconds)

    def stepped(self, engine: int, steps: int) -> None:
        """Record that engine number `engine` has completed `steps` steps."""
        if engine < ENGINES:
            self._numbers[_FIRST + 2 * engine] = steps

    def kept(self, engine: int, steps: int, checkpoint: Path | None = None) -> None:
        """Record that a complete checkpoint covers engine number `engine`'s first `steps` steps.

        `checkpoint` is the checkpoint's path. It is None if the state is not in a file.
        """
        if engine < ENGINES:
            self._numbers[_FIRST + 2 * engine + 1] = steps
        if checkpoint is not None and engine not in self.parts:
            self.used(checkpoint)

    def used(self, checkpoint: Path) -> None:
        """Record the path of the checkpoint that was just saved or loaded."""
        name = os.fsencode(checkpoint.absolute()) + b"\0"
        if len(name) > _PATH_BYTES:  # rather no path than an older one
            name = b"\0"
        self._checkpoint[: len(name)] = name
        self._numbers[_CHECKPOINT_AT] = sum(self._numbers[_FIRST::2])


def read(folder: Path, rank: int) -> Progress | None:
    """Read `rank`'s progress from `folder`, or return None if it has recorded none."""
    if (record := _read(folder, rank)) is None:
        return None
    numbers, path = record
    pairs = list(zip(numbers[_FIRST::2], numbers[_FIRST + 1 :: 2], strict=True))
    step, kept = max(pairs, key=lambda pair: (pair[0] - pair[1], pair[0]))
    return Progress(
        step=step,
        kept=kept,
        saves_when_asked=bool(numbers[_SAVES]),
        ended=bool(numbers[_ENDED]),
        resumes=bool(numbers[_RESUMES]),
        joined=numbers[_JOINED] - 1 if numbers[_JOINED] else None,
        checkpoint=path,
        checkpoint_at=numbers[_CHECKPOINT_AT],
    )


def read_stop_limit(folder: Path, rank: int) -> StopLimit | None:
    """Read how long `rank` may be stopped, or return None if there is no limit."""
    if (record := _read(folder, rank)) is None or not record[0][_LIMIT]:
        return None
    numbers = record[0]
    return StopLimit(numbers[_LIMIT] / 1000, numbers[_PID], numbers[_BEGUN])


def _read(folder: Path, rank: int) -> tuple[memoryview[int], str] | None:
    """Return the numbers and the path of the checkpoint, or None if there is no whole record."""
    try:
        data = _path(folder, rank).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _BYTES:
        return None
    path, _, _ = data[8 * _NUMBERS :].partition(b"\0")
    return memoryview(data)[: 8 * _NUMBERS].cast("q"), os.fsdecode(path)


def forget(folder: Path, rank: int) -> None:
    """Remove the progress of a lost `rank`, whose number another process will use."""
    _path(folder, rank).unlink(missing_ok=True)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.progress"


# -- ranks that have ended --------------------------------------------------------------------


def mark_ended_early(folder: Path, rank: int) -> None:
    """Tell the ranks on this host, through the report folder, that `rank` exited with code 0.

    Call this only once none of the rank's processes is left: a background process could still join
    the run.
    """
    with suppress(OSError):  # a full disk: the other ranks then wait until --timeout
        _ended_mark(folder, rank).touch()


def ended_early(ranks: Iterable[int]) -> list[int]:
    """Return which of `ranks` exited with code 0, according to this host's launcher."""
    folder = os.environ.get(REPORTS_VARIABLE)
    return [] if folder is None else [r for r in ranks if _ended_mark(Path(folder), r).exists()]


def mark_lost(folder: Path, ranks: Iterable[int]) -> None:
    """Tell the ranks on this host, through the report folder, that `ranks` no longer exist."""
    with suppress(OSError):  # a full disk: the other ranks then wait until --timeout
        for rank in ranks:
            _lost_mark(folder, rank).touch()


def is_lost(rank: int) -> bool:
    """Return whether `rank` no longer exists, according to this host's launcher."""
    folder = os.environ.get(REPORTS_VARIABLE)
    return folder is not None and _lost_mark(Path(folder), rank).exists()


def _lost_mark(folder: Path, rank: int) -> Path:
    return folder / f"lost-{rank}"


def _ended_mark(folder: Path, rank: int) -> Path:
    return folder / f"ended-{rank}"


def _in_forked_child() -> None:
    """Detach a forked child from the file, because its steps are not the rank's progress."""
    for writer in list(_living):
        writer._map(bytearray(_BYTES))


os.register_at_fork(after_in_child=_in_forked_child)
