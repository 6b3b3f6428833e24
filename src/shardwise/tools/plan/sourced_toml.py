"""Reads TOML files with a source for every value: devices, links and failure rates.

[sources.sheet]
text = "data sheet"
date = "2024-09"

[device.H100]
watts = { value = 700, from = "sheet" }
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """The source of a value, and its date of publication or retrieval."""

    text: str
    date: str
    url: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.date})" + (f", {self.url}" if self.url else "")


class SourcedFile:
    """A TOML file with a source for every value. Error messages name the file and the key.

    `tree` reads the file and fills `sources` with the [sources.NAME] tables.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.sources: dict[str, Source] = {}

    def tree(self, tables: Sequence[str]) -> dict[str, Any]:
        """Read the file and return its content.

        Raises ConfigError if it is not valid TOML, or has top-level tables other than `tables` and
        `sources`.
        """
        try:
            tree = tomllib.loads(self.file.read_text(encoding="utf-8"))
        # tomllib parses nested arrays recursively, so a hostile file can exceed the recursion
        # limit.
        except RecursionError:
            raise ConfigError(f"{self.file} is not TOML: it is nested too deeply.") from None
        except (OSError, ValueError) as error:  # ValueError includes integers with too many digits
            raise ConfigError(f"{self.file} cannot be read as TOML: {error}.") from error
        self.only(tree, ("sources", *tables), "the file")
        for name, entry in self.tables(tree, "sources"):
            self.sources[name] = self.source(entry, name)
        return tree

    def wrong(self, text: str) -> ConfigError:
        """Return a ConfigError with the path of this file and the message `text`."""
        return ConfigError(f"{self.file}: {text}")

    def only(self, entry: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
        """Raise ConfigError if `entry` has a key that is not in `allowed`."""
        for key in entry:
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, n=1)
                hint = (
                    f" Did you mean {near[0]}?" if near else f" Known keys: {', '.join(allowed)}."
                )
                raise self.wrong(f"{where} has no key {key!r}.{hint}")

    def tables(self, tree: Mapping[str, Any], kind: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the names and contents of the [kind.NAME] tables.

        Raises ConfigError if `kind` contains anything but tables.
        """
        group = tree.get(kind, {})
        entries = group.items() if isinstance(group, dict) else ()
        if not isinstance(group, dict) or not all(isinstance(each, dict) for _, each in entries):
            raise self.wrong(f"{kind} must be tables such as [{kind}.NAME].")
        return list(entries)

    def text(self, entry: Mapping[str, Any], key: str, where: str, default: str = "") -> str:
        """Return the string of `key`. Raises ConfigError if it is missing or empty."""
        value = entry.get(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(f"{where} needs a text for {key}.")
        return value

    def source(self, entry: Mapping[str, Any], name: str) -> Source:
        """Build the source from the content of a [sources.NAME] table."""
        where = f"[sources.{name}]"
        self.only(entry, ("text", "date", "url"), where)
        url = entry.get("url", "")
        return Source(self.text(entry, "text", where), self.text(entry, "date", where), str(url))

    def sourced(self, entry: Any, where: str) -> tuple[Any, Source]:
        """Return the value and source of `{ value = ..., from = "..." }`.

        Raises ConfigError if `entry` has any other form or an unknown source.
        """
        if not isinstance(entry, dict) or set(entry) != {"value", "from"}:
            raise self.wrong(f'{where} must be {{ value = NUMBER, from = "SOURCE" }}.')
        if (source := self.sources.get(entry["from"])) is None:
            raise self.wrong(
                f"{where} is from {entry['from']!r}, but there is no [sources.{entry['from']}]."
            )
        return entry["value"], source

    def number(self, entry: Any, where: str) -> tuple[float, Source]:
        """Return the number and source of `entry`. Raises ConfigError unless it is positive."""
        value, source = self.sourced(entry, where)
        number = as_float(value)
        if number is None or not 0 < number < math.inf:
            raise self.wrong(f"{where} must be a number above 0, not {str(value)[:40]}.")
        return number, source


def as_float(value: object) -> float | None:
    """Return a TOML number as a float (infinity if it is too large), or None for anything else."""
    # bool is a subclass of int, but not a number in TOML.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
