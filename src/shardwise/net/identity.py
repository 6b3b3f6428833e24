"""Describes who a process is: its rank, the number of ranks, and how to find rank 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.config import values
from shardwise.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Rank and size as a launcher gave them, and what it says of where rank 0 listens.

    `is_placed` is False if the launcher does not say which ranks share a host. `local_rank` and
    `local_size` are then placeholders until the ranks meet (see collectives.place).
    `node` is the index of this host, None where the launcher tells none. With `port` set, rank 0
    listens at `address`; without it the launcher only started processes, and ranks find each
    other by `job`: a name that all of them were given and no other run was (None where there is
    none), with `address` as a first guess at where rank 0 is. `listen_fd` is a socket, already
    listening on `port`, that rank 0 inherited; so no port is ever chosen by one process and taken
    by another. `own_gpus` says that the launcher shows each rank no GPUs but its own. `variables`
    says which variable each number was read from.
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
            raise LaunchError(
                f"{self.launcher} says rank {self.rank} of {self.size} and local rank "
                f"{self.local_rank} of {self.local_size}{self._sources()}, which cannot be: "
                "check what sets these variables."
            )
        if self.port is not None and not 0 < self.port < 65536:
            raise LaunchError(
                f"{self.launcher} says that rank 0 listens on port {self.port}, which cannot be: "
                "check what sets these variables."
            )

    @property
    def on_one_host(self) -> bool:
        """Whether the launcher is known to have put all ranks on this host."""
        return self.local_size == self.size

    def _sources(self) -> str:
        names = ("rank", "size", "local_rank", "local_size")
        known = [self.variables[name] for name in names if name in self.variables]
        return f" ({', '.join(known)})" if known else ""


def read_integers(
    environ: Mapping[str, str], names: Mapping[str, str], launcher: str
) -> dict[str, Any]:
    """The whole numbers in the variables `names`; raises LaunchError for one that is missing."""
    return {name: read_integer(environ, variable, launcher) for name, variable in names.items()}


def read_integer(environ: Mapping[str, str], variable: str, launcher: str) -> int:
    """The whole number in `variable`; raises LaunchError that names it and its launcher."""
    text = environ.get(variable)
    if text is None:
        raise LaunchError(f"This looks like a start by {launcher}, but {variable} is not set.")
    try:
        return values.whole(-1)(text)
    except ValueError:
        raise LaunchError(
            f"{variable}={text[:40]!r}, set by {launcher}, is not a number that it can be: check "
            "what sets it."
        ) from None


def read_text(environ: Mapping[str, str], variable: str, launcher: str) -> str:
    """What `variable` says; raises LaunchError that names it and its launcher."""
    if variable not in environ:
        raise LaunchError(f"This looks like a start by {launcher}, but {variable} is not set.")
    return environ[variable]


def described(identity: Identity, environ: Mapping[str, str]) -> str:
    """A line for each number of `identity`, with the variable that it was read from."""
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
        meet = "there are no others"
    else:
        meet = "rank 0 writes a rendezvous file: its address is not given"
    return "\n".join([*lines, f"  {'meeting':<12}{meet}"])
