"""Defines the interface of runs whose parts stop and restart independently.

The package islands/elastic implements it, and the command line passes in the implementation. The
launcher must not import that package, because it is in a higher layer. Runs without parts do not
import it at all.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shardwise.launch.console import Console
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.signals import Signals
from shardwise.launch.worker import Begin
from shardwise.net.restarts import Ending, Restarts


class PartRunner(Protocol):
    """Runs a RunSpec that has several parts (`spec.parts`)."""

    def checked(
        self, counts: Sequence[int], settings: Mapping[str, str]
    ) -> tuple[int, dict[str, str]]:
        """Check the ranks and the settings before a run.

        Returns the number of parts, and the settings with that number included. Raises LaunchError
        if the ranks cannot be divided into parts.

        Args:
            counts: Number of ranks on each host.
            settings: Settings from the command line.
        """

    def on_one_host(
        self, spec: RunSpec, begin: Begin, console: Console, signals: Signals, restarts: Restarts
    ) -> Ending:
        """Run `spec` once on this host, with ranks that `begin` starts."""

    def on_many_hosts(
        self, spec: RunSpec, console: Console, signals: Signals, restarts: Restarts
    ) -> Ending:
        """Run `spec` once on several hosts."""
