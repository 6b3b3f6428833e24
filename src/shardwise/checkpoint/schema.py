"""Validates checkpoint.json when it is read, so that later code can rely on its values. No I/O.

A `Check` is a function that takes the path of a value, such as `optimizers[0].groups`, and the
value. It raises Fault if the value is invalid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

DEEPEST = 100
"""Maximum nesting depth of lists and maps in a user's value."""

Check = Callable[[str, Any], None]


class Fault(ValueError):
    """Raised for a value that no save could have written. The message shows path and value."""


def _must(good: bool, place: str, value: Any, wanted: str) -> None:
    if not good:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        raise Fault(f"its {place} is {shown}, not {wanted}")


def _check(wanted: str, good: Callable[[Any], bool]) -> Check:
    """Return a Check that accepts values for which `good` returns True. `wanted` describes them."""
    return lambda place, value: _must(good(value), place, value, wanted)


def _is_number(value: Any, *kinds: type) -> bool:
    # Exclude bool, which is a subclass of int in Python but a different type in JSON.
    return isinstance(value, kinds or (int, float)) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value > 0


text = _check("text", lambda value: isinstance(value, str))
flag = _check("true or false", lambda value: isinstance(value, bool))
count = _check("an integer of 0 or more", lambda v: _is_number(v, int) and 0 <= v < 2**63)
whole_or_null = _check("an integer", lambda value: value is None or _is_number(value, int))
positive = _check("a number above 0", _is_positive)
positive_or_null = _check("a number above 0", lambda value: value is None or _is_positive(value))
weight = _check("a number of 0 or more", lambda v: _is_number(v) and 0 <= v < math.inf)
crc = _check(
    "8 hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) is not None,
)
# json_values.py encodes infinities and NaN as {"$float": ...}.
number = _check(
    "a number",
    lambda v: _is_number(v) or (isinstance(v, dict) and v.get("$float") in ("nan", "inf", "-inf")),
)


def is_plain_name(name: Any) -> bool:
    """Return whether `name` is a file name without folders.

    Only such names are accepted, so that a checkpoint cannot refer to files outside its folder.
    """
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


file_name = _check("the name of a file in the same folder", is_plain_name)


def plain_value(place: str, value: Any, depth: int = 0) -> None:
    """Raise Fault if a value is nested too deeply. Accept any other JSON value."""
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
    """Return a Check for a map that must contain all keys in `fields`.

    The map may also contain the keys in `optional`, whose values are then checked. Unknown keys are
    accepted, because later versions may add fields.
    """

    def check_record(place: str, value: Any) -> None:
        _must(isinstance(value, dict), place, value, "a map")
        for name, check in fields.items():
            here = f"{place}.{name}" if place else name
            if name not in value:
                raise Fault(f"it has no {here}")
            check(here, value[name])
        # Optional fields may be missing, but must be valid if they exist.
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
    "seed": whole_or_null,
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
"""Checks of the fields that every checkpoint.json has, except format, version and checksum."""

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
"""Names of the numbers that an island reports along with its gradients."""

_REPORT = record(dict.fromkeys(REPORTED, number))
_WAITING = record({"step": count, "reports": list_of(_REPORT), "used": list_of(text)})
_BEHIND = record({"islands": count, "updates": count, "waiting": list_of(_WAITING)})

OPTIONAL: dict[str, Check] = {
    "draws": map_of(plain_value),
    "islands": list_of(_ISLAND),
    "behind": _BEHIND,
}
"""Checks of optional fields, which only some runs write or which older checkpoints lack."""


def check(fields: Any) -> None:
    """Raise Fault if a field of checkpoint.json is missing or has an invalid value."""
    record(FIELDS, OPTIONAL)("", fields)
