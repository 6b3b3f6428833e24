"""Who this process is among the others, as its launcher tells it."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Rank and size as a launcher gave them, and where the first rank listens.

    `listen_fd` is a socket, already listening on `port`, that rank 0 inherited; so no port is
    ever chosen by one process and taken by another.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None
    port: int | None = None
    listen_fd: int | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size):
            raise LaunchError(
                f"{self.launcher} says rank {self.rank} of {self.size} and local rank "
                f"{self.local_rank} of {self.local_size}, which cannot be: "
                "check what sets these variables."
            )


def integer(environ: Mapping[str, str], variable: str, launcher: str) -> int:
    """The whole number in `variable`; raises LaunchError that names it and its launcher."""
    text = environ.get(variable)
    if text is None:
        raise LaunchError(f"This looks like a start by {launcher}, but {variable} is not set.")
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{variable}={text!r}, set by {launcher}, is not a number.") from None
