"""A Slurm cluster of two hosts, n1 and n2, in namespaces of this machine.

munged, slurmctld and both slurmd are the real ones.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.system import two_hosts
from tests.system.two_hosts import LIMIT, Hosts

COMPONENTS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")

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
munged --foreground --force --key-file="$1/munge.key" --socket="$1/munge.socket" \\
    --pid-file="$1/munged.pid" --seed-file="$1/munged.seed" &
while ! [ -S "$1/munge.socket" ]; do sleep 0.01; done
slurmctld -D &
slurmd -D -N n1 &
on_other slurmd -D -N n2 &
"""


class Cluster(Hosts):
    """A running Slurm cluster."""

    def batch(self, *words: str, **options: Any) -> str:
        """Submit a batch job and wait for its end; return its state, COMPLETED on success.

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
    """Yield a cluster whose files are in `folder`, and end it."""
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(64))
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    environ = {"SLURM_CONF": f"{folder}/slurm.conf"}
    with two_hosts.start(Cluster, folder, START, environ, _is_ready) as made:
        yield made


def _is_ready(made: Cluster) -> bool:
    return made.run("sinfo", "--noheader", "--format=%D %T").stdout == "2 idle\n"


def missing() -> str | None:
    """Return why a cluster is impossible on this machine, or None if it is possible."""
    return two_hosts.missing(*COMPONENTS)
