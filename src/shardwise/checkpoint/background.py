"""Background save: a thread writes a checkpoint from a copy of the states.

Only the training thread may start collectives, so the ranks' threads communicate through files in
the draft's folder:

    each rank   writes its part, then a note with its checksums or its failure
    rank 0      waits for all notes, then renames the draft, or leaves a note of the failure
    others      wait until they see the rename or rank 0's note

Disk space for the notes is reserved before anything else is written, so that a failure can be
reported even if the disk is full.
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
"""Bytes reserved for the note of a failure: one block."""

PAUSE = 0.02
"""Seconds between polls of the folder."""


class Copies:
    """Sink that copies tensors, into memory that the next save reuses."""

    def __init__(self) -> None:
        self._memory: list[np.ndarray[Any, Any]] = []
        self._copied: list[tuple[str, Sequence[Extent], memoryview]] = []

    def begin(self) -> None:
        """Drop the copies of a save that failed before it was written."""
        self._copied = []

    def write(self, kind: str, ranges: Sequence[Extent], memory: memoryview) -> None:
        """Copy `memory`."""
        number = len(self._copied)
        if number == len(self._memory) or self._memory[number].nbytes != len(memory):
            # The plan has changed, so later copies differ too: drop them and start again.
            self._memory[number:] = [np.empty(len(memory), dtype=np.uint8)]
        np.copyto(self._memory[number], np.frombuffer(memory, dtype=np.uint8))
        self._copied.append((kind, ranges, self._memory[number].data))

    def settle(self) -> None:
        """No-op: the memory is copied."""

    def play(self, sink: TensorSink) -> None:
        """Write all copies to `sink`."""
        for kind, ranges, memory in self._copied:
            sink.write(kind, ranges, memory)
        sink.settle()


class BackgroundSave(threading.Thread):
    """Thread that writes one save. After it has ended, `failure` is an error message or None.

    It is not a daemon: the interpreter waits for it before it exits.

    Args:
        finish: Publishes the checkpoint with the checksums of all ranks; called on rank 0.
        limit: Seconds that a rank waits for the others after writing its own part.
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
        """Write this rank's part, leave a note, and wait for the result of all ranks."""
        with span("write", Row.BACKGROUND):
            sums = self._write_own_part()
        try:
            # Even after a failure: without a note, rank 0 would wait until the timeout.
            _leave_note(
                self.draft.path, f"rank-{self._rank}", {"sums": sums, "failure": self.failure}
            )
            with span("complete", Row.BACKGROUND):
                if self._rank == 0:
                    self._complete()
                else:
                    self._wait_for_rank_0()
        except Exception as error:  # no caller would see an exception of this thread
            self.failure = self.failure or self._describe(error)

    def _write_own_part(self) -> list[Any]:
        """Write this rank's part, and return its checksums."""
        try:
            self._copies.play(self._writer)
            sums = self._writer.finish()
        except Exception as error:  # the other ranks wait for a note even then
            self.failure = self._describe(error)
            return []
        finally:
            self._writer.close()
        return [
            [*tensor, [[p.at, p.nbytes, p.crc] for p in parts]] for tensor, parts in sums.items()
        ]

    def _complete(self) -> None:
        """Rank 0: wait for all notes, then publish the checkpoint."""
        # Wait for all notes even after a failure: a rank that still writes needs its folder.
        notes = [self._wait_for_note(rank) for rank in range(self._size)]
        failed = [f"Rank {r}: {n['failure']}" for r, n in enumerate(notes) if n["failure"]]
        if not failed:
            try:
                # Before the rename: a complete checkpoint has no notes in it.
                for rank in range(self._size):
                    _note_path(self.draft.path, f"rank-{rank}").unlink()
                self._finish(
                    [
                        {(kind, name): [ChecksumPart(*p) for p in ps] for kind, name, ps in sums}
                        for sums in (note["sums"] for note in notes)
                    ]
                )
            except Exception as error:  # the other ranks wait for rank 0's note
                failed = [f"Rank 0: {self._describe(error)}"]
        if failed:
            self.failure = failed[0]
            self.draft.empty()  # frees space for the note, and for other files
            _leave_note(self.draft.path, "end", {"failure": failed[0]})

    def _wait_for_rank_0(self) -> None:
        """Other ranks: wait until rank 0 has published the checkpoint or reported a failure."""
        deadline = time.monotonic() + self._limit
        end = _note_path(self.draft.path, "end")
        while time.monotonic() < deadline:
            # The rename is the only sign of success: rank 0 may fail until that moment.
            # Both checks: before the rename, an older checkpoint of the same step may have the
            # final name.
            if not self.draft.path.exists() and (self.draft.final / DOCUMENT).exists():
                return
            # Read without a lock: `_leave_note` publishes a complete note by a rename.
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
                # That rank was killed or its disk hangs. Training itself will report the former.
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
    """Reserve disk space for the note of `rank`. Raises OSError."""
    _unfinished_path(folder, f"rank-{rank}").write_bytes(b" " * RESERVED)


def _leave_note(folder: Path, name: str, note: Mapping[str, Any]) -> None:
    """Write a note atomically. If there is no space for all of it, write only the failure."""
    aside = _unfinished_path(folder, name)
    try:
        _write_note(aside, note)
    except OSError as error:
        # The reserved block always fits a short note, even on a full disk.
        _write_note(aside, {"failure": (note["failure"] or str(error))[: RESERVED // 8]})
    aside.replace(_note_path(folder, name))


def _unfinished_path(folder: Path, name: str) -> Path:
    return _note_path(folder, name).with_suffix(".writing")


def _write_note(path: Path, note: Mapping[str, Any]) -> None:
    """Overwrite the reserved space. JSON readers ignore the spaces after the value."""
    data = json.dumps(note).encode()
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(data)
        # Never shorter than the reserved block, so that the space stays reserved until the rename.
        file.truncate(max(len(data), RESERVED))
