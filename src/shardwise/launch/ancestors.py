"""The process that started the ranks of this host: a name for a run that was given none."""

import os
from contextlib import suppress
from pathlib import Path

LAUNCHERS = {
    "hydra_pmi_proxy",
    "mpispawn",
    "orted",
    "prted",
    "mpirun",
    "mpirun.openmpi",
    "mpiexec.hydra",
    "mpiexec",
    "slurmstepd",
}
"""What the processes are called that start ranks; the kernel keeps 15 characters of a name."""


def launching_process() -> str:
    """The number and the start time of the process that started this rank and those beside it.

    A rank may be started through a script of its own, so parents are followed upwards; where none
    of them is a known launcher, the parent is taken.
    """
    pid = launcher() or os.getppid()
    try:
        began = _stat(pid)[3]
    except OSError:  # no /proc, or one that hides other users' processes
        began = "an unknown time"
    return f"process {pid} started at {began}"


def launcher(pid: int | None = None) -> int | None:
    """The nearest known launcher above `pid` (this process), None where none is seen."""
    with suppress(OSError):  # no /proc, or one that hides other users' processes
        above = _stat(os.getpid() if pid is None else pid)[2]
        while above > 1:
            name, _, next_above, _ = _stat(above)
            if name in LAUNCHERS:
                return above
            above = next_above
    return None


def living_children(pid: int) -> int | None:
    """How many processes that `pid` started still run; None where the system does not tell."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return sum(_lives(int(child)) for child in children)


def _lives(pid: int) -> bool:
    try:
        return _stat(pid)[1] not in "ZX"
    except OSError:  # it ended while we looked
        return False


def _stat(pid: int) -> tuple[str, str, int, str]:
    """Name, state, parent and start time (in ticks since boot) of a process."""
    text = Path(f"/proc/{pid}/stat").read_text()
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, fields[0], int(fields[1]), fields[19]
