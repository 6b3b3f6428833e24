r"""Encodes and checks the messages between a launcher and its agents, one JSON object per line.

    b'@shardwise {"kind": "output", "rank": 3, "stream": 1, "data": "loss 0.31\n"}\n'

Other lines, which a host may print during login, are forwarded unchanged. Both sides send a NUL
byte every second as a heartbeat. The launcher's heartbeats come from a separate process, so they
can appear in the middle of a message. They are harmless, because JSON never contains NUL bytes.
This module does no I/O.
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
    """Encode a message as one line."""
    return _MARK + json.dumps({"kind": kind, **values}).encode() + b"\n"


Kinds = Mapping[str, Mapping[str, Any]]
"""The fields of each kind of message, with their types."""

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
    "lost": {"ranks": [int]},
    "members": {"generation": int, "text": str},
    "clear": {"rank": int},
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
    "met": {},
    "joined": {"rank": int},
    "members": {"generation": int, "text": str},
}
MOST = 2**26
"""Maximum length of a line in bytes."""


class ProtocolError(LaunchError):
    """Raised if a line is not a valid message in this version of the protocol."""


class MessageReader:
    """Splits a byte stream into messages and other lines.

    Args:
        kinds: Kinds of messages to accept. Any other message raises ProtocolError.
        take: Called with each message.
        noise: Called with each line that is not a message.
    """

    def __init__(
        self, kinds: Kinds, take: Callable[[Message], None], noise: Callable[[bytes], None]
    ) -> None:
        self._kinds = kinds
        self._take = take
        self._noise = noise
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Parse `data`, which may end in the middle of a message."""
        *lines, self._rest = (self._rest + data.replace(HEARTBEAT, b"")).split(b"\n")
        for line in lines:
            # Logging in may print text without a newline, which then precedes the first message.
            noise, mark, message = line.partition(_MARK)
            if noise or not mark:
                self._noise(noise + b"\n")
            if mark:
                self._take(_checked(message, self._kinds))
        # Without a limit, a peer that never sends a newline would fill the memory.
        if len(self._rest) > MOST:
            raise ProtocolError(f"a line of more than {MOST} bytes")


def _checked(text: bytes, kinds: Kinds) -> Message:
    """Parse a message. Raises ProtocolError if it is invalid, or if its kind is not in `kinds`."""
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
    # Both sides run the same version, so unknown fields are errors too.
    if fields.keys() != types.keys():
        raise ProtocolError(f"{what!r} has the fields {sorted(fields)}, not {sorted(types)}")
    for name, value in fields.items():
        if not _fits(value, types[name]):
            raise ProtocolError(f"{what!r} has {name}={str(value)[:40]!r}")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether `value` has type `kind`. [T] is a list of T, and a tuple is a union."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(each, kind[0]) for each in value)
    if isinstance(kind, tuple):
        return any(_fits(value, each) for each in kind)
    # In Python a bool is also an int, but in messages it is not.
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def build(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Create an instance of the dataclass `kind` from JSON. It may contain other dataclasses.

    Raises ProtocolError if a field is missing, unknown or of the wrong type.
    """
    hints = get_type_hints(kind)
    _check(kind.__name__, fields, {name: _json_type(hint) for name, hint in hints.items()})
    return kind(**{name: _restore(value, hints[name]) for name, value in fields.items()})


def _json_type(hint: Any) -> Any:
    """Return the JSON type, in the form that `_fits` expects, for values of type `hint`."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return tuple(_json_type(part) for part in parts)
    if kind is tuple:
        return [_json_type(parts[0])]
    if kind is float:
        return (int, float)
    return dict if issubclass(kind, Mapping) or is_dataclass(kind) else kind


def _restore(value: Any, hint: Any) -> Any:
    """Convert a value from JSON to the type `hint`, for example to a tuple or a dataclass."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):  # messages contain no unions other than `T | None`
        return None if value is None else _restore(value, parts[0])
    if kind is tuple:
        return tuple(_restore(each, parts[0]) for each in value)
    if isinstance(kind, type) and is_dataclass(kind):
        return build(kind, value)
    return value


def signal_of(number: int) -> signal.Signals:
    """Return the signal with this number. Raises ProtocolError if there is no such signal."""
    try:
        return signal.Signals(number)
    except ValueError:
        raise ProtocolError(f"{number} is not a signal") from None


def text_of(data: bytes) -> str:
    """Encode arbitrary bytes as a string for JSON. `bytes_of` decodes it."""
    # latin-1 maps each byte to the character with the same code, so every byte string is valid.
    return data.decode("latin-1")


def bytes_of(text: str) -> bytes:
    """Decode a string from `text_of`. Raises ProtocolError if it is not such a string."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ProtocolError("output that does not decode to bytes") from None


def rank_exit(message: Message, offset: float) -> RankExit:
    """Create a RankExit from a message of kind "end". Raises ProtocolError if it is invalid.

    Args:
        message: The message.
        offset: Seconds to add to all times, because the clocks of the two hosts differ.
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
