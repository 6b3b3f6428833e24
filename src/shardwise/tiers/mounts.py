"""What a folder lies on: a disk, or memory that looks like one."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

IN_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"})
"""File systems whose files are memory."""

MOUNTS = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """A mounted file system: where, and of what type (ext4, xfs, tmpfs, ...)."""

    point: Path
    kind: str


def mount_of(folder: Path) -> Mount:
    """The file system that `folder` lies on, as the kernel lists it."""
    # Bytes: names of other people's mounts need not be UTF-8.
    return find(folder.resolve(), os.fsdecode(MOUNTS.read_bytes()))


def find(folder: Path, mountinfo: str) -> Mount:
    """The mount that holds the absolute path `folder`, out of the text of a mountinfo file.

    Of several on one mount point the last one counts: it lies on top.
    """
    mounts = [_parse(line) for line in mountinfo.splitlines()]
    holding = [mount for mount in mounts if folder.is_relative_to(mount.point)]
    return max(reversed(holding), key=lambda mount: len(mount.point.parts))


def _parse(line: str) -> Mount:
    """One line; see proc_pid_mountinfo(5). Optional fields end with a lone hyphen."""
    left, _, right = line.partition(" - ")
    return Mount(Path(_plain(left.split(" ")[4])), right.split(" ")[0])


def _plain(escaped: str) -> str:
    """The kernel writes blanks and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), escaped)
