"""Reads an Identity from a launcher's environment variables, given their names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwise.errors import LaunchError
from shardwise.net.identity import Identity, read_integers
from shardwise.net.launchers.signs import WAYS

Environ = Mapping[str, str]

Reader = Callable[[Environ], Identity | None]
"""Returns the identity set by a launcher, or None if another launcher started this process."""


@dataclass(frozen=True, kw_only=True)
class RankVariables:
    """The names of the variables that a launcher sets for each rank.

    Args:
        launcher: The name of the launcher.
        rank: The variable that holds the rank.
        size: The variable that holds the number of ranks.
        local_rank: The variable that holds the rank's index on its host.
        local_size: The variable that holds the number of ranks on the host.
        node: The variable that holds the host's index.
        job: Variables whose values together identify the run, or () if the launcher sets none. All
            ranks of a run have the same values, and no other run has them.
        one_per_host: True if the launcher starts one process per host.
    """

    launcher: str
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    node: str | None = None
    job: tuple[str, ...] = ()
    one_per_host: bool = False

    def read(self, environ: Environ) -> Identity | None:
        """Return this process's identity, or None if neither its rank nor the size is set.

        Raises LaunchError if only one of the two is set.
        """
        # Ignoring an incomplete identity would fall back to an outer launcher.
        present = {self.rank, self.size} & environ.keys()
        if not present:
            return None
        if len(present) == 1:
            (known,) = present
            missing = self.size if known == self.rank else self.rank
            raise LaunchError(
                f"{self.launcher} seems to have started this process ({known}={environ[known]}), "
                f"but {missing} is not set. {WAYS}"
            )
        names = {"rank": self.rank, "size": self.size}
        # Local rank and size are only used together. Otherwise the ranks compare host names later.
        local = {"local_rank": self.local_rank, "local_size": self.local_size}
        found = {name: each for name, each in local.items() if each is not None and each in environ}
        is_placed = self.one_per_host or len(found) == len(local)
        if is_placed:
            names |= found
        if self.node is not None and self.node in environ:
            names["node"] = self.node
        job = [environ[variable] for variable in self.job if variable in environ]
        return Identity(
            launcher=self.launcher,
            is_placed=is_placed,
            job=" ".join((self.launcher, *job)) if job else None,
            variables=names,
            **read_integers(environ, names, self.launcher),
        )


def say_the_same(first: Identity | None, second: Identity | None) -> bool:
    """Return whether both identities exist and have the same rank and size."""
    if first is None or second is None:
        return False
    return (first.rank, first.size) == (second.rank, second.size)
