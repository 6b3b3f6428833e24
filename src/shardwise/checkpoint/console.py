"""Prints the output and the errors of the checkpoint commands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from shardwise.errors import CheckpointError
from shardwise.messages.printable import printable

if TYPE_CHECKING:
    from rich.console import Console


def report_errors(command: Callable[..., int]) -> Callable[..., int]:
    """Decorate a command so that a CheckpointError prints one line instead of a traceback."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> int:
        try:
            return command(*args, **options)
        except CheckpointError as error:
            # Escape the message, because a path in it may contain control characters.
            raise click.ClickException(printable(error)) from error

    return run


def waiting(console: Console, what: str) -> AbstractContextManager[object]:
    """Show that the command is reading. In a file, the line would be empty, so print nothing."""
    return console.status(what) if console.is_terminal else nullcontext()


def print_line(console: Console, line: str) -> None:
    """Print `line` literally, because rich would interpret brackets in names as markup."""
    console.print(printable(line), highlight=False, markup=False, emoji=False, soft_wrap=True)
