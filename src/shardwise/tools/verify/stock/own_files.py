"""Gives each run of a script a view of the user's files, and keeps the run's own files in it.

The ranks and the reference run the same script. Without views, the second run would find the first
run's checkpoints, and both would overwrite the user's files. A view is a folder of symbolic links.
It has the same depth as the working directory, so that relative paths with ".." also work:

    /home/me/project/              the working directory      data/train.bin   last.pt
    VIEW/home/me/project/          where the run starts        data/train.bin → ...   last.pt → ...

New files are created in the view. Before a rank opens a link for writing, the link is replaced by a
copy of the file. Absolute paths, and other programs that write through links, still reach the
user's files.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

OPAQUE = {".git", ".hg", ".venv", "venv", ".tox", "node_modules", "__pycache__", "site-packages"}
"""Folders that are linked as a whole."""

MOST = 5000
"""Maximum number of links in a view. Any further folders are linked as a whole."""

MOST_IN_FOLDER = 500
"""Maximum number of entries in a folder that are linked individually."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def make_view(view: Path, current: Path, hidden: Path) -> Path:
    """Create a view of the folder `current`, and return the folder in which the run starts.

    Args:
        view: Folder to create.
        current: The user's working directory, as an absolute path.
        hidden: The verification's own folder, which the view does not show.
    """
    place, user = view, Path(current.anchor)
    place.mkdir()
    for part in current.relative_to(current.anchor).parts:
        _link_entries(place, user, {part})
        place, user = place / part, user / part
        place.mkdir()
    left = MOST
    folders = [(place, current)]
    while folders:  # breadth first, so that only deep folders exceed MOST
        into, source = folders.pop(0)
        entries = _entries(source)
        left -= len(entries)
        for entry in entries:
            target = into / entry.name
            if Path(entry.path) == hidden:
                continue
            if not _is_opened(entry, left):
                target.symlink_to(entry.path)
                continue
            target.mkdir()
            folders.append((target, Path(entry.path)))
    return place


def _link_entries(place: Path, user: Path, omitted: set[str]) -> None:
    """Link the entries of a parent of the working directory, if they can be listed."""
    for entry in _entries(user)[:MOST]:
        if entry.name not in omitted:
            (place / entry.name).symlink_to(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # the folder may be entered, but not listed
        return []


def _is_opened(entry: os.DirEntry[str], left: int) -> bool:
    """Return whether to link the entries of a folder individually."""
    if entry.name in OPAQUE or not entry.is_dir(follow_symlinks=False):
        return False
    count = len(_entries(Path(entry.path)))
    return count <= MOST_IN_FOLDER and count <= left


def follow(view: Path) -> None:
    """Patch this process to replace a link in the view with a copy before writing to it."""
    root = str(view.resolve()) + os.sep
    is_inside = False

    def before(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal is_inside
        if event != "open" or is_inside or not isinstance(arguments[0], str | bytes):
            return
        flags = arguments[2]
        if isinstance(flags, int) and flags & _WRITING:
            is_inside = True  # copying opens files as well
            try:
                detach(os.fsdecode(arguments[0]), root, copies=not flags & os.O_TRUNC)
            finally:
                is_inside = False

    sys.addaudithook(before)
    save: Callable[..., None] = torch.save

    @wraps(save)
    def saved(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        # torch opens a path in C++, which no audit hook sees.
        if isinstance(file, str | os.PathLike):
            detach(os.fspath(file), root, copies=False)
        save(value, file, *args, **kwargs)

    torch.save = saved  # type: ignore[assignment]
    _follow_safetensors(root)


def _follow_safetensors(root: str) -> None:
    """Patch safetensors, which writes files in Rust, to replace links before it writes."""
    try:
        import safetensors.torch as library
    except ImportError:
        return
    write: Callable[..., None] = library.serialize_file  # type: ignore[attr-defined]

    @wraps(write)
    def written(tensors: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        detach(os.fspath(file), root, copies=False)
        write(tensors, file, *args, **kwargs)

    library.serialize_file = written  # type: ignore[attr-defined, assignment]


def detach(file: str, root: str, *, copies: bool) -> None:
    """Replace a link to a file with a copy, or remove it if `copies` is False.

    Does nothing if the file is not in the view `root`, or is not a link.
    """
    path = os.path.abspath(file)
    if not path.startswith(root) or not os.path.islink(path) or not os.path.isfile(path):
        return
    if copies:
        own = f"{path}.{os.getpid()}.part"
        shutil.copy2(path, own)
        os.replace(own, path)  # another rank may do the same at the same time
        return
    try:
        os.unlink(path)
    except FileNotFoundError:  # another rank was first
        return
