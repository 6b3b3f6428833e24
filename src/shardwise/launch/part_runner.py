"""Declares what runs jobs whose parts end and start again by themselves.

A package above implements it, and the command passes it in. So the launcher does not depend on that
package, and other runs need none of it.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shardwise.launch.console import Console
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.signals import Signals
from shardwise.launch.worker import Begin
from shardwise.net.restarts import Ending, Restarts


class PartRunner(Protocol):
    """Runs a spec with several `parts`."""

    def checked(
        self, counts: Sequence[int], settings: Mapping[str, str]
    ) -> tuple[int, dict[str, str]]:
        """Return the number of parts of a run with so many ranks on each of its hosts, and its
        `settings` with that number. Raises LaunchError if they do not fit."""

    def on_one_host(
        self, spec: RunSpec, begin: Begin, console: Console, signals: Signals, restarts: Restarts
    ) -> Ending:
        """Run `spec` once on this host, with ranks that `begin` starts."""

    def on_many_hosts(
        self, spec: RunSpec, console: Console, signals: Signals, restarts: Restarts
    ) -> Ending:
        """Run `spec` once on several hosts."""
