"""Writes the output files of reports, and collects facts about the machine."""

from __future__ import annotations

import math
import platform
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from shardwise.errors import LaunchError


def is_stdout(file: Path | None) -> bool:
    """Return whether `file`, the value of `--json`, is "-", which means standard output."""
    return str(file) == "-"


def write_json(text: str, file: Path | None) -> None:
    """Write `text` to `file`, the value of `--json`. Does nothing if it is None."""
    if is_stdout(file):
        click.echo(text)
    elif file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def check_can_draw(what: str) -> None:
    """Raise LaunchError if a package that `what` needs for its plots is not installed."""
    if missing := [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]:
        raise LaunchError(
            f"{what} draws with {' and '.join(missing)}, which is not installed: "
            "pip install 'shardwise[scale]'"
        )


def machine_facts() -> dict[str, str]:
    """Return the host name, the versions and the date for a report."""
    from shardwise import __version__

    return {
        "machine": platform.node(),
        "versions": f"shardwise {__version__}, torch {version('torch')}, "
        f"Python {platform.python_version()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def finite(value: float) -> float | None:
    """Return `value`, or None if it is infinite or NaN, which JSON cannot represent."""
    return value if math.isfinite(value) else None


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Context manager in which SIGTERM raises SystemExit, so that subprocesses are stopped."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_TORCHRUN = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?(?P<words>[\w.]*(?:Error|Exception)\b.*)$", re.M)


def last_words(output: str) -> str:
    """Return the line of a run's output that says why it failed.

    This is the last non-empty line. torchrun's last lines only list exit codes, so with torchrun it
    is the first error of a rank.
    """
    if (footer := output.find(_TORCHRUN)) >= 0 and (error := _ERROR.search(output, 0, footer)):
        return error["words"]
    lines = [line.strip() for line in output.splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")
