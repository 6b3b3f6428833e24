"""Parses the text of settings and flags into values of their types.

A parser raises ValueError with a description of the valid values, such as "an integer of 1 or
more". The caller converts it to a message that names the setting and its source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from shardwise.config.outer_optimizer import Outer
from shardwise.layout.placement import STATES, Tier

T = TypeVar("T")
Parse = Callable[[str], T]

MOST = 2**31 - 1
"""The largest number of steps or samples."""

MOST_RANKS = 2**20
"""Upper bound for the number of ranks, larger than any real run."""

MOST_ON_A_HOST = 4096
"""Upper bound for the number of ranks on a single host."""

LARGEST_SEED = 2**64 - 1
"""The largest seed that torch accepts."""

LONGEST = 2_000_000.0
"""The longest timeout in seconds. In milliseconds, it fits into the 31 bits of system calls."""

_WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Maximum length of file names and paths in bytes, on Linux and macOS."""


def whole(low: int, high: int = MOST) -> Parse[int]:
    """Return a parser for integers from `low` to `high`."""

    def parse(text: str) -> int:
        text = text.strip()
        if not _WHOLE.fullmatch(text):
            raise ValueError("an integer")
        # int() rejects thousands of digits with a message about an internal limit of Python. A
        # number of 40 digits is too large for any setting, so replace it with one that fails below.
        digits = text.lstrip("+-0_")
        value = int(text) if len(digits) < 40 else (-1 if text[0] == "-" else 1) * 10**40
        if value < low:
            raise ValueError(f"an integer of {low} or more")
        if value > high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return parse


def counts(text: str) -> tuple[int, ...]:
    """Parse comma-separated rank counts into a sorted tuple without duplicates."""
    one = whole(1, MOST_RANKS)
    try:
        return tuple(sorted({one(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError("numbers of workers such as 1,2,4,8") from None


def number(low: float, high: float, *, above: bool = False) -> Parse[float]:
    """Return a parser for numbers from `low` to `high`. If `above` is true, `low` is excluded."""

    def parse(text: str) -> float:
        value = _float(text)
        if above and not low < value < float("inf"):
            raise ValueError(f"a number above {low:g}")
        if not low <= value < float("inf"):
            raise ValueError(f"a number of {low:g} or more")
        if value > high:
            raise ValueError(f"a number of {high:.10g} at most")
        return value

    return parse


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(unit: str, *, units: str = "smhd") -> Parse[float]:
    """Return a parser that converts durations such as 90s or 12h to seconds.

    A duration may end in one of `units` (s, m, h, d). Without a suffix, it is in `unit`.
    """

    def parse(text: str) -> float:
        text = text.strip()
        given = text[-1:] if text[-1:] and text[-1:] in units else ""
        try:
            seconds = number(0, 1e30)(text.removesuffix(given)) * _SECONDS[given or unit]
        except ValueError:
            raise ValueError("a duration such as 90s, 30m, 12h or 4d") from None
        return seconds

    return parse


def fraction(text: str) -> float:
    """Parse a number greater than 0 and less than 1."""
    value = _float(text)
    if not 0 < value < 1:
        raise ValueError("a number between 0 and 1")
    return value


def switch(text: str) -> bool:
    """Parse "on" or "off", or a synonym such as "true" or "0"."""
    words = {"true": True, "yes": True, "on": True, "1": True}
    words |= {"false": False, "no": False, "off": False, "0": False}
    try:
        return words[text.strip().lower()]
    except KeyError:
        raise ValueError("on or off") from None


def one_of(*choices: str) -> Parse[str]:
    """Return a parser that accepts one of `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return text

    return parse


def islands(text: str) -> int | str:
    """Parse a number of islands, or "host" for one island per host."""
    if text == "host":
        return text
    try:
        return whole(1, MOST_RANKS)(text)
    except ValueError as error:
        raise ValueError(f"host, or {error}") from None


def port(text: str) -> int | None:
    """Parse a port number. Return None if `text` is not a port number."""
    # isdigit() alone would also accept digits of other writing systems.
    is_number = text.isascii() and text.isdigit() and len(text) <= 5
    return int(text) if is_number and 0 < int(text) < 65536 else None


def rendezvous(text: str) -> str:
    """Parse a rendezvous: HOST:PORT, or a folder."""
    host, _, last = text.rpartition(":")
    if os.sep not in text and not (host and port(last)):
        raise ValueError("HOST:PORT of rank 0, or a folder that all hosts share, with a / in it")
    return text if os.sep not in text else folder(text)


def states(text: str) -> tuple[str, ...]:
    """Parse comma-separated names of states (parameters, gradients, optimizer)."""
    names = _listed(text)
    if any(name not in STATES for name in names):
        raise ValueError(f"one or more of {', '.join(STATES)}")
    return names


def file(text: str) -> Path:
    if not text.strip() or text.endswith(os.sep) or Path(text).name in ("", ".."):
        raise ValueError("the name of a file")
    return Path(_named(text, "a file"))


def folder(text: str) -> str:
    if not text.strip():
        raise ValueError("the name of a folder")
    return _named(text, "a folder")


def tier(text: str) -> Tier:
    """Parse a tier of a state: cpu, or nvme:DIR."""
    found = Tier.parse(text)
    if found.folder:
        folder(found.folder)
    return found


def patterns(text: str) -> tuple[str, ...]:
    """Parse comma-separated patterns of module names."""
    names = _listed(text)
    if not names:
        raise ValueError("names of modules, such as encoder.layer.*")
    return names


def as_text(value: Any, parse: Parse[Any]) -> str:
    """Convert `value`, from TOML, a keyword argument or a flag, to text that `parse` can read.

    Raises ValueError if `value` has the wrong type, or if it is a list but `parse` accepts only a
    single value.
    """
    if isinstance(value, list | tuple) and parse in OF_SEVERAL:
        if not all(isinstance(each, str) for each in value):
            raise ValueError("a list of names")
        value = ",".join(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    # Never accept a number as a name: `timeline=3` is more likely a mistake than a file named 3.
    known = str | Tier if parse in _OF_NAMES else str | Tier | Outer | Real
    if not isinstance(value, known):
        raise ValueError("a name" if parse in _OF_NAMES else "one value")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text in UTF-8") from None
    return text


def _float(text: str) -> float:
    """Parse a number. Return NaN if `text` is not a number."""
    try:
        # float() also accepts digits of other writing systems, which nobody expects in a config
        # file.
        return float(text) if text.isascii() else float("nan")
    except ValueError:
        return float("nan")


OF_SEVERAL: tuple[Parse[Any], ...] = (states, patterns)
"""Parsers that accept several comma-separated names."""
_OF_NAMES = (states, patterns, file, folder, rendezvous)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _named(text: str, what: str) -> str:
    """Return `text`. Raise ValueError if it is not a valid path name."""
    if "\0" in text:
        raise ValueError(f"the name of {what}, without a NUL in it")
    data = os.fsencode(text)
    if len(data) > _LONGEST_PATH or max(map(len, data.split(b"/"))) > _LONGEST_NAME:
        raise ValueError(f"the name of {what}, of {_LONGEST_NAME} bytes at most")
    return text
