"""Which ranks have ended with code 0, as their launcher tells those that wait to meet them.

It tells of a rank of which no process is left: what goes on in the background may still come.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shardwise.launch.report import DIRECTORY_VARIABLE


def tell(folder: Path, rank: int) -> None:
    """Let the other ranks of this host, whose reports lie in `folder`, know that `rank` ended."""
    with suppress(OSError):  # a full disk: they wait until --timeout then
        _mark(folder, rank).touch()


def among(ranks: Iterable[int]) -> list[int]:
    """Those of `ranks` that have ended, as far as the launcher of this process has told."""
    folder = os.environ.get(DIRECTORY_VARIABLE)
    return [] if folder is None else [r for r in ranks if _mark(Path(folder), r).exists()]


def _mark(folder: Path, rank: int) -> Path:
    return folder / f"departed-{rank}"
