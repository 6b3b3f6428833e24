"""Defines the identity of a process: its rank, the number of ranks, and how to reach rank 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.config import values
from shardwise.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The rank of a process and the size of its run, as set by the launcher.

    Args:
        launcher: The name of the launcher.
        rank: The rank of this process.
        size: The number of ranks.
        local_rank: This rank's index among the ranks on its host.
        local_size: The number of ranks on this host.
        is_placed: False if the launcher does not reveal which ranks share a host. `local_rank` and
            `local_size` are then placeholders until the rendezvous.
        node: The index of this host, or None if the launcher does not provide it.
        address: Rank 0's host, or None if unknown. If `port` is None, this is only a guess.
        port: Rank 0's port, or None if the ranks must find each other through a rendezvous file.
        listen_fd: Descriptor of a socket that rank 0 has inherited and that is already listening on
            `port`, so that no other process can take the port before rank 0 uses it.
        job: A name that all ranks of this run share and no other run has, or None.
        own_gpus: True if each rank sees only its own GPUs.
        variables: Maps each field to the environment variable that provided it.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    is_placed: bool = True
    node: int | None = None
    address: str | None = None
    port: int | None = None
    listen_fd: int | None = None
    job: str | None = None
    own_gpus: bool = False
    variables: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size):
            names = ("rank", "size", "local_rank", "local_size")
            known = [self.variables[name] for name in names if name in self.variables]
            sources = f" ({', '.join(known)})" if known else ""
            raise LaunchError(
                f"{self.launcher} says rank {self.rank} of {self.size} and local rank "
                f"{self.local_rank} of {self.local_size}{sources}, which is impossible: find out "
                "what sets these variables."
            )
        if self.port is not None and not 0 < self.port < 65536:
            raise LaunchError(
                f"{self.launcher} says that rank 0 listens on port {self.port}, which is "
                "impossible: find out what sets these variables."
            )

    @property
    def on_one_host(self) -> bool:
        """True if the launcher is known to have started all ranks on this host."""
        return self.local_size == self.size


def read_integers(
    environ: Mapping[str, str], names: Mapping[str, str], launcher: str
) -> dict[str, Any]:
    """Read integers from the environment variables in `names`, which maps fields to variables.

    Raises LaunchError if a variable is missing or not a number.
    """
    return {name: read_integer(environ, variable, launcher) for name, variable in names.items()}


def read_integer(environ: Mapping[str, str], variable: str, launcher: str) -> int:
    """Read the integer in the environment variable `variable`.

    Raises LaunchError if the variable is missing or not a number. The message names the variable
    and `launcher`.
    """
    text = environ.get(variable)
    if text is None:
        raise LaunchError(f"{launcher} seems to have started this, but {variable} is not set.")
    try:
        return values.whole(-1)(text)
    except ValueError:
        raise LaunchError(
            f"{variable}={text[:40]!r}, set by {launcher}, is not a valid number: find out what "
            "sets it."
        ) from None


def read_text(environ: Mapping[str, str], variable: str, launcher: str) -> str:
    """Return the value of `variable`. Raises LaunchError if it is missing."""
    if variable not in environ:
        raise LaunchError(f"{launcher} seems to have started this, but {variable} is not set.")
    return environ[variable]


def described(identity: Identity, environ: Mapping[str, str]) -> str:
    """Return one line of text per field of `identity`, with the variable that provided it."""
    lines = [f"started by {identity.launcher}"]
    for name in ("rank", "size", "local_rank", "local_size", "node"):
        value, variable = getattr(identity, name), identity.variables.get(name)
        if name.startswith("local") and not identity.is_placed:
            lines.append(
                f"  {name.replace('_', ' '):<12}{'':<6}from the hosts' names, at the start"
            )
        elif value is not None:
            source = "not given"
            if variable:
                source = f"{variable}={environ.get(variable, '(answer of the PMIx server)')}"
            lines.append(f"  {name.replace('_', ' '):<12}{value:<6}{source}")
    if identity.port is not None:
        meet = f"rank 0 listens at {identity.address}, port {identity.port}"
    elif identity.size == 1:
        meet = "there are no other ranks"
    else:
        meet = "through a rendezvous file of rank 0"
    return "\n".join([*lines, f"  {'meeting':<12}{meet}"])
