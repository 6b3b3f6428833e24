"""Two hosts, n1 and n2, in namespaces of this machine, for the daemons of a cluster.

    n1 (10.9.0.1)  cable1 --- cable2  n2 (10.9.0.2)

Each host has its own network and name. All their processes are in one PID namespace, so they end
with its first process, and a test does not have to look for them.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

COMPONENTS = ("nsenter", "unshare", "ip")
START_LIMIT = 30.0
LIMIT = 120.0
"""Seconds that a command may take on a busy machine."""

HOSTS = "127.0.0.1 localhost\n10.9.0.1 n1\n10.9.0.2 n2\n"

START = """\
set -eu
mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
hostname n1
ip link set lo up
unshare --net --uts sleep infinity &
other=$!
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
while [ "$(cat /proc/$other/comm)" != sleep ]; do sleep 0.01; done
on_other() { nsenter --net --uts --target "$other" "$@"; }
ip link add cable1 type veth peer name cable2 netns "$other"
ip addr add 10.9.0.1/24 dev cable1
ip link set cable1 up
on_other hostname n2
on_other ip link set lo up
on_other ip addr add 10.9.0.2/24 dev cable2
on_other ip link set cable2 up
"""


@dataclass(frozen=True)
class Hosts:
    """The running hosts. `first` is the process that all processes on them end with.

    Commands get the variables `environ`, which the clients of the daemons need.
    """

    folder: Path
    first: int
    environ: Mapping[str, str] = field(default_factory=dict)

    def enter(self, *words: str) -> list[str]:
        """Return the command that runs `words` on n1."""
        return ["nsenter", "--all", f"--target={self.first}", *words]

    def run(self, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run `words` on n1, the login host."""
        settings: dict[str, Any] = {"cwd": self.folder, "text": True, "stdin": subprocess.DEVNULL}
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        folder = settings["cwd"]
        known = {name: value for name, value in os.environ.items() if "SHARDWISE" not in name}
        known |= self.environ
        environ = known | settings.pop("env", {})
        return subprocess.run(
            self.enter(f"--wd={folder}", *words), env=environ, timeout=LIMIT, **settings
        )


H = TypeVar("H", bound=Hosts)


@contextmanager
def start(
    made: Callable[[Path, int, Mapping[str, str]], H],
    folder: Path,
    script: str,
    environ: Mapping[str, str],
    is_ready: Callable[[H], bool],
) -> Iterator[H]:
    """Yield two hosts whose files are in `folder`, with daemons that `script` starts.

    In the script, $1 is `folder`, and `on_other` runs a command on n2. All processes end with the
    context.
    """
    (folder / "hosts").write_text(HOSTS)
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    (folder / "start").write_text(f"{START}{script}wait\n")
    log = folder / "log"
    namespaces = ("--net", "--uts", "--pid", "--mount", "--fork", "--kill-child")
    with log.open("w") as written:
        outer = subprocess.Popen(
            ["unshare", *namespaces, "sh", str(folder / "start"), str(folder)],
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
        )
    try:
        found = made(folder, _child(outer), environ)
        until = time.monotonic() + START_LIMIT
        while not is_ready(found):
            assert outer.poll() is None, log.read_text()
            assert time.monotonic() < until, f"Not ready in {START_LIMIT} s:\n{log.read_text()}"
            time.sleep(0.05)
        yield found
    finally:
        outer.kill()  # the kernel then kills the first process of the namespace too
        outer.wait()


def _child(outer: "subprocess.Popen[bytes]") -> int:
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    until = time.monotonic() + START_LIMIT
    while not (found := children.read_text().split()):
        assert outer.poll() is None, "unshare ended"
        assert time.monotonic() < until
        time.sleep(0.01)
    return int(found[0])


def missing(*programs: str) -> str | None:
    """Return why hosts with the daemons `programs` are impossible, or None if they are possible."""
    needed = (*programs, *COMPONENTS)
    absent = [name for name in needed if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if os.geteuid() != 0:
        return f"only root may start {needed[0]} and make namespaces"
    tried = subprocess.run(["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "true"])
    return "namespaces are not permitted here" if tried.returncode else None
