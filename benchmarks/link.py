"""A link of limited rate between two network namespaces of this machine, with a byte count.

    island 0   veth, tbf ===== veth, tbf   island 1       10.232.0.1 and 10.232.0.2

A token bucket (tbf) limits the sending rate of each end. Offloads are off, so that packets are not
larger than on a real link, and an interface counts the headers of each.
"""

import os
import subprocess
from pathlib import Path

INTERFACE = "veth0"

BURST = 128 * 1024
"""Bytes of the bucket: the most that an end sends at once after a pause."""


class NoNamespaces(Exception):
    """This machine, or this user, can make no network namespaces; the message says why."""


class Link:
    """Two namespaces and the link between them; a context manager that removes them.

    Raises NoNamespaces.
    """

    addresses = ("10.232.0.1", "10.232.0.2")

    def __init__(self) -> None:
        self.names = [f"shardwise-link-{os.getpid()}-{end}" for end in (0, 1)]
        try:
            self._open()
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            said = getattr(error, "stderr", None) or str(error)
            raise NoNamespaces(str(said).strip()) from None

    def _open(self) -> None:
        first, second = self.names
        for name in self.names:
            _run("ip", "netns", "add", name)
        peer = ("peer", "name", INTERFACE, "netns", second)
        _run("ip", "-n", first, "link", "add", INTERFACE, "type", "veth", *peer)
        for name, address in zip(self.names, self.addresses, strict=True):
            # An interface with an IPv6 address sends packets for neighbour discovery.
            plain = ("addrgenmode", "none", "gso_max_segs", "1", "gso_max_size", "1514")
            _run("ip", "-n", name, "link", "set", INTERFACE, *plain)
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces, and the link with them."""
        for name in self.names:
            if Path("/run/netns", name).exists():
                _run("ip", "netns", "delete", name)

    def enter(self, end: int) -> list[str]:
        """Return the words that run a command at this end."""
        return ["ip", "netns", "exec", self.names[end]]

    def limit(self, megabits: float | None) -> None:
        """Limit each end to so many Mbit/s; None: no limit."""
        for name in self.names:
            at = ("dev", INTERFACE, "root")
            subprocess.run(["tc", "-n", name, "qdisc", "del", *at], capture_output=True)
            if megabits is not None:
                rate = ("rate", f"{int(megabits * 1e6)}bit", "burst", str(BURST))
                _run("tc", "-n", name, "qdisc", "add", *at, "tbf", *rate, "latency", "400ms")

    def sent(self) -> list[int]:
        """Return the bytes that each end has sent, headers of Ethernet, IP and TCP included."""
        counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return [int(_run(*self.enter(end), "cat", counter)) for end in (0, 1)]


def _run(*words: str) -> str:
    return subprocess.run(list(words), check=True, capture_output=True, text=True).stdout


def on_the_wire(payload: float) -> float:
    """Return `payload` bytes as an interface counts them: each 1448 bytes have 66 of headers."""
    return payload * 1514 / 1448
