"""Finds the hosts that a scheduler has allocated to this job, for `shardwise run` without `-H`.

Schedulers list the hosts in an environment variable, or in a file that a variable names:

    PBS, Torque     PBS_NODEFILE          file, one line per slot: n1 n1 n2 n2
    Cobalt          COBALT_NODEFILE       file, one line per host
    LSF             LSB_DJOB_HOSTFILE     file, one line per slot
                    LSB_MCPU_HOSTS        n1 2 n2 2
                    LSB_HOSTS             n1 n1 n2 n2
    Grid Engine     PE_HOSTFILE           file, one line per host: n1 2 all.q@n1 UNDEFINED
    OAR             OAR_NODEFILE          file, one line per slot (a core)
    SkyPilot        SKYPILOT_NODE_IPS     one line per host
    Slurm           SLURM_JOB_NODELIST    n[1-2]

In a Slurm job, srun starts the ranks (see slurm.py) and ends all of them when one is lost. Only
with --survive, our own launcher starts them, over srun in place of ssh.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.net import hosts
from shardwise.net.hosts import Host
from shardwise.net.identity import read_text
from shardwise.net.launchers import slurm


@dataclass(frozen=True)
class Allocation:
    """The hosts that a scheduler has allocated to this job.

    Args:
        scheduler: Name of the scheduler.
        variable: Environment variable that lists the hosts, or names a file that lists them.
        hosts: The hosts. Their `slots` are None if the scheduler does not specify them.
    """

    scheduler: str
    variable: str
    hosts: tuple[Host, ...]

    def with_ranks(self, gpus: int) -> tuple[Host, ...]:
        """Return the hosts, with `slots` set to the number of ranks to start on each. Does no I/O.

        If there are GPUs, each host gets at most one rank per GPU.

        Args:
            gpus: Number of GPUs on each host.
        """
        # If the job requested more than 1 slot per host, use that number. But many schedulers count
        # cores as slots, so do not exceed the number of GPUs.
        counts = {host.slots or 1 for host in self.hosts}
        if not gpus:
            return tuple(Host(host.name, host.slots or 1) for host in self.hosts)
        return tuple(
            Host(host.name, gpus if counts == {1} else min(gpus, host.slots or 1))
            for host in self.hosts
        )

    @property
    def ssh(self) -> str | None:
        """The scheduler's own replacement for ssh, or None to use ssh."""
        # Processes started by the scheduler count towards the job and are killed with it. Many
        # clusters also forbid ssh between hosts.
        command = _INSTEAD_OF_SSH.get(self.scheduler)
        return command if command and shutil.which(command.split()[0]) else None

    def __str__(self) -> str:
        return f"{self.scheduler} ({self.variable})"


@dataclass(frozen=True)
class _Source:
    """An environment variable that lists hosts, or names a file that lists them.

    `listed` converts the list to the syntax of `-H`.
    """

    scheduler: str
    variable: str
    is_file: bool
    listed: Callable[[str], list[str]]


def _per_slot(text: str) -> list[str]:
    """Parse a list of host names in which each host appears once per slot."""
    words = text.split()
    # dict.fromkeys removes duplicates but keeps the order, so that rank 0 is on the first host.
    return [f"{name}:{words.count(name)}" for name in dict.fromkeys(words)]


def _in_pairs(text: str) -> list[str]:
    """Parse a list such as `n1 2 n2 2`."""
    words = text.split()
    return [f"{name}:{slots}" for name, slots in zip(words[::2], words[1::2], strict=True)]


def _grid_engine(text: str) -> list[str]:
    """Parse lines that start with a host and its slot count. A host may appear on several lines."""
    return _in_pairs(" ".join(" ".join(line.split()[:2]) for line in text.splitlines()))


def _per_host(text: str) -> list[str]:
    # In the syntax of -H, an IPv6 address must be in brackets.
    return [f"[{word}]" if word.count(":") > 1 else word for word in dict.fromkeys(text.split())]


_INSTEAD_OF_SSH = {
    "OAR": "oarsh",
    "Grid Engine": "qrsh -inherit",
    # One step on each host, next to the step of the batch script. Without --unbuffered, srun would
    # hold back an agent's heartbeats until the end of the line.
    "Slurm": "srun --nodes=1 --ntasks=1 --overlap --unbuffered --cpu-bind=none",
}

_SOURCES = (
    _Source("PBS", "PBS_NODEFILE", True, _per_slot),
    _Source("Cobalt", "COBALT_NODEFILE", True, _per_host),
    _Source("LSF", "LSB_DJOB_HOSTFILE", True, _per_slot),
    _Source("LSF", "LSB_MCPU_HOSTS", False, _in_pairs),
    _Source("LSF", "LSB_HOSTS", False, _per_slot),
    _Source("Grid Engine", "PE_HOSTFILE", True, _grid_engine),
    _Source("OAR", "OAR_NODEFILE", True, _per_slot),
    _Source("OAR", "OAR_NODE_FILE", True, _per_slot),
    _Source("SkyPilot", "SKYPILOT_NODE_IPS", False, _per_host),
)


VARIABLES = frozenset(source.variable for source in _SOURCES)
"""The environment variables that list the hosts of a job."""


def find(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of this batch job, or None outside a batch job.

    Raises LaunchError if the list of hosts cannot be read.
    """
    for source in _SOURCES:
        if not environ.get(source.variable):
            continue
        value = environ[source.variable]
        said = f"{source.variable}={value[:80]!r}, set by {source.scheduler},"
        try:
            text = Path(value).read_text() if source.is_file else value
            found = hosts.merge([hosts.host_of(word) for word in source.listed(text)])
        except OSError as error:
            raise LaunchError(
                f"{said} cannot be read: {error.strerror}. Name the hosts with -H, or unset it."
            ) from None
        except ValueError:
            raise LaunchError(
                f"{said} is not a list of hosts as {source.scheduler} writes it. Name the hosts "
                "with -H, or unset it."
            ) from None
        if "CSM_ALLOCATION_ID" in environ and len(found) > 1 and found[0].slots == 1:
            found = found[1:]  # IBM's CSM lists its launch node first, which must not run ranks
        if found:
            return Allocation(source.scheduler, source.variable, tuple(found))
    return _of_slurm(environ) if slurm.needs_srun(environ) else None


def _of_slurm(environ: Mapping[str, str]) -> Allocation:
    names = slurm.node_names(read_text(environ, "SLURM_JOB_NODELIST", "Slurm"))
    counts: Sequence[int | None] = [None] * len(names)
    if "SLURM_NTASKS" in environ:
        counts = slurm.task_counts(read_text(environ, "SLURM_TASKS_PER_NODE", "Slurm"))
    found = tuple(Host(name, slots) for name, slots in zip(names, counts, strict=False))
    return Allocation("Slurm", "SLURM_JOB_NODELIST", found)
