"""Reads the JSON of a file or a dict, and checks its keys against those that DeepSpeed has."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.config.deepspeed.keys import ALIASES, KEYS, REFUSED, SECTIONS, TUNING
from shardwise.errors import ConfigError

AUTO = "auto"

MOST_DIGITS = 300
"""Digits of an integer: floats end soon after."""


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The JSON of `source`, a file or the object itself, and its name for messages. Raises
    ConfigError for a file that cannot be read or is no JSON object."""
    if isinstance(source, Mapping):
        return dict(source), "the DeepSpeed configuration"
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"A DeepSpeed configuration is the name of a JSON file or a dict, not {source!r}."
        )
    path = Path(source)
    try:
        found = _parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"The DeepSpeed file {path} cannot be read: {why}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The DeepSpeed file {path} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        kinds = {list: "array", str: "string", bool: "boolean", type(None): "null"}
        kind = kinds.get(type(found), "number")
        raise ConfigError(f"The DeepSpeed file {path} is a JSON {kind}, not an object.")
    return found, str(path)


def _parsed(text: str) -> Any:
    """What `text` says as JSON; where it is none, as Hjson, which DeepSpeed takes too, if that
    package is installed. Raises ValueError for neither."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_int=_whole)
    except json.JSONDecodeError:
        if find_spec("hjson") is None:
            raise
    return import_module("hjson").loads(text, object_pairs_hook=_once)


def _whole(digits: str) -> int:
    # Python takes quadratic time to convert the digits of a long integer.
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits")
    return int(digits)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


@dataclass
class Document:
    """The values of a JSON by dotted name: those that mean something here, and what is left out."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    """Keys that are tuning, and change nothing here."""
    resolved: dict[str, Any] = field(default_factory=dict)
    """What "auto" became."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`, `default` where it is not given."""
        value = self.values.get(name)
        return default if value is None else value

    def error(self, key: str, words: str) -> ConfigError:
        """The error for a `key` whose value cannot be had."""
        return ConfigError(f"{self.name}: {key} {words}")


def checked(tree: Mapping[str, Any], name: str, auto: Mapping[str, Any]) -> Document:
    """The values in `tree`, each key known and each value of its kind. "auto" becomes the value
    that `auto` has for that key, and is absent without one. Raises ConfigError."""
    found = Document(name)
    for key, value in _walk(tree, name):
        about = KEYS[key]
        if value == AUTO and about.takes != "open":
            value = found.resolved[key] = auto.get(key)
        if about.takes == "open" and isinstance(value, Mapping):
            value = _resolved(value, key, auto, found.resolved)
        if about.kind == REFUSED:
            if _is_on(value, key):
                raise found.error(key, f"is not there: {about.text}.")
        elif about.kind == TUNING:
            found.ignored.append(key)
        elif value is not None:
            found.values[key] = _of_kind(value, key, about.takes, found)
    return found


def _walk(tree: Mapping[str, Any], name: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of the table that `tree` has, with its value. Raises ConfigError for one that
    DeepSpeed does not have."""
    for word, value in tree.items():
        key = prefix + str(word)
        key = ALIASES.get(key, key)
        if key == "zero_optimization" and isinstance(value, bool):
            key, value = "zero_optimization.stage", int(value)
        if key in KEYS:
            yield key, value
        elif key in SECTIONS:
            if isinstance(value, Mapping):
                yield from _walk(value, name, f"{key}.")
            elif value is not None and value != AUTO:
                raise ConfigError(f"{name}: {key} takes an object, not {value!r}.")
        else:
            raise _unknown(key, name)


def _unknown(key: str, name: str) -> ConfigError:
    """The error for `key`, with the nearest one of its section, or of all."""
    section = key.rpartition(".")[0]
    known = [*KEYS, *SECTIONS]
    beside = [each for each in known if each.rpartition(".")[0] == section]
    last = key.rpartition(".")[2]
    near = [each for each in known if each.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(key, beside, n=1, cutoff=0.5)
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else "Known are: " + ", ".join(sorted(beside)) + "."
    return ConfigError(f"{name}: DeepSpeed has no key {key!r}. {hint}")


def _resolved(
    params: Mapping[str, Any], key: str, auto: Mapping[str, Any], resolved: dict[str, Any]
) -> dict[str, Any]:
    """`params` without "auto": the caller's value, or the library's default."""
    found = {}
    for name, value in params.items():
        if value == AUTO:
            value = resolved[f"{key}.{name}"] = auto.get(f"{key}.{name}")
            if value is None:
                continue
        found[name] = value
    return found


def _is_on(value: Any, key: str) -> bool:
    """Whether a feature that is not there is asked for."""
    if isinstance(value, Mapping) and "enabled" in value:
        value = value["enabled"]
    if key.endswith(".ratio"):
        return value is not None and value < 1
    if key.endswith((".mics_shard_size", ".tp_grain_size")):
        return value not in (None, False, -1, 0, 1)
    return bool(value)


_EXAMPLES = {
    "whole": "a whole number",
    "number": "a number",
    "switch": "true or false",
    "word": "a word",
    "path": "the name of a folder",
    "open": "an object",
}


def _of_kind(value: Any, key: str, takes: str, document: Document) -> Any:
    """`value` as what its key takes. Raises ConfigError."""
    if takes == "any":
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if takes == "whole" and is_number and math.isfinite(value) and value == int(value):
        return int(value)
    if takes == "number" and is_number and math.isfinite(value):
        return value
    if takes == "path" and isinstance(value, str | os.PathLike):
        return os.fspath(value)
    kinds = {"switch": bool, "word": str, "open": Mapping}
    if takes in kinds and isinstance(value, kinds[takes]):
        return value
    raise document.error(key, f"takes {_EXAMPLES[takes]}, not {value!r}.")
