"""Reads a DeepSpeed config from a file or a dict, and checks its keys."""

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
"""Maximum number of digits in an integer. The largest float has 309."""


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Read the config `source`, a file name or a dict.

    Returns its content, and its name for messages. Raises ConfigError if the file cannot be read or
    does not contain a JSON object.
    """
    if isinstance(source, Mapping):
        return dict(source), "the DeepSpeed configuration"
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"A DeepSpeed configuration is the name of a JSON file or a dict, not {source!r}."
        )
    path = Path(source)
    try:
        found = _parse(path.read_text(encoding="utf-8"))
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


def _parse(text: str) -> Any:
    """Parse `text` as JSON, or as Hjson if it is not JSON and the hjson package is installed.

    Raises ValueError if it cannot be parsed.
    """

    def parse_int(digits: str) -> int:
        # Converting a long integer takes Python quadratic time.
        if len(digits) > MOST_DIGITS:
            raise ValueError(f"it has an integer of {len(digits)} digits")
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates, parse_int=parse_int)
    except json.JSONDecodeError:
        # DeepSpeed itself accepts Hjson, which is JSON with comments and optional commas.
        if find_spec("hjson") is None:
            raise
    return import_module("hjson").loads(text, object_pairs_hook=_refuse_duplicates)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {duplicate!r} appears twice")
    return found


@dataclass
class Document:
    """The ignored keys of a config, and the values that Shardwise uses, by dotted name."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    """The ignored keys, which only tune DeepSpeed."""
    resolved: dict[str, Any] = field(default_factory=dict)
    """Maps dotted names to the value that replaced "auto", or to None if the key was removed."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of `name`, or `default` if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def error(self, key: str, words: str) -> ConfigError:
        """Return the error for an unsupported value of `key`. `words` explains the problem."""
        return ConfigError(f"{self.name}: {key} {words}")


def check(tree: Mapping[str, Any], name: str, auto: Mapping[str, Any]) -> Document:
    """Check every key and the type of every value in `tree`, and resolve "auto".

    The value "auto" is replaced with the key's value in `auto`. If there is none, the key is
    removed. Raises ConfigError if a key is unknown or not supported, or a value has the wrong type.
    """
    found = Document(name)
    for key, value in _walk(tree, name):
        about = KEYS[key]
        if value == AUTO and about.takes != "open":
            value = found.resolved[key] = auto.get(key)
        if about.takes == "open" and isinstance(value, Mapping):
            value = _resolved(value, key, auto, found.resolved)
        # Many generated configs contain sections for unsupported features that are off. Accept
        # them.
        if about.kind == REFUSED:
            if _is_on(value, key):
                raise found.error(key, f"is not supported: {about.text}.")
        elif about.kind == TUNING:
            found.ignored.append(key)
        elif value is not None:
            found.values[key] = _of_kind(value, key, about.takes, found)
    return found


def _walk(tree: Mapping[str, Any], name: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each key in `tree`. Raises ConfigError if a key is unknown."""
    for word, value in tree.items():
        key = prefix + str(word)
        key = ALIASES.get(key, key)
        # Old configs contain "zero_optimization": true for stage 1.
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
    """Return the error for an unknown `key`. It suggests the most similar known key."""
    section = key.rpartition(".")[0]
    known = [*KEYS, *SECTIONS]
    same_section = [each for each in known if each.rpartition(".")[0] == section]
    last = key.rpartition(".")[2]
    # Likely mistakes, in this order: the right name in the wrong section, a typo in the right
    # section, anything else.
    near = [each for each in known if each.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(key, same_section, n=1, cutoff=0.5)
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(sorted(same_section))}."
    return ConfigError(f"{name}: DeepSpeed has no key {key!r}. {hint}")


def _resolved(
    params: Mapping[str, Any], key: str, auto: Mapping[str, Any], resolved: dict[str, Any]
) -> dict[str, Any]:
    """Replace each "auto" in `params` with its value in `auto`, or remove it if there is none."""
    found = {}
    for name, value in params.items():
        if value == AUTO:
            value = resolved[f"{key}.{name}"] = auto.get(f"{key}.{name}")
            if value is None:
                continue
        found[name] = value
    return found


def _is_on(value: Any, key: str) -> bool:
    """Return whether `value` enables the unsupported feature `key`."""
    if isinstance(value, Mapping) and "enabled" in value:
        value = value["enabled"]
    if key.endswith(".ratio"):
        return value is not None and value < 1
    if key.endswith((".mics_shard_size", ".tp_grain_size")):
        return value not in (None, False, -1, 0, 1)
    return bool(value)


_EXAMPLES = {
    "whole": "an integer",
    "number": "a number",
    "switch": "true or false",
    "word": "a word",
    "path": "the name of a folder",
    "open": "an object",
}


def _of_kind(value: Any, key: str, takes: str, document: Document) -> Any:
    """Convert `value` to the type that `takes` names (such as "whole").

    Raises ConfigError if it cannot be converted.
    """
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
