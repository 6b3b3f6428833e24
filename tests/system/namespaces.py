"""Hosts for tests: network namespaces of this machine, joined by a pair of virtual interfaces."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

LINK = "veth0"
"""The interface of each host to the other."""


class TwoHosts:
    """Two network namespaces with an address each. Skips the test if they are not permitted."""

    addresses = ("10.231.7.1", "10.231.7.2")

    def __init__(self) -> None:
        if sys.platform != "linux" or shutil.which("ip") is None:
            pytest.skip("needs network namespaces: Linux, and ip of iproute2")
        self.names = [f"shardwise-test-{os.getpid()}-{number}" for number in (0, 1)]
        self._processes: list[subprocess.Popen[str]] = []
        try:
            self._open()
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"may not make network namespaces: {error.stderr.strip()}")

    def _open(self) -> None:
        first, second = self.names
        for name in self.names:
            _ip("netns", "add", name)
        _ip("-n", first, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
            _ip("-n", name, "link", "set", LINK, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def start(
        self, host: int, rank: int, size: int, script: str, environ: Mapping[str, str]
    ) -> "subprocess.Popen[str]":
        """Start a rank on a host, half of `size` on each, as torchrun would."""
        kept = {name: value for name, value in os.environ.items() if "SHARDWISE" not in name}
        told = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank % (size // 2),
            "LOCAL_WORLD_SIZE": size // 2,
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": 29500,  # every port is free in a new namespace
            "GLOO_SOCKET_IFNAME": LINK,
            "LINK": LINK,
            "OMP_NUM_THREADS": 1,
        }
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], sys.executable, script],
            env=kept | {name: str(value) for name, value in told.items()} | dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End the processes on the hosts, and remove the hosts."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
        for name in self.names:
            if Path("/run/netns", name).exists():
                _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
