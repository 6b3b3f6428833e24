"""Closes the connections to hosts that are lost, so that no rank waits for them.

If a process is killed, the kernel closes its sockets, and the other ranks notice at once. If a host
loses power or its network, its sockets seem to stay open. The launcher notices the silence of the
host's agent, and reports the host's ranks as lost.
"""

from __future__ import annotations

import os
import threading

from shardwise.net import environment, listeners
from shardwise.watch.status_server import StatusServer

TICK = 0.2
"""Seconds between two checks."""


class LostHosts:
    """A thread that closes this process's connections to lost hosts.

    Args:
        server: This rank's status server, which knows the hosts of the remaining ranks.
    """

    def __init__(self, server: StatusServer) -> None:
        self._server = server
        self._closed = threading.Event()
        # Ranks on one host see each other's processes. A spare does not know the others yet.
        if environment.LOST_AFTER_VARIABLE in os.environ:
            name = "shardwise-lost-hosts"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(TICK):
            # Again in every turn, because a new group may have just connected to the host.
            if lost := self._server.lost_hosts():
                listeners.close_connections(lost)
