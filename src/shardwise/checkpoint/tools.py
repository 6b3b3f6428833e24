"""Inspects and verifies checkpoints outside a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint import document
from shardwise.checkpoint.atomic_folders import newest
from shardwise.checkpoint.file_system import read_whole
from shardwise.checkpoint.format import TensorSpec
from shardwise.checkpoint.reader import SafetensorsReader, open_set
from shardwise.errors import BrokenCheckpoint


@dataclass(frozen=True)
class TensorLine:
    """A tensor in a checkpoint.

    Args:
        kind: Name of its set.
        spec: Name, dtype and shape.
        file: Name of the file that contains it.
        checksum: Stored CRC-32 as 8 hexadecimal digits, or "" if there is none.
    """

    kind: str
    spec: TensorSpec
    file: str
    checksum: str


class OpenedCheckpoint:
    """Context manager that opens a checkpoint and closes its files on exit.

    Args:
        path: Folder of one step, or a folder of several steps, the newest of which is opened.

    Raises:
        CheckpointError: The checkpoint does not exist.
        BrokenCheckpoint: A file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = newest(path)
        self.fields = document.load(self.path)
        self._stack = ExitStack()
        # If a file is damaged, `opening` closes those opened before it.
        self.sets: dict[str, SafetensorsReader] = {}
        with ExitStack() as opening:
            for kind, names in self.fields["sets"].items():
                opened = open_set(self.path, names, self.fields["files"])
                self.sets[kind] = opening.enter_context(closing(opened))
            self._stack = opening.pop_all()

    def __enter__(self) -> OpenedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def is_summed(self) -> bool:
        """Whether checkpoint.json has its own checksum. Early versions did not write one."""
        return bool(self.fields["version"] > document.UNSUMMED)

    def lines(self) -> Iterator[TensorLine]:
        """Yield all tensors, sorted by name within each set."""
        for kind, tensors in self.sets.items():
            for name in sorted(tensors.specs):
                written = self.fields["checksums"].get(kind, {}).get(name, "")
                yield TensorLine(kind, tensors.specs[name], tensors.file_of(name), written)

    def verify_tensors(self) -> Iterator[tuple[TensorLine, bool]]:
        """Yield each tensor, and whether its bytes match the stored checksum."""
        for line in self.lines():
            yield line, self.sets[line.kind].checksum(line.spec.name) == line.checksum

    def changed_files(self) -> list[str]:
        """Return the names of the small files that have changed or are missing."""
        tensors = {name for names in self.fields["sets"].values() for name in names}
        names = []
        for name, written in self.fields["files"].items():
            if name not in tensors:  # the reader has already checked the headers of tensor files
                try:
                    good = document.crc_of(read_whole(self.path / name)) == written
                except (OSError, BrokenCheckpoint):
                    good = False
                names += [] if good else [name]
        return names

    def missing_tensors(self) -> list[str]:
        """Return the tensors that have a checksum but are not in any file."""
        return [
            f"{kind}: {name}"
            for kind, sums in self.fields["checksums"].items()
            for name in sums
            if kind not in self.sets or name not in self.sets[kind].specs
        ]


def summary(opened: OpenedCheckpoint) -> dict[str, Any]:
    """Return a checkpoint's step, seed, optimizers, tracked objects and versions, for display."""
    fields = opened.fields
    written = fields["written_by"]
    return {
        "step": fields["step"],
        "seed": fields["seed"],
        "optimizers": ", ".join(str(optimizer.get("class")) for optimizer in fields["optimizers"]),
        "tracked": ", ".join(sorted(fields["tracked"])) or "nothing",
        "written by": ", ".join(f"{key} {value}" for key, value in written.items()),
    }
