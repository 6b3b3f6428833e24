"""Writes a checkpoint beside training, by a thread, from a copy of the states.

Collectives belong to training, so the ranks' threads meet in the draft's folder: each leaves a
note when its part is on the disk, rank 0 waits for all notes and gives the checkpoint its name,
and the others see that, or read rank 0's note of what went wrong. Room for the notes is taken
before anything else is written, so that a full disk cannot silence them.
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
from shardwise.checkpoint.writer import Tensor, TensorSink, Writer
from shardwise.layout.byte_ranges import ByteRange
from shardwise.timeline import Row, span

RESERVED = 4096
"""Bytes that a note of a failure may have: one block."""

PAUSE = 0.02
"""Seconds between looks at the folder."""


class Copies:
    """Copies the tensors that it is given; its memory serves one save after the other."""

    def __init__(self) -> None:
        self._memory: list[np.ndarray[Any, Any]] = []
        self._given: list[tuple[str, Sequence[ByteRange], memoryview]] = []

    def begin(self) -> None:
        """Forget what was given for a save that did not come to be written."""
        self._given = []

    def write(self, kind: str, ranges: Sequence[ByteRange], memory: memoryview) -> None:
        """Copy `memory`."""
        number = len(self._given)
        if number == len(self._memory) or self._memory[number].nbytes != len(memory):
            self._memory[number:] = [np.empty(len(memory), dtype=np.uint8)]
        np.copyto(self._memory[number], np.frombuffer(memory, dtype=np.uint8))
        self._given.append((kind, ranges, self._memory[number].data))

    def settle(self) -> None:
        """It was copied."""

    def play(self, sink: TensorSink) -> None:
        """Give all of it to `sink`."""
        for kind, ranges, memory in self._given:
            sink.write(kind, ranges, memory)
        sink.settle()


class BackgroundSave(threading.Thread):
    """A thread that writes one save; `failure` says what went wrong once the thread has ended.

    `finish` makes the checkpoint complete from the sums of all ranks; it is called on rank 0.
    The interpreter waits for the thread before it ends. `limit` (seconds) bounds how long a rank
    waits for the others after its own part.
    """

    def __init__(
        self,
        copies: Copies,
        writer: Writer,
        draft: Draft,
        finish: Callable[[Sequence[Mapping[Tensor, Sequence[ChecksumPart]]]], None],
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
        """Write, leave a note, and see how it ends for all."""
        with span("write", Row.BACKGROUND):
            sums = self._own()
        try:
            _leave(self.draft.path, f"rank-{self._rank}", {"sums": sums, "failure": self.failure})
            with span("complete", Row.BACKGROUND):
                if self._rank == 0:
                    self._complete()
                else:
                    self._await()
        except Exception as error:  # nobody else would hear of it
            self.failure = self.failure or self._said(error)

    def _own(self) -> list[Any]:
        """This rank's part, on the disk; its sums."""
        try:
            self._copies.play(self._writer)
            sums = self._writer.finish()
        except Exception as error:  # the others wait for a note, whatever went wrong
            self.failure = self._said(error)
            return []
        finally:
            self._writer.close()
        return [
            [*tensor, [[p.at, p.nbytes, p.crc] for p in parts]] for tensor, parts in sums.items()
        ]

    def _complete(self) -> None:
        """On rank 0: when all have left their notes, the checkpoint gets its name."""
        # All of them, also after a failure: a rank that still writes must not lose its folder.
        notes = [self._note_of(rank) for rank in range(self._size)]
        failed = [f"Rank {r}: {n['failure']}" for r, n in enumerate(notes) if n["failure"]]
        if not failed:
            try:
                # Before the rename: a complete checkpoint has no notes in it.
                for rank in range(self._size):
                    _path(self.draft.path, f"rank-{rank}").unlink()
                self._finish(
                    [
                        {(kind, name): [ChecksumPart(*p) for p in ps] for kind, name, ps in sums}
                        for sums in (note["sums"] for note in notes)
                    ]
                )
            except Exception as error:  # the same
                failed = [f"Rank 0: {self._said(error)}"]
        if failed:
            self.failure = failed[0]
            self.draft.empty()  # so that there is room for the note, and for others
            _leave(self.draft.path, "end", {"failure": failed[0]})

    def _await(self) -> None:
        """On another rank: until the checkpoint has its name, or rank 0 says why it has not."""
        deadline = time.monotonic() + self._limit
        end = _path(self.draft.path, "end")
        while time.monotonic() < deadline:
            # The rename is the only sign of success: rank 0 may fail until that moment.
            if not self.draft.path.exists() and (self.draft.final / DOCUMENT).exists():
                return
            if end.exists():
                self.failure = str(json.loads(end.read_bytes())["failure"])
                return
            time.sleep(PAUSE)
        self.failure = f"Rank 0 did not complete {self.draft.final} within {self._limit:.0f} s."

    def _note_of(self, rank: int) -> dict[str, Any]:
        deadline = time.monotonic() + self._limit
        path = _path(self.draft.path, f"rank-{rank}")
        while not path.exists():
            if time.monotonic() > deadline:
                late = f"{self.draft.final} lacks its part after {self._limit:.0f} s."
                return {"failure": late}
            time.sleep(PAUSE)
        note: dict[str, Any] = json.loads(path.read_bytes())
        return note

    def _said(self, error: Exception) -> str:
        if isinstance(error, OSError):
            return self.draft.refused(error)
        return f"{self.draft.final} was not written. {type(error).__name__}: {error}"


def _path(folder: Path, name: str) -> Path:
    return folder / f".{name}.note"


def reserve(folder: Path, rank: int) -> None:
    """Take the room that the note of `rank` needs at least. Raises OSError."""
    _aside(folder, f"rank-{rank}").write_bytes(b" " * RESERVED)


def _leave(folder: Path, name: str, note: Mapping[str, Any]) -> None:
    """A note that is there whole or not at all; where it has no room, it only says so."""
    aside = _aside(folder, name)
    try:
        _write(aside, note)
    except OSError as error:
        _write(aside, {"failure": (note["failure"] or str(error))[: RESERVED // 8]})
    aside.replace(_path(folder, name))


def _aside(folder: Path, name: str) -> Path:
    return _path(folder, name).with_suffix(".writing")


def _write(path: Path, note: Mapping[str, Any]) -> None:
    """Over what is there, which needs no more room; JSON minds no spaces after it."""
    data = json.dumps(note).encode()
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(data)
        file.truncate(max(len(data), RESERVED))
