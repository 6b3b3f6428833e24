"""Encodes a rank's events as JSON lines in Chrome's trace format.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from shardwise.timeline.recorder import FURTHER_STEPS, LANES, WIDEST, Row, TimelineEvent

LONGEST = 100
"""Maximum length of a text in characters. With it, every line fits into a page of the file."""


class Encoder:
    """Encodes the events of rank `rank`, which runs on `host`.

    `ahead` is the number of nanoseconds by which this host's clock is ahead of rank 0's clock.
    Times in the file are times of rank 0's clock.
    """

    def __init__(self, rank: int, host: str) -> None:
        self.ahead = 0
        self._rank = rank
        self._host = host
        self._named: set[int] = set()
        self._ends: dict[Row, list[int]] = {row: [] for row in LANES}
        self._engines: list[int | str] = []
        self._flows = 0

    def opening(self) -> list[str]:
        """Return the lines that contain the name and sort position of this rank's process."""
        return [
            self._metadata("process_name", 0, {"name": f"rank {self._rank}"}),
            self._metadata("process_labels", 0, {"labels": self._host[:LONGEST]}),
            self._metadata("process_sort_index", 0, {"sort_index": self._rank}),
        ]

    def lines(self, notes: Iterable[TimelineEvent]) -> Iterator[str]:
        """Yield the lines of each event. A row's first event is preceded by the row's name."""
        for note in notes:
            row = note.row
            thread = self._thread(note)
            if thread not in self._named:
                self._named.add(thread)
                yield from self._name(row, thread)
            category = _CATEGORIES[row] if note.category is None else _quoted(note.category)
            yield self._complete(note, category, thread)
            if row is Row.COMMUNICATION:
                yield from self._flow(note, thread)

    def counter(self, now: int, values: Mapping[str, float]) -> str:
        """Return the line that shows memory in use: `values` in megabytes, at time `now`."""
        rounded = {name: round(value, 1) for name, value in values.items()}
        event = {"name": "memory (MB)", "cat": "memory", "ph": "C", "ts": (now - self.ahead) / 1000}
        return _line(event | {"pid": self._rank, "tid": 0, "args": rounded})

    def _complete(self, note: TimelineEvent, category: str, thread: int) -> str:
        # Formatted by hand, because the json module takes ten times as long and there are thousands
        # of events per second. Times are in microseconds, as the format requires.
        begin, lasted = (note.began - self.ahead) / 1000, (note.ended - note.began) / 1000
        about = ""
        if note.about:
            pairs = (
                f"{_quoted(name)}:{_quoted(value) if isinstance(value, str) else value}"
                for name, value in note.about.items()
            )
            about = f',"args":{{{",".join(pairs)}}}'
        return (
            f'{{"name":{_quoted(note.name)},"cat":{category},"ph":"X","ts":{begin:.3f},'
            f'"dur":{lasted:.3f},"pid":{self._rank},"tid":{thread}{about}}}'
        )

    def _thread(self, note: TimelineEvent) -> int:
        if note.row in self._ends:
            return self._lane(note)
        if note.row is not Row.STEPS:
            return int(note.row)
        # Steps of engines that take turns (as in a GAN) overlap, so each engine has a row.
        engine = (note.about or {}).get("engine", 0)
        if engine not in self._engines:
            self._engines.append(engine)
        number = min(self._engines.index(engine), WIDEST)
        return int(Row.STEPS) if number == 0 else FURTHER_STEPS + number - 1

    def _lane(self, note: TimelineEvent) -> int:
        """Return the first thread of the event's row on which it overlaps no other event."""
        # Events arrive in the order of their ends, so the last end of each lane is sufficient.
        ends = self._ends[note.row]
        free = (lane for lane, end in enumerate(ends) if end <= note.began)
        lane = next(free, min(len(ends), WIDEST - 1))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = note.ended
        return note.row + lane

    def _name(self, row: Row, thread: int) -> Iterator[str]:
        further = row is Row.STEPS and thread >= FURTHER_STEPS
        number = thread - FURTHER_STEPS + 2 if further else thread - row + 1
        order = int(row) if further else thread
        title = row.title if number == 1 else f"{row.title} {number}"
        yield self._metadata("thread_name", thread, {"name": title})
        yield self._metadata("thread_sort_index", thread, {"sort_index": order})

    def _flow(self, note: TimelineEvent, thread: int) -> Iterator[str]:
        # A pair of flow events: viewers draw an arrow from "s" (start, on the compute row, at the
        # launch) to "f" (finish, at the collective).
        self._flows += 1
        begin = (note.began - self.ahead) / 1000
        about = (
            f'"name":"launched","cat":"launch","pid":{self._rank},"ts":{begin:.3f},'
            f'"id":"{self._rank}-{self._flows}"'
        )
        yield f'{{"ph":"s","tid":{int(Row.COMPUTE)},{about}}}'
        yield f'{{"ph":"f","bp":"e","tid":{thread},{about}}}'

    def _metadata(self, name: str, thread: int, about: Mapping[str, Any]) -> str:
        return _line({"name": name, "ph": "M", "pid": self._rank, "tid": thread, "args": about})


def _line(event: Mapping[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _quoted(text: str) -> str:
    return encode_basestring_ascii(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")


_CATEGORIES = {row: _quoted(row.title) for row in Row}


MB = 1e6


def memory_in_use() -> dict[str, float]:
    """Return this process's memory use in megabytes, by name.

    It includes the resident set and, if the process uses an accelerator, the tensors on the device.
    """
    try:
        with open("/proc/self/statm", "rb") as table:
            resident = int(table.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS has no /proc; its ru_maxrss is the peak so far, in bytes
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    megabytes = {"resident set": resident / MB}
    # Do not import torch: a rank that records before it loads torch must not load it in this
    # thread.
    torch: Any = sys.modules.get("torch")
    if torch is not None and (nbytes := _on_device(torch)) is not None:
        megabytes["device"] = nbytes / MB
    return megabytes


def _on_device(torch: Any) -> int | None:
    """Return the bytes that tensors occupy on the accelerator, or None if none is in use."""
    if (device := torch.accelerator.current_accelerator(check_available=True)) is None:
        return None
    module: Any = torch.get_device_module(device)
    # Querying an uninitialised device would initialise it, which takes memory and time.
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    allocated = getattr(module, "memory_allocated", None) or module.current_allocated_memory
    return int(allocated())
