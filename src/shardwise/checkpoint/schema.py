"""Validation of checkpoint.json, done once when it is read. Pure.

Later code uses values of the file without checking them again.

A check is called with the path of a value, such as `optimizers[0].groups`, and the value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

DEEPEST = 100
"""Maximum nesting of lists and maps in a user's value."""

Check = Callable[[str, Any], None]


class Fault(ValueError):
    """A value that no save writes. The message has its path and value."""


def _must(good: bool, place: str, value: Any, wanted: str) -> None:
    if not good:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        raise Fault(f"its {place} is {shown}, not {wanted}")


def _check(wanted: str, good: Callable[[Any], bool]) -> Check:
    """Return a check that `good` holds; `wanted` describes the valid values."""
    return lambda place, value: _must(good(value), place, value, wanted)


def _is_number(value: Any, *kinds: type) -> bool:
    # In Python True and False are integers; in JSON they are not.
    return isinstance(value, kinds or (int, float)) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value > 0


text = _check("text", lambda value: isinstance(value, str))
flag = _check("true or false", lambda value: isinstance(value, bool))
count = _check("a whole number of 0 or more", lambda v: _is_number(v, int) and 0 <= v < 2**63)
whole = _check("a whole number", lambda value: _is_number(value, int))
positive = _check("a number above 0", _is_positive)
positive_or_null = _check("a number above 0", lambda value: value is None or _is_positive(value))
weight = _check("a number of 0 or more", lambda v: _is_number(v) and 0 <= v < math.inf)
crc = _check(
    "8 hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) is not None,
)
# json_values.py encodes a number that is not finite as {"$float": ...}.
number = _check(
    "a number",
    lambda v: _is_number(v) or (isinstance(v, dict) and v.get("$float") in ("nan", "inf", "-inf")),
)


def is_plain_name(name: Any) -> bool:
    """Return whether `name` is a file name without folders, so that no name points outside a
    checkpoint."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


file_name = _check("the name of a file in the same folder", is_plain_name)


def plain_value(place: str, value: Any, depth: int = 0) -> None:
    """Raise Fault if a value, of any JSON type, is nested too deeply."""
    if depth > DEEPEST:
        raise Fault(f"its {place[:60]} is nested deeper than {DEEPEST} levels")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            plain_value(place, item, depth + 1)


def list_of(check: Check) -> Check:
    def check_list(place: str, value: Any) -> None:
        _must(isinstance(value, list), place, value, "a list")
        for number, item in enumerate(value):
            check(f"{place}[{number}]", item)

    return check_list


def map_of(check: Check) -> Check:
    def check_map(place: str, value: Any) -> None:
        _must(isinstance(value, dict), place, value, "a map")
        for name, item in value.items():
            check(f"{place}.{name}", item)

    return check_map


def record(fields: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return a check for a map with all `fields`, and possibly `optional` ones.

    Other keys are allowed, because later versions may add some.
    """

    def check_record(place: str, value: Any) -> None:
        _must(isinstance(value, dict), place, value, "a map")
        for name, check in fields.items():
            here = f"{place}.{name}" if place else name
            if name not in value:
                raise Fault(f"it has no {here}")
            check(here, value[name])
        for name, check in (optional or {}).items():
            if name in value:
                check(f"{place}.{name}" if place else name, value[name])

    return check_record


_GROUP = record({"parameters": list_of(text), "options": map_of(plain_value)})
_OPTIMIZER = record(
    {"class": text, "groups": list_of(_GROUP)}, optional={"attributes": map_of(plain_value)}
)
_SCALING = record({"scale": positive, "good_steps": count, "unit": positive_or_null, "wide": flag})

FIELDS: dict[str, Check] = {
    "step": count,
    "seed": whole,
    "sets": map_of(list_of(file_name)),
    "checksums": map_of(map_of(crc)),
    "files": map_of(crc),
    "optimizers": list_of(_OPTIMIZER),
    "state": map_of(map_of(plain_value)),
    "borders": list_of(text),
    "scaling": _SCALING,
    "tracked": map_of(plain_value),
    "written_by": map_of(plain_value),
}
"""Fields of every checkpoint.json besides format, version and checksum."""

_ISLAND = record(
    {
        "state": map_of(map_of(plain_value)),
        "borders": list_of(text),
        "weights": map_of(weight),
        "due": map_of(count),
        "scaling": _SCALING,
    }
)

REPORTED = (
    *("step", "weight", "shown", "loss", "backwards", "divisor", "several", "asked", "unsaved"),
    *("finite", "options", "weights", "scale", "updates"),
)
"""Numbers that an island reports with its gradients."""

_REPORT = record(dict.fromkeys(REPORTED, number))
_WAITING = record({"step": count, "reports": list_of(_REPORT), "used": list_of(text)})
_BEHIND = record({"islands": count, "updates": count, "waiting": list_of(_WAITING)})

OPTIONAL: dict[str, Check] = {
    "draws": map_of(plain_value),
    "islands": list_of(_ISLAND),
    "behind": _BEHIND,
}
"""Optional fields: only some runs write them, and older checkpoints lack them."""


def check(fields: Any) -> None:
    """Raise Fault for the first field that is missing or has an invalid value."""
    record(FIELDS, OPTIONAL)("", fields)
