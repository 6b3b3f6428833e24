"""A Slurm cluster of two hosts, n1 and n2, in namespaces of this machine.

Each host has a network and a name of its own; a cable joins them. munged, slurmctld and both
slurmd are the real ones. All of them live in one PID namespace, so that they end with its first
process, and nothing has to be looked for.
"""

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPONENTS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "nsenter", "unshare", "ip")
START_LIMIT = 30.0
LIMIT = 120.0
"""Seconds that a command may take, on a machine that does other things too."""

HOSTS = "127.0.0.1 localhost\n10.9.0.1 n1\n10.9.0.2 n2\n"

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n.spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
KillWait=2
MailProg=/bin/true
NodeName=n1 NodeAddr=10.9.0.1 CPUs=4
NodeName=n2 NodeAddr=10.9.0.2 CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""

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
munged --foreground --force --key-file="$1/munge.key" --socket="$1/munge.socket" \\
    --pid-file="$1/munged.pid" --seed-file="$1/munged.seed" &
while ! [ -S "$1/munge.socket" ]; do sleep 0.01; done
slurmctld -D &
slurmd -D -N n1 &
on_other slurmd -D -N n2 &
wait
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster: its folder, and the process that all of it ends with."""

    folder: Path
    first: int

    def enter(self, *words: str) -> list[str]:
        """The words that run `words` on n1."""
        return ["nsenter", "--all", f"--target={self.first}", *words]

    def run(self, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run `words` on n1, where a user logs in."""
        settings: dict[str, Any] = {"cwd": self.folder, "text": True, "stdin": subprocess.DEVNULL}
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        folder = settings["cwd"]
        known = {name: value for name, value in os.environ.items() if "SHARDWISE" not in name}
        known |= {"SLURM_CONF": f"{self.folder}/slurm.conf"}
        environ = known | settings.pop("env", {})
        return subprocess.run(
            self.enter(f"--wd={folder}", *words), env=environ, timeout=LIMIT, **settings
        )

    def batch(self, *words: str, **options: Any) -> str:
        """Submit a batch job and wait for its end; returns its state, COMPLETED if all is well.

        sbatch can wait too, but looks only every ten seconds.
        """
        submitted = self.run("sbatch", "--parsable", *words, **options)
        assert submitted.returncode == 0, submitted.stderr
        number = submitted.stdout.strip()
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            shown = self.run("squeue", "--noheader", "--states=all", "--format=%T", "-j", number)
            state = shown.stdout.strip()
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return str(state)
            time.sleep(0.1)
        raise AssertionError(f"Job {number} is {state} after {LIMIT} s")


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster whose files are in `folder`; it is gone at the end."""
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(64))
    (folder / "state").mkdir()
    (folder / "hosts").write_text(HOSTS)
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "start").write_text(START)
    log = folder / "log"
    namespaces = ("--net", "--uts", "--pid", "--mount", "--fork", "--kill-child")
    with log.open("w") as written:
        outer = subprocess.Popen(
            ["unshare", *namespaces, "sh", str(folder / "start"), str(folder)],
            env=os.environ | {"SLURM_CONF": f"{folder}/slurm.conf"},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
        )
    try:
        yield _when_ready(Cluster(folder, _child(outer)), outer, log)
    finally:
        outer.kill()  # and with it, by the kernel, the first process of the namespace
        outer.wait()


def _child(outer: "subprocess.Popen[bytes]") -> int:
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    until = time.monotonic() + START_LIMIT
    while not (found := children.read_text().split()):
        assert outer.poll() is None, "unshare ended"
        assert time.monotonic() < until
        time.sleep(0.01)
    return int(found[0])


def _when_ready(made: Cluster, outer: "subprocess.Popen[bytes]", log: Path) -> Cluster:
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        assert outer.poll() is None, log.read_text()
        shown = made.run("sinfo", "--noheader", "--format=%D %T")
        if shown.stdout == "2 idle\n":
            return made
        time.sleep(0.05)
    raise AssertionError(f"No cluster after {START_LIMIT} s:\n{log.read_text()}")


def missing() -> str | None:
    """Why there can be no cluster here; None where there can be one."""
    absent = [name for name in COMPONENTS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if os.geteuid() != 0:
        return "only root may start slurmd and make namespaces"
    tried = subprocess.run(["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "true"])
    return "namespaces are not permitted here" if tried.returncode else None
