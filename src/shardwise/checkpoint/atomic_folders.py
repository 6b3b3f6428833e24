"""Makes checkpoints atomic: a draft becomes complete at one moment, and only complete ones count.

checkpoints/
├── step-100/            complete: it has its name
├── .step-200.partial/   being written; gets its name when all of it is on the disk
├── .step-100.replaced/  the older of two of one step, until the newer has its name
├── .step-50.gone/       being removed; .gone.1 and so on, where one cannot be
└── .lock                held by the job that saves here (folder_lock.py)
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint import file_system
from shardwise.launch import failure_report

DOCUMENT = "checkpoint.json"
"""What a complete checkpoint has beside its tensors."""

_REFUSED = frozenset(
    {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ESPIPE, errno.EPERM, errno.EIO}
)
"""What file systems say to a write at an offset that they do not know."""

_STEP = re.compile(r"step-([0-9]+)")
_HIDDEN = re.compile(r"\.step-([0-9]+)\.(partial|replaced|gone)(\.[0-9]+)?")


@dataclass(frozen=True, order=True)
class Found:
    """A complete checkpoint."""

    step: int
    path: Path


def complete(folder: Path) -> list[Found]:
    """The complete checkpoints in `folder`, oldest step first."""
    if not folder.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        named, hidden = _STEP.fullmatch(path.name), _HIDDEN.fullmatch(path.name)
        if not _has_document(path):
            continue
        if named:
            found[int(named[1])] = path
        elif hidden and hidden[2] == "replaced":
            # A save of the same step was killed between its two renames.
            found.setdefault(int(hidden[1]), path)
    return [Found(step, found[step]) for step in sorted(found)]


def _has_document(path: Path) -> bool:
    try:
        return (path / DOCUMENT).is_file()
    except OSError:  # a folder of someone else's
        return False


def lost(folder: Path) -> list[Found]:
    """What in `folder` has the name of a checkpoint, holds something, and is none: without a
    DOCUMENT that is a file. Oldest step first."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        named = _STEP.fullmatch(path.name)
        if not named or _has_document(path):
            continue
        try:
            is_empty = next(path.iterdir(), None) is None
        except OSError:  # a folder that cannot be read may hold anything
            is_empty = False
        if not is_empty:
            found.append(Found(int(named[1]), path))
    return sorted(found)


def lacks_document(path: Path) -> bool:
    """Whether the folder `path` looks like a checkpoint of ours, but for its DOCUMENT."""
    if not path.is_dir() or os.path.lexists(path / DOCUMENT):
        return False
    named = _STEP.fullmatch(path.name) or _HIDDEN.fullmatch(path.name)
    return any(path.glob("*.safetensors" if named else "optimizer*.safetensors"))


def end_removals(folder: Path) -> None:
    """Remove what a run was removing in `folder` when it was killed; what cannot be removed is left
    to the next save, which says so.

    For the main process of the job that saves there.
    """
    with suppress(OSError):  # a folder that is not there, or may not be read
        for path in list(folder.iterdir()):
            hidden = _HIDDEN.fullmatch(path.name)
            if hidden and hidden[2] == "gone":
                file_system.remove(path)


def newest(path: Path) -> Path:
    """`path`, or the newest checkpoint in it where it is a folder of several."""
    steps = [] if os.path.lexists(path / DOCUMENT) else complete(path)
    return steps[-1].path if steps else path


def place_of(folder: Path, step: int) -> Path:
    """Where in `folder` the checkpoint of `step` is, once complete."""
    return folder / f"step-{step}"


class Draft:
    """A checkpoint of `step` on its way to `final`; `path` is where it is meanwhile. Its tensors
    take `nbytes`.

    For one process: the main rank. What the others need is `path`, as the main rank has it after
    `begin`: where the folder's file system takes no writes at an offset, as those over object
    stores do, the ranks of one host write to a temporary folder, and rank 0 copies from there.
    """

    def __init__(self, folder: Path, step: int, nbytes: int) -> None:
        self.folder = folder
        self.step = step
        self.nbytes = nbytes
        self.final = place_of(folder, step)
        self.path = self._partial = folder / f".step-{step}.partial"
        self._replaced = folder / f".step-{step}.replaced"
        self.left: list[str] = []
        """In words, what was to be removed and is still there."""

    def begin(self) -> None:
        """Make the folder; sweep what killed runs have left.

        Raises OSError where it cannot be written, of ENOSPC where the disk has less free.
        """
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            file_system.sync(self.folder.parent)
        self._sweep()
        # Files are sparse until they are written, so a full disk would show only halfway.
        if self.nbytes > self._free():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        self._partial.mkdir()
        if not _takes_offsets(self._partial):
            self.path = Path(tempfile.mkdtemp(prefix="shardwise-checkpoint-"))

    def finish(self, documents: Mapping[str, bytes]) -> None:
        """Write the small files, give the checkpoint its name, and see that all is on the disk.

        An older one of the same step is there until then. Raises OSError.
        """
        if self.path != self._partial:
            for path in sorted(self.path.iterdir()):
                with path.open("rb") as source, (self._partial / path.name).open("wb") as file:
                    shutil.copyfileobj(source, file, 8 * 2**20)
                    file.flush()
                    os.fsync(file.fileno())
        for name, data in documents.items():
            file_system.write_synced(self._partial / name, data)
        # Contents and names must be on the disk before the rename is: after a power failure a
        # folder with the final name has to be whole.
        file_system.sync(self._partial)
        # No rename replaces a folder that is not empty, so there are two. A kill between them
        # leaves the older one hidden; `complete` still finds it, and the next save restores it.
        if os.path.lexists(self.final):
            self.final.rename(self._replaced)
        self._partial.rename(self.final)
        file_system.sync(self.folder)
        self._remove(self._replaced)
        if self.path != self._partial:
            self._remove(self.path)

    def refused(self, error: OSError) -> str:
        """In words, that the disk did not take it."""
        place = Path(error.filename or self.path)
        return (
            f"The checkpoint of step {self.step} was not written: {error.strerror or error} "
            f"({place}). {self._way_out(error, place)} Those that were complete before are whole."
        )

    def _way_out(self, error: OSError, place: Path) -> str:
        """What to do about an error at `place`."""
        if error.errno == errno.EEXIST and place.is_dir():
            return "Does another run save there? Give each a folder of its own."
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            for each in (place, *place.parents):
                if each.is_symlink() and not each.exists():
                    return f"{each} is a link to {each.readlink()}, which does not exist: make it."
            return "Name a folder, or a place where one can be made: a file is in the way."
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return "Name a folder that this user may write to."
        hint = failure_report.disk_hint(error, place)
        if error.errno == errno.EFBIG or "inodes" in hint:
            return f"{hint[:1].upper()}{hint[1:]}."
        room = "Make room, keep fewer checkpoints, or save on another disk."
        with suppress(OSError):
            room = f"It takes {self.nbytes:,} bytes, and {self._free():,} are free there. {room}"
        return room

    def _free(self) -> int:
        """Bytes that are free where it is to be."""
        folder = next(f for f in (self.folder, *self.folder.absolute().parents) if f.is_dir())
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def empty(self) -> None:
        """Let go of the room that the tensors take; notes are left for who reads them."""
        for path in self.path.glob("*.safetensors"):
            with suppress(OSError):
                path.unlink()

    def discard(self) -> None:
        """Forget the draft; what is complete stays."""
        for path in {self.path, self._partial}:
            shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Of the checkpoints up to this step, leave the newest `keep`, and what cannot be
        removed."""
        older = [found for found in complete(self.folder) if found.step <= self.step]
        for found in older[:-keep]:
            # Renamed first: a kill while its files are removed must not leave what looks complete.
            gone = file_system.gone_name(self.folder, found.step)
            try:
                found.path.rename(gone)
            except OSError as error:
                self.left.append(file_system.not_removed(found.path, error))
            else:
                self._remove(gone)

    def _sweep(self) -> None:
        """Make room for what is to come; what cannot be removed goes out of its way."""
        for path in list(self.folder.iterdir()):
            hidden = _HIDDEN.fullmatch(path.name)
            if not hidden:
                continue
            named = self.folder / f"step-{hidden[1]}"
            # A save was killed between its two renames: this is the only one of its step.
            if hidden[2] == "replaced" and not os.path.lexists(named):
                path.rename(named)
            elif not self._remove(path) and hidden[2] != "gone":
                path.rename(file_system.gone_name(self.folder, hidden[1]))

    def _remove(self, path: Path) -> bool:
        """Whether it is gone."""
        why = file_system.remove(path)
        if why is not None:
            self.left.append(why)
        return why is None


def _takes_offsets(folder: Path) -> bool:
    """Whether a file in `folder` can be written at any place."""
    path = folder / ".probe"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, 2)
        os.pwrite(fd, b"1", 1)
        os.pwrite(fd, b"0", 0)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return False
    finally:
        os.close(fd)
        path.unlink()
    return True
