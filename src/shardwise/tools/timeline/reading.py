"""Reads timelines from one file or one file per host, even if the files are truncated."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.timeline.file import NAME, siblings

Event = dict[str, Any]


def read(paths: Sequence[Path]) -> list[Event]:
    """Return the events in `paths`, and in other hosts' files of the same run in the same folders.

    Raises ConfigError if a file is not a Shardwise timeline, or if the files belong to different
    runs.
    """
    by_path = {path.resolve(): _events(path) for path in paths}
    runs = {_run(path, by_path[path.resolve()]) for path in paths}
    if len(runs) > 1:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names} belong to different runs: give the files of one run.")
    # Each host writes its own file, and users often name only one of them.
    for beside in [other for path in paths for other in siblings(path)]:
        if beside.resolve() not in by_path and _run_of(beside) in runs:
            by_path[beside.resolve()] = _events(beside)
    return [event for events in by_path.values() for event in events]


def merge(events: Iterable[Event], path: Path) -> None:
    """Write the events to one file for a viewer such as Perfetto.

    Raises ConfigError if the file cannot be written.
    """
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    try:
        path.write_text(f"[{lines}]\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


def _events(path: Path) -> list[Event]:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"The timeline {path} is not a file: give one from --timeline.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"The timeline {path} cannot be read: {why}.") from error
    try:
        content = json.loads(text)
    except RecursionError:
        content = None
    except ValueError:
        content = _cut_off(text)
    # Chrome's format also allows an object with the events inside.
    if isinstance(content, dict):
        content = content.get("traceEvents")
    if not isinstance(content, list) or not all(isinstance(event, dict) for event in content):
        raise ConfigError(f"{path} is not a timeline: it is not a JSON array of events.")
    return content


def _cut_off(text: str) -> object:
    """Parse an array without its closing bracket, which Chrome's format allows.

    Returns None if the text is not a JSON array.
    """
    # If the writer was killed, the last complete event is followed by a comma or by a partial
    # event.
    for end in (text.rstrip().rstrip(","), text.rpartition("\n")[0].rstrip().rstrip(",")):
        try:
            return json.loads(end + "]")
        except ValueError:
            continue
    return None


def _run(path: Path, events: Sequence[Event]) -> str:
    """Return the run's name from the header event, wherever the header is in the file.

    Other tools may reorder events. Raises ConfigError if there is no header.
    """
    headers = (event for event in events if event.get("name") == NAME)
    match next(headers, None):
        case {"args": {"run": str(run)}}:
            return run
    raise ConfigError(
        f"{path} is not a timeline of shardwise: it has no run name. Pass a file that shardwise "
        "run --timeline FILE or shardwise timeline --merge FILE wrote."
    )


def _run_of(path: Path) -> str | None:
    try:
        return _run(path, _events(path))
    except ConfigError:  # an unrelated file with a similar name
        return None
