"""Timelines, read again: one file or those of several hosts, whole or cut off."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.timeline.file import NAME, siblings

Event = dict[str, Any]


def read(paths: Sequence[Path]) -> list[Event]:
    """The events of `paths`, and of files beside them that other hosts wrote of the same run.

    Raises ConfigError for what is no timeline, or where files are of different runs.
    """
    found = {path.resolve(): _events(path) for path in paths}
    runs = {_run(events) for events in found.values()} - {None}
    if len(runs) > 1:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names} are of different runs: give the files of one.")
    for beside in [other for path in paths for other in siblings(path)]:
        if beside.resolve() not in found and runs and _run_of(beside) in runs:
            found[beside.resolve()] = _events(beside)
    return [event for events in found.values() for event in events]


def merge(events: Iterable[Event], path: Path) -> None:
    """Write them as one file for viewers. Raises ConfigError."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    try:
        path.write_text(f"[{lines}]\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


def _events(path: Path) -> list[Event]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"The timeline {path} cannot be read: {why}.") from error
    try:
        found = json.loads(text)
    except ValueError:
        found = _cut_off(text)
    if isinstance(found, dict):
        found = found.get("traceEvents")
    if not isinstance(found, list) or not all(isinstance(event, dict) for event in found):
        raise ConfigError(f"{path} is no timeline: not a JSON array of events.")
    return found


def _cut_off(text: str) -> object:
    """The array without its end, as Chrome's format allows it and other tools leave it."""
    for end in (text.rstrip().rstrip(","), text.rpartition("\n")[0].rstrip().rstrip(",")):
        try:
            return json.loads(end + "]")
        except ValueError:
            continue
    return None


def _run(events: Sequence[Event]) -> str | None:
    if events and events[0].get("name") == NAME:
        return str(events[0]["args"]["run"])
    return None


def _run_of(path: Path) -> str | None:
    try:
        return _run(_events(path))
    except ConfigError:  # another file, of a similar name
        return None
