"""Encodes and checks the messages between a launcher and its agents: lines of JSON. Pure.

    b'@shardwise {"kind": "output", "rank": 3, "stream": 1, "data": "loss 0.31\\n"}\\n'

A login on the other host may print other lines, which are forwarded unchanged. Either end sends a
NUL byte every second as a sign of life. The launcher's heartbeat is another process, which may
insert the byte anywhere. That is harmless, because JSON never contains it.
"""

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
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
    """Encode a message as a line."""
    return _MARK + json.dumps({"kind": kind, **values}).encode() + b"\n"


Kinds = Mapping[str, Mapping[str, Any]]
"""By kind of message, its fields and their types."""

_NUMBER, _TEXT_OR_NONE = (int, float), (str, type(None))
TO_AGENT: Kinds = {
    "check": {
        "spec": dict,
        "listens": bool,
        "address": str,
        "towards": str,
    },
    "start": {"meeting": dict, "streams": dict},
    "signal": {"number": int, "part": int},
    "ask": {"number": int, "part": int},
    "ended": {"rank": int, "part": int},
    "resize": {"window": [int]},
    "close": {},
}
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
    "ready": {"address": str, "port": int, "master_port": int},
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
MOST = 2**26
"""Length limit of a line in bytes."""


class ProtocolError(LaunchError):
    """A line that is not a valid message of this version."""


class MessageReader:
    """Cuts bytes into messages, which go to `take`, and other lines, which go to `noise`.

    Raises ProtocolError for a message that is not of `kinds`.
    """

    def __init__(
        self, kinds: Kinds, take: Callable[[Message], None], noise: Callable[[bytes], None]
    ) -> None:
        self._kinds = kinds
        self._take = take
        self._noise = noise
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Parse `data`, which may end anywhere."""
        *lines, self._rest = (self._rest + data.replace(HEARTBEAT, b"")).split(b"\n")
        for line in lines:
            # A login may print text without a newline, which ends up before our mark.
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
        raise ProtocolError(f"{text[:60]!r} is not a message") from None
    kind = message.get("kind") if isinstance(message, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ProtocolError(f"{text[:60]!r} is a message of an unknown kind")
    found: Message = message
    _check(kind, {name: value for name, value in message.items() if name != "kind"}, kinds[kind])
    return found


def _check(what: str, fields: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    if fields.keys() != types.keys():
        raise ProtocolError(f"{what!r} has the fields {sorted(fields)}, not {sorted(types)}")
    for name, value in fields.items():
        if not _fits(value, types[name]):
            raise ProtocolError(f"{what!r} has {name}={str(value)[:40]!r}")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has a type. [T] stands for a list of T, a tuple for alternatives."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(each, kind[0]) for each in value)
    if isinstance(kind, tuple):
        return any(_fits(value, each) for each in kind)
    # In Python a bool is an int, but not in our messages.
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def build(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Build a dataclass of type `kind`, which may contain others, from its fields in JSON.

    Raises ProtocolError.
    """
    hints = get_type_hints(kind)
    _check(kind.__name__, fields, {name: _json_type(hint) for name, hint in hints.items()})
    return kind(**{name: _restore(value, hints[name]) for name, value in fields.items()})


def _json_type(hint: Any) -> Any:
    """Return the type that represents `hint` in JSON."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return tuple(_json_type(part) for part in parts)
    if kind is tuple:
        return [_json_type(parts[0])]
    if kind is float:
        return (int, float)
    return dict if issubclass(kind, Mapping) or is_dataclass(kind) else kind


def _restore(value: Any, hint: Any) -> Any:
    """Convert a value from JSON to the type `hint`, such as a tuple or a dataclass."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):  # always `T | None` in our messages
        return None if value is None else _restore(value, parts[0])
    if kind is tuple:
        return tuple(_restore(each, parts[0]) for each in value)
    if isinstance(kind, type) and is_dataclass(kind):
        return build(kind, value)
    return value


def signal_of(number: int) -> signal.Signals:
    """Return the signal with a number. Raises ProtocolError."""
    try:
        return signal.Signals(number)
    except ValueError:
        raise ProtocolError(f"{number} is not a signal") from None


def text_of(data: bytes) -> str:
    """Encode bytes as a string for JSON; `bytes_of` decodes it."""
    return data.decode("latin-1")


def bytes_of(text: str) -> bytes:
    """Decode a string from `text_of`. Raises ProtocolError for any other string."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ProtocolError("output that does not decode to bytes") from None


def rank_exit(message: Message, offset: float) -> RankExit:
    """Build the exit of a rank from its message. Raises ProtocolError.

    `offset` is the difference of the clocks in seconds, which is added to all times.
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
