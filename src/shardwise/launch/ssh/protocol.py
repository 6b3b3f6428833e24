"""Encodes and checks the messages between a launcher and its agents: lines of JSON. Pure.

    b'@shardwise {"kind": "output", "rank": 3, "stream": 1, "data": "loss 0.31\\n"}\\n'

Other lines come from what a login on the other host prints, and are passed on as they are. A NUL
byte is a sign of life, which either end sends every second. On the launcher's side another process
does so, and puts it in anywhere: JSON has no such byte.
"""

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from shardwise.errors import LaunchError
from shardwise.launch.failure_report import ExitStatus
from shardwise.launch.local_workers import RankExit
from shardwise.net.error_file import ErrorReport
from shardwise.net.progress import Progress

T = TypeVar("T")
Message = dict[str, Any]

HEARTBEAT = b"\0"
_MARK = b"@shardwise "


def encode(kind: str, **values: Any) -> bytes:
    """One message as a line."""
    return _MARK + json.dumps({"kind": kind, **values}).encode() + b"\n"


Kinds = Mapping[str, Mapping[str, Any]]
"""By kind of message, its fields and their types."""

_NUMBER, _TEXT_OR_NONE = (int, float), (str, type(None))
TO_AGENT: Kinds = {
    "check": {
        "words": [str],
        "module": bool,
        "patience": _NUMBER,
        "interface_name": _TEXT_OR_NONE,
        "listens": bool,
        "address": str,
        "towards": str,
        "port": int,
    },
    "start": {"task": dict},
    "signal": {"number": int, "part": int},
    "ask": {"number": int, "part": int},
    "ended": {"rank": int, "part": int},
    "resize": {"window": [int]},
    "close": {},
}
TO_ISLANDS: Kinds = {
    "serve": {"secret": str, "ranks": int, "islands": int},
    "listen": {"island": int, "address": str},
    "start_island": {"task": dict, "island": int, "count": int, "returns": bool},
    "keep": {"rank": int, "number": int, "data": str},
    "fetch": {"rank": int, "number": int, "address": str, "port": int},
    "settle": {"deliveries": [dict], "dropped": [[int]]},
    "shut": {"ranks": [int]},
}
"""The same where islands may end and come back: see agent_islands.py."""

FROM_AGENT: Kinds = {
    "hello": {
        "version": str,
        "torch": _TEXT_OR_NONE,
        "python": str,
        "time": _NUMBER,
        "address": str,
        "machine": _TEXT_OR_NONE,
        "pid": int,
    },
    "ready": {"command": [str], "address": str, "port": int, "master_port": int},
    "refused": {"why": str},
    "output": {"rank": int, "stream": int, "data": str},
    "end": {
        "end": dict,
        "how": str,
        "report": (dict, type(None)),
        "progress": (dict, type(None)),
        "alone": bool,
    },
    "saves": {"number": int},
}
FROM_ISLANDS: Kinds = {
    "serving": {},
    "listening": {"island": int, "port": int, "master_port": int},
    "unstarted": {"island": int, "why": str},
    "came": {
        "rank": int,
        "number": int,
        "size": int,
        "label": str,
        "alone": bool,
        "resumes": bool,
        "data": _TEXT_OR_NONE,
    },
    "back": {"rank": int},
    "who": {"rank": int},
    "fetched": {"rank": int, "number": int},
    "unfetched": {"rank": int, "number": int, "why": str},
}
OF_A_RANK = ("came", "back", "who")
"""Those of them that tell of a rank that runs there."""

MOST = 2**26
"""Bytes of the longest line."""


class ProtocolError(LaunchError):
    """A line that is no message of this version; says what is wrong with it."""


class MessageReader:
    """Cuts bytes into messages of `kinds` for `take`, and other lines for `noise`.

    Raises ProtocolError for a message that cannot be.
    """

    def __init__(
        self, kinds: Kinds, take: Callable[[Message], None], noise: Callable[[bytes], None]
    ) -> None:
        self._kinds = kinds
        self._take = take
        self._noise = noise
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take `data`, which may end anywhere."""
        *lines, self._rest = (self._rest + data.replace(HEARTBEAT, b"")).split(b"\n")
        for line in lines:
            noise, mark, message = line.partition(_MARK)
            if noise or not mark:
                self._noise(noise + b"\n")
            if mark:
                self._take(_checked(message, self._kinds))
        if len(self._rest) > MOST:
            raise ProtocolError(f"a line of more than {MOST} bytes")


def _checked(text: bytes, kinds: Kinds) -> Message:
    """Parse and check a message. Raises ProtocolError."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError(f"{text[:60]!r} is no message") from None
    kind = message.get("kind") if isinstance(message, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ProtocolError(f"{text[:60]!r} is no message that is known here")
    found: Message = message
    _check(kind, {name: value for name, value in message.items() if name != "kind"}, kinds[kind])
    return found


def _check(what: str, fields: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    if fields.keys() != types.keys():
        raise ProtocolError(f"{what!r} has the fields {sorted(fields)} and not {sorted(types)}")
    for name, value in fields.items():
        if not _fits(value, types[name]):
            raise ProtocolError(f"{what!r} has {name}={str(value)[:40]!r}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, [T] for some of T."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(each, kind[0]) for each in value)
    if isinstance(kind, tuple):
        return any(_fits(value, each) for each in kind)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def build(made: type[T], fields: Mapping[str, Any], **given: Any) -> T:
    """Build `made`, a dataclass, from fields as JSON has them, and those `given`.

    Raises ProtocolError.
    """
    hints = get_type_hints(made).items()
    _check(made.__name__, fields, {name: _plain(hint) for name, hint in hints if name not in given})
    return made(**fields, **given)


def _plain(hint: Any) -> Any:
    """Return what JSON has for a type."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return tuple(_plain(part) for part in parts)
    if kind is tuple:
        return [_plain(parts[0])]
    if kind is float:
        return (int, float)
    return dict if issubclass(kind, Mapping) else kind


def signal_of(number: int) -> signal.Signals:
    """Return the signal of a number. Raises ProtocolError."""
    try:
        return signal.Signals(number)
    except ValueError:
        raise ProtocolError(f"{number} is no signal") from None


def text_of(data: bytes) -> str:
    """Encode any bytes as a string that JSON can carry; `bytes_of` gives them back."""
    return data.decode("latin-1")


def bytes_of(text: str) -> bytes:
    """Decode what `text_of` made. Raises ProtocolError for what it never makes."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ProtocolError("output that is no bytes") from None


def rank_exit(message: Message, offset: float) -> RankExit:
    """Build a rank's exit from its message; `offset` is added to its clock, in seconds.

    Raises ProtocolError.
    """
    report, progress = message["report"], message["progress"]
    end, found = (
        build(ExitStatus, message["end"]),
        None if report is None else build(ErrorReport, report),
    )
    return RankExit(
        end=replace(end, time=end.time + offset),
        how=message["how"],
        report=None if found is None else replace(found, time=found.time + offset),
        progress=None if progress is None else build(Progress, progress),
        alone=message["alone"],
    )
