"""Checks once, where it is read, that checkpoint.json holds what it may. Pure.

Whoever takes a value out of it later need not ask whether it is one.

A check is called with the place of a value, as `optimizers[0].groups`, and the value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

DEEPEST = 100
"""Levels of lists and maps in a value of the user's."""

Check = Callable[[str, Any], None]


class Fault(ValueError):
    """A value that cannot be; says where it stands, and what it is."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _must(good: bool, place: str, value: Any, wanted: str) -> None:
    if not good:
        raise Fault(f"its {place} is {_shown(value)}, not {wanted}")


def _text(place: str, value: Any) -> None:
    _must(isinstance(value, str), place, value, "text")


def _flag(place: str, value: Any) -> None:
    _must(isinstance(value, bool), place, value, "true or false")


def _count(place: str, value: Any) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    _must(good, place, value, "a whole number of 0 or more")


def _whole(place: str, value: Any) -> None:
    _must(isinstance(value, int) and not isinstance(value, bool), place, value, "a whole number")


def _scale(place: str, value: Any) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    _must(good and math.isfinite(value) and value > 0, place, value, "a number above 0")


def _weight(place: str, value: Any) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    _must(good and 0 <= value < math.inf, place, value, "a number of 0 or more")


def _number(place: str, value: Any) -> None:
    """Any number; one that is not finite as json_values.py encodes it."""
    odd = isinstance(value, dict) and value.get("$float") in ("nan", "inf", "-inf")
    good = isinstance(value, int | float) and not isinstance(value, bool)
    _must(good or odd, place, value, "a number")


def _unit(place: str, value: Any) -> None:
    """Of gradients before the first of them has come: none yet."""
    if value is not None:
        _scale(place, value)


def _crc(place: str, value: Any) -> None:
    good = isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) is not None
    _must(good, place, value, "8 hexadecimal digits")


def plain_name(name: Any) -> bool:
    """Whether `name` is that of a file in the same folder: nothing leads out of a checkpoint."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def _file(place: str, value: Any) -> None:
    _must(plain_name(value), place, value, "the name of a file in the same folder")


def plain_value(place: str, value: Any, depth: int = 0) -> None:
    """Anything that JSON can hold, of which not too many lie in each other."""
    if depth > DEEPEST:
        raise Fault(f"its {place[:60]} is nested deeper than {DEEPEST} levels")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            plain_value(place, each, depth + 1)


def _list_of(check: Check) -> Check:
    def several(place: str, value: Any) -> None:
        _must(isinstance(value, list), place, value, "a list")
        for number, each in enumerate(value):
            check(f"{place}[{number}]", each)

    return several


def _map_of(check: Check) -> Check:
    def named(place: str, value: Any) -> None:
        _must(isinstance(value, dict), place, value, "a map")
        for name, each in value.items():
            check(f"{place}.{name}", each)

    return named


def _record(fields: Mapping[str, Check]) -> Check:
    """A map that has `fields` at least; a later version may know more."""

    def record(place: str, value: Any) -> None:
        _must(isinstance(value, dict), place, value, "a map")
        for name, check in fields.items():
            here = f"{place}.{name}" if place else name
            if name not in value:
                raise Fault(f"it has no {here}")
            check(here, value[name])

    return record


_GROUP = _record({"parameters": _list_of(_text), "options": _map_of(plain_value)})
_GROUP = _record({"parameters": _list_of(_text), "options": _map_of(plain_value)})


def _optimizer(place: str, value: Any) -> None:
    _record({"class": _text, "groups": _list_of(_GROUP)})(place, value)
    if "attributes" in value:
        _map_of(plain_value)(f"{place}.attributes", value["attributes"])


_SCALING = _record({"scale": _scale, "good_steps": _count, "unit": _unit, "wide": _flag})

FIELDS: dict[str, Check] = {
    "step": _count,
    "seed": _whole,
    "sets": _map_of(_list_of(_file)),
    "checksums": _map_of(_map_of(_crc)),
    "files": _map_of(_crc),
    "optimizers": _list_of(_optimizer),
    "state": _map_of(_map_of(plain_value)),
    "borders": _list_of(_text),
    "scaling": _SCALING,
    "tracked": _map_of(plain_value),
    "written_by": _map_of(plain_value),
}
"""What a checkpoint.json holds beside its format, version and sum."""

_ISLAND = _record(
    {
        "state": _map_of(_map_of(plain_value)),
        "borders": _list_of(_text),
        "weights": _map_of(_weight),
        "due": _map_of(_count),
        "scaling": _SCALING,
    }
)

REPORTED = (
    *(
        "step",
        "weight",
        "shown",
        "loss",
        "backwards",
        "divisor",
        "several",
        "asked",
        "unsaved",
        "finite",
    ),
    *("options", "weights", "scale", "updates"),
)
"""What an island has reported beside its gradients, by name."""

_REPORT = _record(dict.fromkeys(REPORTED, _number))
_WAITING = _record({"step": _count, "reports": _list_of(_REPORT), "used": _list_of(_text)})
_BEHIND = _record({"islands": _count, "updates": _count, "waiting": _list_of(_WAITING)})

OPTIONAL: dict[str, Check] = {
    "draws": _map_of(plain_value),
    "islands": _list_of(_ISLAND),
    "behind": _BEHIND,
}
"""What it may hold more."""


def check(told: Any) -> None:
    """Raise Fault for the first of FIELDS that `told` has not, or not as it must be."""
    _record(FIELDS)("", told)
    _record({name: check for name, check in OPTIONAL.items() if name in told})("", told)
