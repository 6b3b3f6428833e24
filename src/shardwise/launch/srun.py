"""Inside a Slurm allocation, `shardwise run` leaves the starting to srun.

    sbatch -N 2 --gpus-per-node 4 job.sh      job.sh: shardwise run --zero 3 train.py

srun puts the ranks on all hosts of the allocation, writes the rank in front of each line, and
ends all of them when one fails. Where the allocation is this very host, nothing is left for srun
to do, and our own launcher says more when a rank fails.
"""

import json
import os
from collections.abc import Mapping
from typing import NoReturn

from shardwise.config import FLAGS_VARIABLE
from shardwise.errors import LaunchError
from shardwise.launch import node_list, slurm
from shardwise.launch.identity import integer, text


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether hosts are allocated to us that only srun starts processes on. Pure.

    Raises LaunchError for one `shardwise run` per task of srun: each would be a run of its own.
    """
    if slurm.in_step(environ):
        tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1":
            raise LaunchError(
                f"srun started shardwise run {tasks} times, once per task. Start the script "
                "itself (srun python train.py), or call shardwise run once, without srun."
            )
        return False
    return "SLURM_JOB_ID" in environ and not _is_this_host(environ)


def tasks_here(environ: Mapping[str, str]) -> int | None:
    """The ranks that an allocation of this host alone asks for; None where it asks for none."""
    if not ("SLURM_JOB_ID" in environ and environ.get("SLURM_NTASKS") and _is_this_host(environ)):
        return None
    return _count(environ, "SLURM_NTASKS")


def words(
    environ: Mapping[str, str],
    command: tuple[str, ...],
    *,
    size: int | None = None,
    per_host: int | None = None,
) -> tuple[str, ...]:
    """What to execute so that srun starts `size` ranks of `command` in all, `per_host` on each.

    With neither, as many as the allocation asks for: its tasks, else its GPUs, else one per host.
    Pure. Raises LaunchError for counts that the hosts cannot hold evenly.
    """
    hosts = len(node_list.hosts(text(environ, "SLURM_JOB_NODELIST", "Slurm")))
    if size is None and per_host is None and "SLURM_NTASKS" not in environ:
        per_host = _count({"SLURM_GPUS_ON_NODE": "1"} | dict(environ), "SLURM_GPUS_ON_NODE")
    if size is not None and per_host is not None and size > hosts * per_host:
        raise LaunchError(
            f"-n {size} ranks do not fit on the {hosts} hosts of Slurm job "
            f"{environ['SLURM_JOB_ID']} with {per_host} on each."
        )
    if size is None:
        size = hosts * per_host if per_host is not None else _count(environ, "SLURM_NTASKS")
    found = ["srun", f"--nodes={min(hosts, size)}", f"--ntasks={size}"]
    found += [f"--ntasks-per-node={per_host}"] if per_host is not None else []
    if "SLURM_CPUS_PER_TASK" in environ:  # srun does not take it over, since Slurm 22.05
        found += [f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}"]
    if "SLURM_PTY_PORT" in environ:  # the shell that we are in holds the cores
        found += ["--overlap"]
    return (*found, "--kill-on-bad-exit=1", "--label", "--", *command)


def environment(
    environ: Mapping[str, str], flags: Mapping[str, str], port: int = 0
) -> dict[str, str]:
    """The variables that srun passes on to the ranks: ours, and the settings in `flags`."""
    told = {"PYTHONUNBUFFERED": "1", FLAGS_VARIABLE: json.dumps(dict(flags))}
    if port:
        first = node_list.hosts(text(environ, "SLURM_JOB_NODELIST", "Slurm"))[0]
        told |= {"MASTER_ADDR": first, "MASTER_PORT": str(port)}
    # an allocation's own count would contradict the one that we give
    kept = {name: value for name, value in environ.items() if name != "SLURM_NTASKS_PER_NODE"}
    return {"PYTHONFAULTHANDLER": "1"} | kept | told


def run(command: tuple[str, ...], environ: Mapping[str, str]) -> NoReturn:
    """Become srun, so that Ctrl-C and the exit code are its own. Raises LaunchError."""
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise LaunchError(
            f"This is Slurm job {environ.get('SLURM_JOB_ID')}, whose hosts srun starts processes "
            f"on, but {command[0]} cannot be started: {error.strerror}. Is it on PATH?"
        ) from None


def _count(environ: Mapping[str, str], variable: str) -> int:
    found = integer(environ, variable, "Slurm")
    if found < 1:
        raise LaunchError(f"{variable}={found}, set by Slurm, asks for no rank: give -n.")
    return found


def _is_this_host(environ: Mapping[str, str]) -> bool:
    """Whether this process is on the only host of the allocation."""
    return environ.get("SLURM_JOB_NUM_NODES") == "1" and "SLURMD_NODENAME" in environ
