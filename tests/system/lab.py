"""Hosts for tests: network namespaces of this machine, each with a real sshd.

    node1 --- switch --- node2          node1 is 10.77.0.1 and fd00:77::1, ...
                |
              node3

Each host has its own network, name and mounts. Everything ends with the processes that hold the
namespaces.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.system.components import need

PROGRAMS = ("ssh", "sshd", "ssh-keygen", "ip", "unshare", "nsenter")
PORT = 2222
START_LIMIT = 20.0

SSHD = """\
Port {port}
ListenAddress 0.0.0.0
ListenAddress ::
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv TMPDIR={folder}/temporary
"""

SSH = """\
IdentityFile {folder}/user_key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
StrictHostKeyChecking yes
"""

START = """\
set -eu
folder=$1 name=$2 hidden=$3
hostname "$name"
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs none /run
mkdir /run/sshd
if [ -n "$hidden" ]; then mount -t tmpfs none "$hidden"; fi
ip link set lo up
exec "$(command -v sshd)" -D -E "$folder/$name.log" -f "$folder/sshd_config"
"""


@dataclass
class Node:
    """A host. `pid` is the process that holds its namespaces."""

    name: str
    pid: int

    def enter(self, folder: Path, *words: str) -> list[str]:
        """Return the command that runs `words` on this host, in `folder`."""
        namespaces = ("--net", "--uts", "--mount", "--target", str(self.pid))
        return ["nsenter", *namespaces, "env", f"--chdir={folder}", *words]


class Lab:
    """The hosts `nodes`, with an `ssh` command that reaches them.

    A login uses the folder `temporary` for temporary files.
    """

    def __init__(self, folder: Path, nodes: list[Node], switch: int) -> None:
        self.nodes = nodes
        self.temporary = folder / "temporary"
        self.ssh = f"ssh -F {folder}/ssh_config"
        self._switch = switch

    def cut(self, number: int) -> None:
        """Unplug the cable of node `number`."""
        self._cable(number, "down")

    def mend(self, number: int) -> None:
        """Plug in the cable of node `number` again."""
        self._cable(number, "up")

    @contextmanager
    def without_way(self, number: int, other: int) -> Iterator[None]:
        """Block the route from node `number` to node `other`, like a firewall."""
        place = f"10.77.0.{other}/32"
        inside = ["nsenter", "--net", "--target", str(self.nodes[number - 1].pid), "ip", "route"]
        subprocess.run([*inside, "add", "prohibit", place], check=True)
        try:
            yield
        finally:
            subprocess.run([*inside, "del", "prohibit", place], check=True)

    def processes(self) -> set[int]:
        """Return the living processes on these hosts, except the first one of each."""
        networks = {os.readlink(f"/proc/{node.pid}/ns/net") for node in self.nodes}
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and os.readlink(folder / "ns" / "net") in networks:
                    found.add(int(folder.name))
            except OSError:  # it has ended meanwhile
                continue
        return found - {node.pid for node in self.nodes}

    def running(self, number: int, words: str) -> list[int]:
        """Return the processes on node `number` whose command line contains `words`."""
        network = os.readlink(f"/proc/{self.nodes[number - 1].pid}/ns/net")
        found = []
        for pid in self.processes():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words in line and os.readlink(f"/proc/{pid}/ns/net") == network:
                    found.append(pid)
            except OSError:  # it ended meanwhile
                continue
        return found

    def left(self, limit: float = 8.0) -> list[str]:
        """Return the processes (except sshd) and files that a run leaves after `limit` seconds."""
        until = time.monotonic() + limit
        while True:
            alive = {pid: _name(pid) for pid in self.processes()}
            found = [_describe(pid) for pid, name in alive.items() if name not in ("", "sshd")]
            found += [path.name for path in self.temporary.glob("shardwise-*")]
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.05)

    def clear(self) -> None:
        """Remove the files that a host leaves if all of its processes are killed at once."""
        for path in self.temporary.glob("shardwise-*"):
            shutil.rmtree(path)

    def _cable(self, number: int, state: str) -> None:
        inside = ["nsenter", "--net", "--target", str(self._switch)]
        subprocess.run([*inside, "ip", "link", "set", f"port{number}", state], check=True)


def _name(pid: int) -> str:
    """Return the name of a process; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _describe(pid: int) -> str:
    """Return the command line of a process, its number and its parent's."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return f"process {pid}, which has just ended"
    return f"process {pid} of parent {parent}: {line}"


def missing() -> str | None:
    """Return why a lab is impossible on this machine, or None if it is possible."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "type", "veth"],
        capture_output=True,
        text=True,
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def lab(folder: Path, count: int, hidden: Path) -> Iterator[Lab]:
    """Yield `count` hosts. On the last one the folder `hidden` is empty."""
    need("ssh", missing())
    _write_files(folder, count)
    with ExitStack() as stack:
        unshared = ["unshare", "--net", "sleep", "infinity"]
        switch = stack.enter_context(_held(unshared)).pid
        _inside(switch, "ip link add switch type bridge && ip link set switch up")
        nodes: list[Node] = []
        for number in range(1, count + 1):
            name, away = f"node{number}", str(hidden) if number == count else ""
            words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", START, "sh"]
            process = stack.enter_context(_held([*words, str(folder), name, away]))
            nodes.append(Node(name, process.pid))
            _join(switch, number, process.pid)
        found = Lab(folder, nodes, switch)
        stack.callback(_end_all, found)
        for node in nodes:
            _wait_for(folder / f"{node.name}.log", "Server listening")
        yield found


def _write_files(folder: Path, count: int) -> None:
    (folder / "temporary").mkdir()
    for name in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    (folder / "sshd_config").write_text(SSHD.format(folder=folder, port=PORT))
    (folder / "ssh_config").write_text(SSH.format(folder=folder))
    key = (folder / "host_key.pub").read_text()
    numbers = range(1, count + 1)
    names = [name for n in numbers for name in (f"node{n}", f"10.77.0.{n}", f"fd00:77::{n}")]
    known = [f"[{name}]:{PORT} {key}" for name in names]
    (folder / "known_hosts").write_text("".join(known))
    table = "".join(f"10.77.0.{n} node{n}\n" for n in numbers)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")


@contextmanager
def _held(words: list[str]) -> "Iterator[subprocess.Popen[bytes]]":
    """Yield a process that has entered its own namespaces, and kill it at the end."""
    environ = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    process = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL)
    try:
        ours, until = os.readlink("/proc/self/ns/net"), time.monotonic() + START_LIMIT
        while os.readlink(f"/proc/{process.pid}/ns/net") == ours:
            assert time.monotonic() < until, f"{words} has not entered its own network"
            time.sleep(0.005)
        yield process
    finally:
        process.kill()
        process.wait()


def _inside(pid: int, line: str) -> None:
    words = ["nsenter", "--net", "--target", str(pid), "sh", "-ec", line]
    subprocess.run(words, check=True)


def _join(switch: int, number: int, pid: int) -> None:
    """Connect the host that `pid` holds to the switch."""
    port = f"port{number}"
    _inside(
        switch,
        f"ip link add {port} type veth peer name eth0 netns {pid}; "
        f"ip link set {port} master switch; ip link set {port} up",
    )
    _inside(
        pid,
        f"ip addr add 10.77.0.{number}/24 dev eth0; "
        f"ip addr add fd00:77::{number}/64 dev eth0 nodad; ip link set eth0 up",
    )


def _wait_for(log: Path, words: str) -> None:
    until = time.monotonic() + START_LIMIT
    while not (log.exists() and words in log.read_text()):
        assert time.monotonic() < until, f"{log}: {log.read_text() if log.exists() else 'none'}"
        time.sleep(0.01)


def _end_all(found: Lab) -> None:
    for pid in found.processes():
        os.kill(pid, signal.SIGKILL)
