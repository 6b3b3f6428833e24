"""What a launcher and its agents on other hosts tell each other: lines of JSON. Pure.

    b'@shardwise {"kind": "output", "rank": 3, "stream": 1, "data": "loss 0.31\\n"}\\n'

Other lines come from what a login on the other host prints, and are passed on as they are. A NUL
byte is a sign of life, which another process may put in between anywhere: JSON has none.
"""

import json
from collections.abc import Callable
from typing import Any

from shardwise.launch.crew import Departure
from shardwise.launch.progress import Progress
from shardwise.launch.report import Report
from shardwise.launch.verdict import End

Message = dict[str, Any]

PULSE = b"\0"
_MARK = b"@shardwise "


def encode(kind: str, **values: Any) -> bytes:
    """One message as a line."""
    return _MARK + json.dumps({"kind": kind, **values}).encode() + b"\n"


class Receiver:
    """Takes bytes as they come; gives whole messages to `take` and other lines to `noise`."""

    def __init__(self, take: Callable[[Message], None], noise: Callable[[bytes], None]) -> None:
        self._take = take
        self._noise = noise
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take `data`, which may end anywhere."""
        *lines, self._rest = (self._rest + data.replace(PULSE, b"")).split(b"\n")
        for line in lines:
            noise, mark, message = line.partition(_MARK)
            if noise or not mark:
                self._noise(noise + b"\n")
            if mark:
                self._take(json.loads(message))


def text_of(data: bytes) -> str:
    """Any bytes as a string that JSON can carry; `bytes_of` gives them back."""
    return data.decode("latin-1")


def bytes_of(text: str) -> bytes:
    """The bytes that `text_of` was given."""
    return text.encode("latin-1")


def departure(message: Message, offset: float) -> Departure:
    """A rank's end as it was told; `offset` is added to its clock, in seconds."""
    end, report, progress = message["end"], message["report"], message["progress"]
    end["time"] += offset
    if report is not None:
        report["time"] += offset
    return Departure(
        end=End(**end),
        how=message["how"],
        report=None if report is None else Report(**report),
        progress=None if progress is None else Progress(**progress),
    )
