"""Reads timelines: one file or those of several hosts, complete or cut off."""

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

    Raises ConfigError for what is no timeline of ours, or where files are of different runs.
    """
    found = {path.resolve(): _events(path) for path in paths}
    runs = {_run(path, found[path.resolve()]) for path in paths}
    if len(runs) > 1:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names} are of different runs: give the files of one.")
    for beside in [other for path in paths for other in siblings(path)]:
        if beside.resolve() not in found and _run_of(beside) in runs:
            found[beside.resolve()] = _events(beside)
    return [event for events in found.values() for event in events]


def merge(events: Iterable[Event], path: Path) -> None:
    """Write the events as one file for viewers. Raises ConfigError."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    try:
        path.write_text(f"[{lines}]\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


def _events(path: Path) -> list[Event]:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"The timeline {path} is no file: name one that --timeline wrote.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"The timeline {path} cannot be read: {why}.") from error
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    except ValueError:
        found = _cut_off(text)
    if isinstance(found, dict):
        found = found.get("traceEvents")
    if not isinstance(found, list) or not all(isinstance(event, dict) for event in found):
        raise ConfigError(f"{path} is no timeline: not a JSON array of events.")
    return found


def _cut_off(text: str) -> object:
    """Parse an array without its end, as Chrome's format allows it and other tools leave it."""
    for end in (text.rstrip().rstrip(","), text.rpartition("\n")[0].rstrip().rstrip(",")):
        try:
            return json.loads(end + "]")
        except ValueError:
            continue
    return None


def _run(path: Path, events: Sequence[Event]) -> str:
    """The name of the run in the header, wherever another tool has put that."""
    headers = (event for event in events if event.get("name") == NAME)
    match next(headers, None):
        case {"args": {"run": str(run)}}:
            return run
    raise ConfigError(
        f"{path} is no timeline of ours: it does not say which run it is of. Give what shardwise "
        "run --timeline FILE, or shardwise timeline --merge FILE, wrote."
    )


def _run_of(path: Path) -> str | None:
    try:
        return _run(path, _events(path))
    except ConfigError:  # another file, of a similar name
        return None
