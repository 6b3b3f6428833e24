"""Publishes checkpoints atomically: a rename turns a draft into a complete checkpoint.

Only complete checkpoints are loaded.

checkpoints/
├── step-100/            complete: it has its final name
├── .step-200.partial/   being written; renamed once all its data is on disk
├── .step-100.replaced/  previous checkpoint of step 100, kept until the new one is in place
├── .step-50.gone/       being removed; .gone.1 and so on if the name is taken
└── .lock                locked by the job that saves here (folder_lock.py)
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
"""Name of a checkpoint's main file. A folder without it is not a complete checkpoint."""

_REFUSED = frozenset(
    {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ESPIPE, errno.EPERM, errno.EIO}
)
"""Error numbers of file systems that do not support writing at an offset."""

_STEP = re.compile(r"step-([0-9]+)")
_HIDDEN = re.compile(r"\.step-([0-9]+)\.(partial|replaced|gone)(\.[0-9]+)?")


@dataclass(frozen=True, order=True)
class StepFolder:
    """The step and the path of a checkpoint."""

    step: int
    path: Path


def complete(folder: Path) -> list[StepFolder]:
    """Return the complete checkpoints in `folder`, in ascending step order."""
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
            # A save that replaced this checkpoint was killed between its two renames.
            found.setdefault(int(hidden[1]), path)
    return [StepFolder(step, found[step]) for step in sorted(found)]


def _has_document(path: Path) -> bool:
    try:
        return (path / DOCUMENT).is_file()
    except OSError:  # for example, a folder that belongs to another user
        return False


def incomplete_checkpoints(folder: Path) -> list[StepFolder]:
    """Return the folders named like checkpoints that lack DOCUMENT, in ascending step order."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        named = _STEP.fullmatch(path.name)
        if not named or _has_document(path):
            continue
        try:
            is_empty = next(path.iterdir(), None) is None
        except OSError:  # an unreadable folder may contain a checkpoint
            is_empty = False
        if not is_empty:
            found.append(StepFolder(int(named[1]), path))
    return sorted(found)


def lacks_document(path: Path) -> bool:
    """Return whether `path` looks like a checkpoint but its DOCUMENT is missing."""
    if not path.is_dir() or os.path.lexists(path / DOCUMENT):
        return False
    named = _STEP.fullmatch(path.name) or _HIDDEN.fullmatch(path.name)
    # Other libraries' model folders contain safetensors too. Only ours have optimizer*.safetensors.
    return any(path.glob("*.safetensors" if named else "optimizer*.safetensors"))


def end_removals(folder: Path) -> None:
    """Finish removing checkpoints in `folder` if a previous run was killed while removing them.

    Ignores failures; the next save reports them. Only the main rank of the job that saves to
    `folder` may call this.
    """
    with suppress(OSError):  # the folder does not exist or cannot be read
        for path in list(folder.iterdir()):
            hidden = _HIDDEN.fullmatch(path.name)
            if hidden and hidden[2] == "gone":
                file_system.remove(path)


def newest(path: Path) -> Path:
    """Return the newest checkpoint in `path`.

    Returns `path` itself if it is a checkpoint, or if it contains no checkpoints.
    """
    steps = [] if os.path.lexists(path / DOCUMENT) else complete(path)
    return steps[-1].path if steps else path


def place_of(folder: Path, step: int) -> Path:
    """Return the path in `folder` of the complete checkpoint for `step`, which may not exist."""
    return folder / f"step-{step}"


class Draft:
    """A checkpoint that is not published yet.

    Its files are in the folder `path`. Publishing renames the folder to `final`. Every rank has a
    Draft, but only the main rank creates, publishes and removes the files. `begin` may change
    `path`, so the main rank must send it to the other ranks afterwards. If the file system does not
    support writing at an offset (as with object stores), `path` is a temporary folder on the main
    rank's host, and `finish` copies the files from there.

    Args:
        folder: Folder that contains the checkpoints of the run.
        step: Step of the checkpoint.
        nbytes: Total size of the tensors in bytes.
    """

    def __init__(self, folder: Path, step: int, nbytes: int) -> None:
        self.folder = folder
        self.step = step
        self.nbytes = nbytes
        self.final = place_of(folder, step)
        self.path = self._partial = folder / f".step-{step}.partial"
        self._replaced = folder / f".step-{step}.replaced"
        self.warnings: list[str] = []
        """One message for each file or folder that could not be removed."""

    def begin(self) -> None:
        """Create the draft's folder, and clean up after runs that were killed.

        Raises OSError if the disk fails (ENOSPC if it has too little free space for the tensors).
        """
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            # The entry of the new folder must survive a power failure. Otherwise the checkpoints
            # in it would be lost too.
            file_system.sync(self.folder.parent)
        self._sweep()
        # Files are sparse until they are written, so without this check the disk could fill up
        # halfway through the save.
        if self.nbytes > self._free():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        self._partial.mkdir()
        if not _supports_offsets(self._partial):
            # Only ranks on this host see the temporary folder. `CheckpointSaver._begin` raises an
            # error if there are others.
            self.path = Path(tempfile.mkdtemp(prefix="shardwise-checkpoint-"))

    def finish(self, documents: Mapping[str, bytes]) -> None:
        """Write the small files, flush everything to disk, and publish the draft by renaming it.

        Until the rename, an older checkpoint of the same step stays complete. Raises OSError if
        the disk fails.

        Args:
            documents: Contents of the small files by name.
        """
        if self.path != self._partial:
            for path in sorted(self.path.iterdir()):
                with path.open("rb") as source, (self._partial / path.name).open("wb") as file:
                    shutil.copyfileobj(source, file, 8 * 2**20)
                    file.flush()
                    os.fsync(file.fileno())
        for name, data in documents.items():
            file_system.write_synced(self._partial / name, data)
        # Contents and names must reach the disk before the rename does, so that a folder with the
        # final name is complete even after a power failure.
        file_system.sync(self._partial)
        # A rename cannot replace a non-empty folder, so two renames are needed. If the process is
        # killed between them, the old checkpoint has a hidden name. `complete` still finds it, and
        # the next save gives it its final name again.
        if os.path.lexists(self.final):
            self.final.rename(self._replaced)
        self._partial.rename(self.final)
        file_system.sync(self.folder)
        # Not earlier: until the rename is on disk, the old checkpoint is the only complete one.
        self._remove(self._replaced)
        if self.path != self._partial:
            self._remove(self.path)

    def describe_error(self, error: OSError) -> str:
        """Return an error message for a save that failed with the disk error `error`."""
        place = Path(error.filename or self.path)
        return (
            f"The checkpoint of step {self.step} was not written: {error.strerror or error} "
            f"({place}). {self._advice(error, place)} Earlier complete checkpoints are intact."
        )

    def _advice(self, error: OSError, place: Path) -> str:
        """Return advice for the user about a disk error at the path `place`."""
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
        """Return the free disk space in bytes."""
        folder = next(f for f in (self.folder, *self.folder.absolute().parents) if f.is_dir())
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def empty(self) -> None:
        """Delete the tensor files to free space, but not the notes that other ranks still read."""
        for path in self.path.glob("*.safetensors"):
            with suppress(OSError):
                path.unlink()

    def discard(self) -> None:
        """Remove the draft. Complete checkpoints are not changed."""
        for path in {self.path, self._partial}:
            shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints up to this draft's step.

        Adds a warning for each checkpoint that cannot be removed.
        """
        # Checkpoints of later steps belong to an earlier run that got further, so keep them.
        older = [found for found in complete(self.folder) if found.step <= self.step]
        for found in older[:-keep]:
            # Rename it first: if the removal is interrupted, the rest must not look complete.
            gone = file_system.gone_name(self.folder, found.step)
            try:
                found.path.rename(gone)
            except OSError as error:
                self.warnings.append(file_system.not_removed(found.path, error))
            else:
                self._remove(gone)

    def _sweep(self) -> None:
        """Clean up the hidden folders that killed saves left behind.

        Folders that cannot be removed are renamed. A checkpoint that was being replaced is
        restored if its replacement is incomplete.
        """
        for path in list(self.folder.iterdir()):
            hidden = _HIDDEN.fullmatch(path.name)
            if not hidden:
                continue
            named = self.folder / f"step-{hidden[1]}"
            # A save was killed between its two renames, so this is the only checkpoint of its step.
            if hidden[2] == "replaced" and not os.path.lexists(named):
                path.rename(named)
            elif not self._remove(path) and hidden[2] != "gone":
                path.rename(file_system.gone_name(self.folder, hidden[1]))

    def _remove(self, path: Path) -> bool:
        """Remove `path`. Return False and add a warning if that fails."""
        why = file_system.remove(path)
        if why is not None:
            self.warnings.append(why)
        return why is None


def _supports_offsets(folder: Path) -> bool:
    """Return whether files in `folder` can be written at arbitrary offsets."""
    path = folder / ".probe"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, 2)
        # Write the second byte first, because object stores accept only sequential writes.
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
