"""Writes a checkpoint beside training: what is to be written is copied, and a thread writes it.

Collectives belong to training, so the ranks' threads meet in the draft's folder: each leaves a
note when its part is on the disk, rank 0 waits for all notes and gives the checkpoint its name,
and the others see that, or read rank 0's note of what went wrong.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.byte_ranges import ByteRange
from shardwise.checkpoint.checksum import Part
from shardwise.checkpoint.folders import DOCUMENT, Draft
from shardwise.checkpoint.writer import Sink, Tensor, Writer

PAUSE = 0.02
"""Seconds between looks at the folder."""


class Copies:
    """A sink that copies what it is given; its memory serves one save after the other."""

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

    def play(self, sink: Sink) -> None:
        """Give all of it to `sink`."""
        for kind, ranges, memory in self._given:
            sink.write(kind, ranges, memory)
        sink.settle()


class Job(threading.Thread):
    """One save on its way; `failure` says what went wrong once the thread has ended.

    `finish` makes the checkpoint complete from the sums of all ranks; it is called on rank 0.
    The interpreter waits for the thread before it ends. `limit` (seconds) bounds how long a rank
    waits for the others after its own part.
    """

    def __init__(
        self,
        copies: Copies,
        writer: Writer,
        draft: Draft,
        finish: Callable[[Sequence[Mapping[Tensor, Sequence[Part]]]], None],
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
        told = {"sums": self._own()} if self.failure is None else {}
        try:
            _leave(self.draft.path, f"rank-{self._rank}", told | {"failure": self.failure})
            if self._rank == 0:
                self._complete()
            else:
                self._await()
        except Exception as error:  # nobody else would hear of it
            self.failure = self.failure or _said(error)

    def _own(self) -> list[Any]:
        """This rank's part, on the disk; its sums."""
        try:
            self._copies.play(self._writer)
            sums = self._writer.finish()
        except Exception as error:  # the others wait for a note, whatever went wrong
            self.failure = _said(error)
            return []
        finally:
            self._writer.close()
        return [
            [*tensor, [[p.at, p.nbytes, p.crc] for p in parts]] for tensor, parts in sums.items()
        ]

    def _complete(self) -> None:
        """On rank 0: when all have left their notes, the checkpoint gets its name."""
        notes = [self._note(f"rank-{rank}") for rank in range(self._size)]
        failed = [f"rank {r}: {n['failure']}" for r, n in enumerate(notes) if n["failure"]]
        if not failed:
            try:
                for rank in range(self._size):
                    _path(self.draft.path, f"rank-{rank}").unlink()
                self._finish([_sums(note["sums"]) for note in notes])
            except Exception as error:  # the same
                failed = [f"rank 0: {_said(error)}"]
        if failed:
            self.failure = failed[0]
            _leave(self.draft.path, "end", {"failure": failed[0]})

    def _await(self) -> None:
        """On another rank: until the checkpoint has its name, or rank 0 says why it has not."""
        deadline = time.monotonic() + self._limit
        end = _path(self.draft.path, "end")
        while time.monotonic() < deadline:
            if not self.draft.path.exists() and (self.draft.final / DOCUMENT).exists():
                return
            if end.exists():
                self.failure = str(json.loads(end.read_bytes())["failure"])
                return
            time.sleep(PAUSE)
        self.failure = f"rank 0 did not complete it within {self._limit:.0f} s"

    def _note(self, name: str) -> dict[str, Any]:
        deadline = time.monotonic() + self._limit
        path = _path(self.draft.path, name)
        while not path.exists():
            if time.monotonic() > deadline:
                return {"failure": f"it did not write its part within {self._limit:.0f} s"}
            time.sleep(PAUSE)
        note: dict[str, Any] = json.loads(path.read_bytes())
        return note


def _sums(told: Sequence[Any]) -> dict[Tensor, list[Part]]:
    return {(kind, name): [Part(*part) for part in parts] for kind, name, parts in told}


def _path(folder: Path, name: str) -> Path:
    return folder / f".{name}.note"


def _leave(folder: Path, name: str, note: Mapping[str, Any]) -> None:
    """A note that is there whole or not at all."""
    path = _path(folder, name)
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(note))
    aside.replace(path)


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'a file of it'} cannot be written: {error.strerror or error}"
    return f"{type(error).__name__}: {error}"
