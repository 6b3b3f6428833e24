"""Reads a Slurm task's identity, and starts ranks through srun.

Batch scripts and the shells of interactive allocations have many of a task's variables, but they
are not ranks.

Inside an allocation, `shardwise run` starts the ranks through srun:

    sbatch -N 2 --gpus-per-node 4 job.sh      job.sh: shardwise run --zero 3 train.py

srun starts the ranks on all hosts in the allocation, prefixes each output line with the rank, and
kills all ranks when one fails. If the allocation consists only of this host, our own launcher
starts the ranks, because its failure reports contain more information.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NoReturn

from shardwise.config import FLAGS_VARIABLE
from shardwise.config.values import MOST_RANKS
from shardwise.errors import LaunchError
from shardwise.net.environment import BY_HAND
from shardwise.net.identity import Identity, read_integer, read_integers, read_text
from shardwise.net.launchers.signs import WAYS

NAMES = {
    "rank": "SLURM_PROCID",
    "size": "SLURM_STEP_NUM_TASKS",
    "local_rank": "SLURM_LOCALID",
    "node": "SLURM_NODEID",
}
OWN_GPUS = "SLURM_GPUS_PER_TASK"
"""Set by --gpus-per-task, which makes Slurm show each task only its own GPUs, counted from 0."""

FIRST_SPECIAL_STEP = 0xFFFFFF00
"""The lowest id of special steps: batch scripts, interactive shells and Slurm's internal steps."""


def detect(environ: Mapping[str, str]) -> Identity | None:
    """Return the identity of an srun task, or None outside a task.

    Raises LaunchError if the task's variables are incomplete or contradict each other.
    """
    if not in_step(environ):
        if _is_broken_step(environ):
            shown = " ".join(f"{name}={environ.get(name)}" for name in _OF_A_STEP)
            raise LaunchError(f"Slurm says {shown}: this is not a rank of a Slurm step. {WAYS}")
        return None
    numbers = read_integers(environ, NAMES, "Slurm")
    tasks = task_counts(read_text(environ, "SLURM_STEP_TASKS_PER_NODE", "Slurm"))
    if sum(tasks) != numbers["size"] or numbers["node"] >= len(tasks):
        raise LaunchError(
            f"Slurm says SLURM_STEP_NUM_TASKS={numbers['size']} and SLURM_NODEID="
            f"{numbers['node']}, but SLURM_STEP_TASKS_PER_NODE="
            f"{environ['SLURM_STEP_TASKS_PER_NODE']}: find out what sets these variables."
        )
    return Identity(
        launcher="Slurm",
        local_size=tasks[numbers["node"]],
        address=node_names(read_text(environ, "SLURM_STEP_NODELIST", "Slurm"))[0],
        job=step_name(environ),
        own_gpus=OWN_GPUS in environ,
        variables=NAMES | {"local_size": "SLURM_STEP_TASKS_PER_NODE"},
        **numbers,
    )


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is one of srun's tasks rather than an interactive shell."""
    # Tasks started from a shell of `srun --pty` inherit SLURM_PTY_PORT, but have a higher step id.
    # The job name does not help, because salloc names all its jobs `interactive`.
    number = environ.get("SLURM_STEP_ID", "")
    if not (number.isascii() and number.isdigit()) or int(number[:20]) >= FIRST_SPECIAL_STEP:
        return False
    # Only process 0 of `srun --pty` is the shell. Its other tasks are ordinary ranks.
    is_first = environ.get("SLURM_PROCID") == "0"
    is_shell = "SLURM_PTY_PORT" in environ and int(number) == 0 and is_first
    return "SLURM_PROCID" in environ and not is_shell


_OF_A_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_PROCID")


def _is_broken_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is one of srun's tasks but lacks some of its variables.

    Returns False for the shell of a step, and for a batch script (a step in newer Slurm versions).
    """
    number = environ.get("SLURM_STEP_ID")
    if number is not None and _STEP.fullmatch(number) is None:
        return True
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PTY_PORT" in environ:
        return False
    return number is None or "SLURM_PROCID" not in environ


_STEP = re.compile(r"-?\d{1,19}", re.ASCII)


def step_name(environ: Mapping[str, str]) -> str:
    """Return a unique name for this run."""
    # A requeued job keeps its id, so the name must include the number of restarts.
    again = environ.get("SLURM_RESTART_COUNT", "0")
    return f"slurm {environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']} {again}"


# -- Slurm's lists of nodes and tasks ----------------------------------------------------------

_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_NUMBER = re.compile(r"0*\d{1,18}", re.ASCII)
_NODE = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def node_names(text: str) -> list[str]:
    """Expand a node list, preserving its order: `n[1-2,7],m03` becomes n1, n2, n7, m03.

    Numbers keep their leading zeros, and a name may contain several ranges. Raises LaunchError if
    the list is malformed.
    """
    patterns = _NODE.findall(text)
    if not patterns or ",".join(patterns) != text:
        raise LaunchError(
            f"Slurm gave the list of nodes {text!r}, which is not of the form n[1-2,7],m03."
        )
    names = []
    for pattern in patterns:
        parts = [
            [plain] if plain else list(_range(ranges, text))
            for ranges, plain in _PART.findall(pattern)
        ]
        names += ["".join(name) for name in product(*parts)]
    return names


def _range(ranges: str, text: str) -> Iterator[str]:
    for one in ranges.split(","):
        low, dash, high = one.partition("-")
        high = high if dash else low
        ends = [_NUMBER.fullmatch(each) for each in (low, high)]
        if not all(ends) or not 0 <= int(high) - int(low) < MOST_RANKS:
            raise LaunchError(f"{one!r} in the list of nodes {text!r} is not a number or a range.")
        for number in range(int(low), int(high) + 1):
            yield f"{number:0{len(low)}d}"


def task_counts(text: str) -> list[int]:
    """Expand a list of tasks per host: `2(x3),1` becomes 2, 2, 2, 1.

    Raises LaunchError if the list is malformed.
    """
    found: list[int] = []
    if sum(map(int, re.findall(r"\(x(\d{1,9})", text, re.ASCII))) > MOST_RANKS:
        raise LaunchError(f"{text!r} lists more than {MOST_RANKS} hosts: find out what sets it.")
    for one in text.split(","):
        match = _COUNT.fullmatch(one)
        if match is None:
            raise LaunchError(
                f"Slurm gave the list of tasks {text!r}, which is not of the form 2(x3),1."
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


# -- starting ranks by srun --------------------------------------------------------------------


def needs_srun(environ: Mapping[str, str]) -> bool:
    """Return whether this job's hosts can only be reached through srun. No side effects."""
    return "SLURM_JOB_ID" in environ and not (in_step(environ) or _is_this_host(environ))


def tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the number of tasks in an allocation of a single host.

    Returns None if the number is not set, or if there are several hosts.
    """
    if not ("SLURM_JOB_ID" in environ and environ.get("SLURM_NTASKS") and _is_this_host(environ)):
        return None
    return _positive(environ, "SLURM_NTASKS")


def srun_command(
    environ: Mapping[str, str],
    command: tuple[str, ...],
    *,
    size: int | None = None,
    per_host: int | None = None,
) -> tuple[str, ...]:
    """Return the srun command line that starts the ranks. No side effects.

    Args:
        environ: The allocation's variables.
        command: The command line of a rank.
        size: The number of ranks. Defaults to the allocation's number of tasks if it is set.
            Otherwise, defaults to one rank per GPU or, without GPUs, one rank per host.
        per_host: The number of ranks per host, or None to let srun distribute them.

    Raises:
        LaunchError: The ranks do not fit on the hosts.
    """
    hosts = len(node_names(read_text(environ, "SLURM_JOB_NODELIST", "Slurm")))
    if size is None and per_host is None and "SLURM_NTASKS" not in environ:
        per_host = _positive({"SLURM_GPUS_ON_NODE": "1"} | dict(environ), "SLURM_GPUS_ON_NODE")
    if size is not None and per_host is not None and size > hosts * per_host:
        raise LaunchError(
            f"-n {size} ranks do not fit on the {hosts} hosts of Slurm job "
            f"{environ['SLURM_JOB_ID']} with {per_host} on each."
        )
    if size is None:
        size = hosts * per_host if per_host is not None else _positive(environ, "SLURM_NTASKS")
    found = ["srun", f"--nodes={min(hosts, size)}", f"--ntasks={size}"]
    found += [f"--ntasks-per-node={per_host}"] if per_host is not None else []
    if "SLURM_CPUS_PER_TASK" in environ:  # srun ignores this variable since Slurm 22.05
        found += [f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}"]
    if "SLURM_PTY_PORT" in environ:  # the shell's own step occupies the cores
        found += ["--overlap"]
    return (*found, "--kill-on-bad-exit=1", "--label", "--", *command)


def srun_environment(
    environ: Mapping[str, str], flags: Mapping[str, str], port: int = 0
) -> dict[str, str]:
    """Return the environment for srun and its ranks, including the settings in `flags`."""
    given = {"PYTHONUNBUFFERED": "1", FLAGS_VARIABLE: json.dumps(dict(flags))}
    if port:
        first = node_names(read_text(environ, "SLURM_JOB_NODELIST", "Slurm"))[0]
        given |= {"MASTER_ADDR": first, "MASTER_PORT": str(port)}
    # The allocation's number of tasks per host would contradict our srun flags.
    kept = {name: value for name, value in environ.items() if name != "SLURM_NTASKS_PER_NODE"}
    kept = {name: value for name, value in kept.items() if name not in BY_HAND}
    return {"PYTHONFAULTHANDLER": "1"} | kept | given


def become_srun(command: tuple[str, ...], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process with srun, which handles Ctrl-C and sets the exit code.

    Raises LaunchError if srun cannot be started.
    """
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise LaunchError(
            f"Slurm job {environ.get('SLURM_JOB_ID')} needs srun to start the ranks, but "
            f"{command[0]} cannot be started: {error.strerror}. Is it on PATH?"
        ) from None


def _positive(environ: Mapping[str, str], variable: str) -> int:
    found = read_integer(environ, variable, "Slurm")
    if found < 1:
        raise LaunchError(f"{variable}={found}, set by Slurm, is not a number of ranks: give -n.")
    return found


def _is_this_host(environ: Mapping[str, str]) -> bool:
    return environ.get("SLURM_JOB_NUM_NODES") == "1" and "SLURMD_NODENAME" in environ
