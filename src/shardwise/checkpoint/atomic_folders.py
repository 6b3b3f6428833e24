"""Atomic checkpoints: a draft becomes complete at one moment, and only complete ones are loaded.

checkpoints/
├── step-100/            complete: it has its final name
├── .step-200.partial/   being written; renamed when all of it is on disk
├── .step-100.replaced/  previous checkpoint of a step, until the new one has its name
├── .step-50.gone/       being removed; .gone.1 and so on if the name is taken
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
"""File that only a complete checkpoint has next to its tensors."""

_REFUSED = frozenset(
    {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ESPIPE, errno.EPERM, errno.EIO}
)
"""Errors of file systems that do not support writes at an offset."""

_STEP = re.compile(r"step-([0-9]+)")
_HIDDEN = re.compile(r"\.step-([0-9]+)\.(partial|replaced|gone)(\.[0-9]+)?")


@dataclass(frozen=True, order=True)
class StepFolder:
    """A checkpoint in a folder."""

    step: int
    path: Path


def complete(folder: Path) -> list[StepFolder]:
    """Return the complete checkpoints in `folder`, oldest step first."""
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
    return [StepFolder(step, found[step]) for step in sorted(found)]


def _has_document(path: Path) -> bool:
    try:
        return (path / DOCUMENT).is_file()
    except OSError:  # a folder of another user
        return False


def incomplete_checkpoints(folder: Path) -> list[StepFolder]:
    """Return the folders with the name and contents of a checkpoint but no DOCUMENT, oldest
    first."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        named = _STEP.fullmatch(path.name)
        if not named or _has_document(path):
            continue
        try:
            is_empty = next(path.iterdir(), None) is None
        except OSError:  # an unreadable folder may contain anything
            is_empty = False
        if not is_empty:
            found.append(StepFolder(int(named[1]), path))
    return sorted(found)


def lacks_document(path: Path) -> bool:
    """Return whether `path` is a checkpoint whose DOCUMENT is missing."""
    if not path.is_dir() or os.path.lexists(path / DOCUMENT):
        return False
    named = _STEP.fullmatch(path.name) or _HIDDEN.fullmatch(path.name)
    # A model's own folder may have safetensors too; only ours has optimizer*.safetensors.
    return any(path.glob("*.safetensors" if named else "optimizer*.safetensors"))


def end_removals(folder: Path) -> None:
    """Finish removals in `folder` that a kill interrupted. The next save reports failures.

    Call it only on the main rank of the job that saves there.
    """
    with suppress(OSError):  # the folder does not exist or cannot be read
        for path in list(folder.iterdir()):
            hidden = _HIDDEN.fullmatch(path.name)
            if hidden and hidden[2] == "gone":
                file_system.remove(path)


def newest(path: Path) -> Path:
    """Return `path` if it is a checkpoint, else the newest checkpoint in it, if any."""
    steps = [] if os.path.lexists(path / DOCUMENT) else complete(path)
    return steps[-1].path if steps else path


def place_of(folder: Path, step: int) -> Path:
    """Return the path of the complete checkpoint of `step`."""
    return folder / f"step-{step}"


class Draft:
    """A checkpoint of `step` at `path`, before it is published as `final`.

    Only the main rank uses it. After `begin`, the other ranks need the main rank's `path`: if the
    file system does not support writes at an offset (object stores), the ranks of one host write
    into a temporary folder, and the main rank copies the files.

    Args:
        nbytes: Size of the tensors in bytes.
    """

    def __init__(self, folder: Path, step: int, nbytes: int) -> None:
        self.folder = folder
        self.step = step
        self.nbytes = nbytes
        self.final = place_of(folder, step)
        self.path = self._partial = folder / f".step-{step}.partial"
        self._replaced = folder / f".step-{step}.replaced"
        self.warnings: list[str] = []
        """Messages about files that could not be removed."""

    def begin(self) -> None:
        """Create the folder, and remove the remains of killed runs.

        Raises OSError, with ENOSPC if the disk has less free space than the tensors need.
        """
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            # The new folder itself must survive a power failure, or its checkpoints would be lost
            # with it.
            file_system.sync(self.folder.parent)
        self._sweep()
        # Files are sparse until written, so a full disk would otherwise be noticed only halfway.
        if self.nbytes > self._free():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        self._partial.mkdir()
        if not _supports_offsets(self._partial):
            # Ranks of one host share its temporary folder. Ranks of others fail in
            # `CheckpointSaver._begin`.
            self.path = Path(tempfile.mkdtemp(prefix="shardwise-checkpoint-"))

    def finish(self, documents: Mapping[str, bytes]) -> None:
        """Write the small files, wait until everything is on disk, and publish by a rename.

        Until then an older checkpoint of the same step stays complete. Raises OSError.
        """
        if self.path != self._partial:
            for path in sorted(self.path.iterdir()):
                with path.open("rb") as source, (self._partial / path.name).open("wb") as file:
                    shutil.copyfileobj(source, file, 8 * 2**20)
                    file.flush()
                    os.fsync(file.fileno())
        for name, data in documents.items():
            file_system.write_synced(self._partial / name, data)
        # Contents and names must be on disk before the rename is: after a power failure, a folder
        # with the final name must be complete.
        file_system.sync(self._partial)
        # A rename cannot replace a folder that is not empty, so there are two. After a kill between
        # them the old one is hidden; `complete` still finds it, and the next save restores it.
        if os.path.lexists(self.final):
            self.final.rename(self._replaced)
        self._partial.rename(self.final)
        file_system.sync(self.folder)
        # Only now: until the rename is on disk, the old checkpoint is the only complete one.
        self._remove(self._replaced)
        if self.path != self._partial:
            self._remove(self.path)

    def describe_error(self, error: OSError) -> str:
        """Return the message for a disk error."""
        place = Path(error.filename or self.path)
        return (
            f"The checkpoint of step {self.step} was not written: {error.strerror or error} "
            f"({place}). {self._advice(error, place)} Earlier complete checkpoints are intact."
        )

    def _advice(self, error: OSError, place: Path) -> str:
        """Return advice for an error at `place`."""
        if error.errno == errno.EEXIST and place.is_dir():
            return "Another run may be saving there: give each run its own folder."
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            for path in (place, *place.parents):
                if path.is_symlink() and not path.exists():
                    return f"{path} links to {path.readlink()}, which does not exist: create it."
            return "A file is in the way: name a folder, or the path of a folder to create."
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return "Name a folder that this user can write to."
        hint = failure_report.disk_hint(error, place)
        if error.errno == errno.EFBIG or "inodes" in hint:
            return f"{hint[:1].upper()}{hint[1:]}."
        room = "Free some space, keep fewer checkpoints, or save to another disk."
        with suppress(OSError):
            room = f"It needs {self.nbytes:,} bytes, and {self._free():,} are free. {room}"
        return room

    def _free(self) -> int:
        """Return the number of free bytes on the disk."""
        folder = next(f for f in (self.folder, *self.folder.absolute().parents) if f.is_dir())
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def empty(self) -> None:
        """Delete the tensors to free space. Notes stay, because other ranks read them."""
        for path in self.path.glob("*.safetensors"):
            with suppress(OSError):
                path.unlink()

    def discard(self) -> None:
        """Remove the draft. Complete checkpoints are not touched."""
        for path in {self.path, self._partial}:
            shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints up to this step, where possible."""
        # Checkpoints of later steps are from an earlier run that went further; they are not ours to
        # remove.
        older = [found for found in complete(self.folder) if found.step <= self.step]
        for found in older[:-keep]:
            # Rename first: a kill during the removal must not leave a folder that looks complete.
            gone = file_system.gone_name(self.folder, found.step)
            try:
                found.path.rename(gone)
            except OSError as error:
                self.warnings.append(file_system.not_removed(found.path, error))
            else:
                self._remove(gone)

    def _sweep(self) -> None:
        """Remove the remains of killed saves, or rename those that cannot be removed."""
        for path in list(self.folder.iterdir()):
            hidden = _HIDDEN.fullmatch(path.name)
            if not hidden:
                continue
            named = self.folder / f"step-{hidden[1]}"
            # A save was killed between its two renames: this is the only checkpoint of its step.
            if hidden[2] == "replaced" and not os.path.lexists(named):
                path.rename(named)
            elif not self._remove(path) and hidden[2] != "gone":
                path.rename(file_system.gone_name(self.folder, hidden[1]))

    def _remove(self, path: Path) -> bool:
        """Remove `path`; return whether it is gone."""
        why = file_system.remove(path)
        if why is not None:
            self.warnings.append(why)
        return why is None


def _supports_offsets(folder: Path) -> bool:
    """Return whether files in `folder` can be written at any offset."""
    path = folder / ".probe"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, 2)
        # Backwards on purpose: object stores accept only appended writes.
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
