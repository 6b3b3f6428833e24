"""Writes a checkpoint in a background thread, from a copy of the states.

Only the training thread may start collectives, so the ranks' background threads communicate through
files in the draft's folder:

    each rank     writes its part, and then a note with its checksums or its error
    rank 0        waits for all notes, and then renames the draft, or writes a note with the error
    other ranks   wait until they see the rename or rank 0's note

Each rank reserves disk space for its note before it writes any tensor, so that it can report an
error even if the disk is full.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.atomic_folders import DOCUMENT, Draft
from shardwise.checkpoint.checksum import ChecksumPart
from shardwise.checkpoint.writer import TensorKey, TensorSink, Writer
from shardwise.layout.byte_ranges import Extent
from shardwise.timeline import Row, span

RESERVED = 4096
"""Number of bytes reserved for a note about an error: one disk block."""

PAUSE = 0.02
"""Time between two polls of the folder, in seconds."""


class Copies:
    """TensorSink that copies tensors to CPU memory. Later saves reuse the memory."""

    def __init__(self) -> None:
        self._memory: list[np.ndarray[Any, Any]] = []
        self._copied: list[tuple[str, Sequence[Extent], memoryview]] = []

    def begin(self) -> None:
        """Discard the previous save's copies, but do not free their memory."""
        self._copied = []

    def write(self, kind: str, ranges: Sequence[Extent], memory: memoryview) -> None:
        """Copy `memory`, and record its tensor set `kind` and its `ranges` for `play`."""
        number = len(self._copied)
        if number == len(self._memory) or self._memory[number].nbytes != len(memory):
            # The sizes differ from the previous save, so free the rest of its memory too.
            self._memory[number:] = [np.empty(len(memory), dtype=np.uint8)]
        np.copyto(self._memory[number], np.frombuffer(memory, dtype=np.uint8))
        self._copied.append((kind, ranges, self._memory[number].data))

    def settle(self) -> None:
        """No-op, because `write` has already copied the memory."""

    def play(self, sink: TensorSink) -> None:
        """Write all copies to `sink`, in their original order."""
        for kind, ranges, memory in self._copied:
            sink.write(kind, ranges, memory)
        sink.settle()


class BackgroundSave(threading.Thread):
    """Thread that writes one save.

    It is not a daemon thread, so the interpreter waits for it before exiting.

    Args:
        finish: Publishes the checkpoint, given the checksums from every rank. Called on rank 0.
        limit: Maximum time in seconds to wait for other ranks after writing this rank's part.

    Attributes:
        failure: An error message if the save failed, else None. Valid once the thread has finished.
    """

    def __init__(
        self,
        copies: Copies,
        writer: Writer,
        draft: Draft,
        finish: Callable[[Sequence[Mapping[TensorKey, Sequence[ChecksumPart]]]], None],
        *,
        rank: int,
        size: int,
        limit: float,
    ) -> None:
        super().__init__(name="shardwise-checkpoint")
        self.draft = draft
        self.failure: str | None = None
        self._copies, self._writer, self._finish = copies, writer, finish
        self._rank, self._size, self._limit = rank, size, limit

    def run(self) -> None:
        """Write this rank's part and its note, and then wait for the result of the save."""
        with span("write", Row.BACKGROUND):
            sums = self._write_own_part()
        try:
            # Write the note even after an error. Otherwise rank 0 would wait until the timeout.
            _leave_note(
                self.draft.path, f"rank-{self._rank}", {"sums": sums, "failure": self.failure}
            )
            with span("complete", Row.BACKGROUND):
                if self._rank == 0:
                    self._complete()
                else:
                    self._wait_for_rank_0()
        except Exception as error:  # an exception in this thread would not reach any caller
            self.failure = self.failure or self._describe(error)

    def _write_own_part(self) -> list[Any]:
        """Write this rank's part. Return its checksums, or [] if an error occurred."""
        try:
            self._copies.play(self._writer)
            sums = self._writer.finish()
        except Exception as error:  # catch everything, because other ranks wait for the note
            self.failure = self._describe(error)
            return []
        finally:
            self._writer.close()
        return [
            [*tensor, [[p.at, p.nbytes, p.crc] for p in parts]] for tensor, parts in sums.items()
        ]

    def _complete(self) -> None:
        """Wait for all ranks' notes, and then publish the checkpoint. Called on rank 0."""
        # Even if a rank has failed, wait for the others, because they still write to the folder.
        notes = [self._wait_for_note(rank) for rank in range(self._size)]
        failed = [f"Rank {r}: {n['failure']}" for r, n in enumerate(notes) if n["failure"]]
        if not failed:
            try:
                # Remove them first, because a complete checkpoint must not contain notes.
                for rank in range(self._size):
                    _note_path(self.draft.path, f"rank-{rank}").unlink()
                self._finish(
                    [
                        {(kind, name): [ChecksumPart(*p) for p in ps] for kind, name, ps in sums}
                        for sums in (note["sums"] for note in notes)
                    ]
                )
            except Exception as error:  # catch everything, because other ranks wait for the note
                failed = [f"Rank 0: {self._describe(error)}"]
        if failed:
            self.failure = failed[0]
            self.draft.empty()  # frees disk space for the note and for everything else
            _leave_note(self.draft.path, "end", {"failure": failed[0]})

    def _wait_for_rank_0(self) -> None:
        """Wait until rank 0 has published the checkpoint or reported an error.

        Called on all other ranks.
        """
        deadline = time.monotonic() + self._limit
        end = _note_path(self.draft.path, "end")
        while time.monotonic() < deadline:
            # Only the rename shows success, because rank 0 may fail before it. Check both paths:
            # before the rename, an older checkpoint of the same step may have the final name.
            if not self.draft.path.exists() and (self.draft.final / DOCUMENT).exists():
                return
            # No lock is needed, because `_leave_note` publishes complete notes by a rename.
            if end.exists():
                self.failure = str(json.loads(end.read_bytes())["failure"])
                return
            time.sleep(PAUSE)
        self.failure = f"Rank 0 did not complete {self.draft.final} within {self._limit:.0f} s."

    def _wait_for_note(self, rank: int) -> dict[str, Any]:
        deadline = time.monotonic() + self._limit
        path = _note_path(self.draft.path, f"rank-{rank}")
        while not path.exists():
            if time.monotonic() > deadline:
                # The rank was killed or its disk hangs. If it was killed, training reports that.
                late = f"{self.draft.final} lacks its part after {self._limit:.0f} s."
                return {"failure": late}
            time.sleep(PAUSE)
        note: dict[str, Any] = json.loads(path.read_bytes())
        return note

    def _describe(self, error: Exception) -> str:
        if isinstance(error, OSError):
            return self.draft.describe_error(error)
        return f"{self.draft.final} was not written. {type(error).__name__}: {error}"


def _note_path(folder: Path, name: str) -> Path:
    return folder / f".{name}.note"


def reserve(folder: Path, rank: int) -> None:
    """Reserve disk space for the note of `rank`. Raises OSError if the disk fails or is full."""
    _unfinished_path(folder, f"rank-{rank}").write_bytes(b" " * RESERVED)


def _leave_note(folder: Path, name: str, note: Mapping[str, Any]) -> None:
    """Write a note atomically. If the disk is full, write only the note's error message."""
    aside = _unfinished_path(folder, name)
    try:
        _write_note(aside, note)
    except OSError as error:
        # A short note fits into the reserved block, even on a full disk.
        _write_note(aside, {"failure": (note["failure"] or str(error))[: RESERVED // 8]})
    aside.replace(_note_path(folder, name))


def _unfinished_path(folder: Path, name: str) -> Path:
    return _note_path(folder, name).with_suffix(".writing")


def _write_note(path: Path, note: Mapping[str, Any]) -> None:
    """Write a note into the space reserved for it. JSON parsers ignore the padding spaces."""
    # If the write of a longer note has failed, the spaces overwrite the rest of it.
    data = json.dumps(note).encode().ljust(RESERVED)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(data)
        # Such a write may have left data beyond the block, too.
        file.truncate(len(data))
