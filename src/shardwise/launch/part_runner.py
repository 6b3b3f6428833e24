"""The interface of a runner for jobs whose parts end and restart independently.

A package in a higher layer implements it (islands/elastic), and the command passes it in. So the
launcher does not depend on that package, and other runs do not import it.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shardwise.launch.console import Console
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.signals import Signals
from shardwise.launch.worker import Begin
from shardwise.net.restarts import Ending, Restarts


class PartRunner(Protocol):
    """A runner for a spec with several `parts`."""

    def checked(
        self, counts: Sequence[int], settings: Mapping[str, str]
    ) -> tuple[int, dict[str, str]]:
        """Return the number of parts, and the `settings` with that number filled in.

        `counts` are the numbers of ranks on the hosts. Raises LaunchError if they do not fit.
        """

    def on_one_host(
        self, spec: RunSpec, begin: Begin, console: Console, signals: Signals, restarts: Restarts
    ) -> Ending:
        """Run `spec` once on this host, with ranks that `begin` starts."""

    def on_many_hosts(
        self, spec: RunSpec, console: Console, signals: Signals, restarts: Restarts
    ) -> Ending:
        """Run `spec` once on several hosts."""
