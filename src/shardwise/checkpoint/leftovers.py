"""What is to be removed from a folder of checkpoints: tried, never insisted on.

Someone may have a file of it open (NFS keeps that under a name of its own), or own the folder that
a link leads to. The checkpoint that is being saved does not depend on it.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path


def remove(path: Path) -> str | None:
    """Remove a folder with all that is in it, or a file, or a link but not what it leads to.

    Returns in words why it is still there.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return not_removed(path, error)
    return None


def not_removed(path: Path, error: OSError) -> str:
    """In words, that `path` is still there."""
    return (
        f"{path} is to be removed and cannot be ({error.strerror or error}): the next save tries "
        "again."
    )


def gone_name(folder: Path, step: int | str) -> Path:
    """A free name in `folder` for what is left of a checkpoint of `step`."""
    first = f".step-{step}.gone"
    names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(1)))
    return next(folder / name for name in names if not os.path.lexists(folder / name))
