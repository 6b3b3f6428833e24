"""Reads which task of a Slurm step a rank is, and starts ranks by srun.

A batch script that has not called srun carries many of a task's variables, and so does the shell of
an interactive allocation; neither is a step that trains.

Inside an allocation `shardwise run` leaves the starting to srun:

    sbatch -N 2 --gpus-per-node 4 job.sh      job.sh: shardwise run --zero 3 train.py

srun puts the ranks on all hosts of the allocation, writes the rank in front of each line, and
ends all of them when one fails. Where the allocation is this very host, nothing is left for srun
to do, and our own launcher says more when a rank fails.
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
"""Set by --gpus-per-task, with which Slurm shows each task its own GPUs, counted from 0."""

FIRST_SPECIAL_STEP = 0xFFFFFF00
"""Steps of the batch script, of interactive shells and of Slurm's own have numbers from here."""


def detect(environ: Mapping[str, str]) -> Identity | None:
    """The identity of a task of srun, or None outside of one."""
    if not in_step(environ):
        if _is_broken_step(environ):
            shown = " ".join(f"{name}={environ.get(name)}" for name in _OF_A_STEP)
            raise LaunchError(f"Slurm says {shown}: this is no step with a rank in it. {WAYS}")
        return None
    numbers = read_integers(environ, NAMES, "Slurm")
    tasks = task_counts(read_text(environ, "SLURM_STEP_TASKS_PER_NODE", "Slurm"))
    if sum(tasks) != numbers["size"] or numbers["node"] >= len(tasks):
        raise LaunchError(
            f"Slurm says SLURM_STEP_NUM_TASKS={numbers['size']} and SLURM_NODEID="
            f"{numbers['node']}, but SLURM_STEP_TASKS_PER_NODE="
            f"{environ['SLURM_STEP_TASKS_PER_NODE']}: check what sets these variables."
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
    """Whether srun started this process to work, rather than as a shell to type in.

    What srun starts from a shell of `srun --pty` inherits its marks; only its number is higher.
    The name of the job tells nothing: salloc calls every one of its jobs `interactive`.
    """
    number = environ.get("SLURM_STEP_ID", "")
    if not (number.isascii() and number.isdigit()) or int(number[:20]) >= FIRST_SPECIAL_STEP:
        return False
    # The shell is process 0; the other tasks of srun --pty are ranks as any.
    is_first = environ.get("SLURM_PROCID") == "0"
    is_shell = "SLURM_PTY_PORT" in environ and int(number) == 0 and is_first
    return "SLURM_PROCID" in environ and not is_shell


_OF_A_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_PROCID")


def _is_broken_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process with others, but not all that it said is there.

    The shell of a step, and a batch script of which newer versions make a step, are none.
    """
    number = environ.get("SLURM_STEP_ID")
    if number is not None and _STEP.fullmatch(number) is None:
        return True
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PTY_PORT" in environ:
        return False
    return number is None or "SLURM_PROCID" not in environ


_STEP = re.compile(r"-?\d{1,19}", re.ASCII)


def step_name(environ: Mapping[str, str]) -> str:
    """A name of this run alone: a requeued job runs again under its old number."""
    again = environ.get("SLURM_RESTART_COUNT", "0")
    return f"slurm {environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']} {again}"


# -- Slurm's lists of nodes and tasks ----------------------------------------------------------

_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_NUMBER = re.compile(r"0*\d{1,18}", re.ASCII)
_NODE = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def node_names(text: str) -> list[str]:
    """The names in a node list, in its order: `n[1-2,7],m03` is n1, n2, n7, m03.

    Numbers keep their leading zeros, and a name may have several ranges. Raises LaunchError.
    """
    patterns = _NODE.findall(text)
    if not patterns or ",".join(patterns) != text:
        raise LaunchError(
            f"{text!r} is no list of nodes such as n[1-2,7],m03, which Slurm should have given."
        )
    return [name for pattern in patterns for name in _expanded(pattern, text)]


def _expanded(pattern: str, text: str) -> list[str]:
    parts = [
        [plain] if plain else list(_range(ranges, text)) for ranges, plain in _PART.findall(pattern)
    ]
    return ["".join(name) for name in product(*parts)]


def _range(ranges: str, text: str) -> Iterator[str]:
    for one in ranges.split(","):
        low, dash, high = one.partition("-")
        high = high if dash else low
        ends = [_NUMBER.fullmatch(each) for each in (low, high)]
        if not all(ends) or not 0 <= int(high) - int(low) < MOST_RANKS:
            raise LaunchError(f"{one!r} in the list of nodes {text!r} is no number nor a range.")
        for number in range(int(low), int(high) + 1):
            yield f"{number:0{len(low)}d}"


def task_counts(text: str) -> list[int]:
    """How many tasks each host has: `2(x3),1` is 2, 2, 2, 1. Raises LaunchError."""
    found: list[int] = []
    if sum(map(int, re.findall(r"\(x(\d{1,9})", text, re.ASCII))) > MOST_RANKS:
        raise LaunchError(f"{text!r} lists more hosts than any run has: check what sets it.")
    for one in text.split(","):
        match = _COUNT.fullmatch(one)
        if match is None:
            raise LaunchError(
                f"{text!r} is no list of tasks such as 2(x3),1, which Slurm should have given."
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


# -- starting ranks by srun --------------------------------------------------------------------


def needs_srun(environ: Mapping[str, str]) -> bool:
    """Whether hosts are allocated to us that only srun starts processes on. Pure."""
    return "SLURM_JOB_ID" in environ and not (in_step(environ) or _is_this_host(environ))


def tasks_here(environ: Mapping[str, str]) -> int | None:
    """The ranks that an allocation of this host alone asks for; None where it asks for none."""
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
    """What to execute so that srun starts `size` ranks of `command` in all, `per_host` on each.

    With neither, as many as the allocation asks for: its tasks, else its GPUs, else one per host.
    Pure. Raises LaunchError for counts that the hosts cannot hold evenly.
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
    if "SLURM_CPUS_PER_TASK" in environ:  # srun does not take it over, since Slurm 22.05
        found += [f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}"]
    if "SLURM_PTY_PORT" in environ:  # the shell that we are in holds the cores
        found += ["--overlap"]
    return (*found, "--kill-on-bad-exit=1", "--label", "--", *command)


def srun_environment(
    environ: Mapping[str, str], flags: Mapping[str, str], port: int = 0
) -> dict[str, str]:
    """The variables that srun passes on to the ranks: ours, and the settings in `flags`."""
    given = {"PYTHONUNBUFFERED": "1", FLAGS_VARIABLE: json.dumps(dict(flags))}
    if port:
        first = node_names(read_text(environ, "SLURM_JOB_NODELIST", "Slurm"))[0]
        given |= {"MASTER_ADDR": first, "MASTER_PORT": str(port)}
    # an allocation's own count would contradict the one that we give
    kept = {name: value for name, value in environ.items() if name != "SLURM_NTASKS_PER_NODE"}
    kept = {name: value for name, value in kept.items() if name not in BY_HAND}
    return {"PYTHONFAULTHANDLER": "1"} | kept | given


def become_srun(command: tuple[str, ...], environ: Mapping[str, str]) -> NoReturn:
    """Become srun, so that Ctrl-C and the exit code are its own. Raises LaunchError."""
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise LaunchError(
            f"This is Slurm job {environ.get('SLURM_JOB_ID')}, whose hosts srun starts processes "
            f"on, but {command[0]} cannot be started: {error.strerror}. Is it on PATH?"
        ) from None


def _positive(environ: Mapping[str, str], variable: str) -> int:
    found = read_integer(environ, variable, "Slurm")
    if found < 1:
        raise LaunchError(f"{variable}={found}, set by Slurm, asks for no rank: give -n.")
    return found


def _is_this_host(environ: Mapping[str, str]) -> bool:
    """Whether this process is on the only host of the allocation."""
    return environ.get("SLURM_JOB_NUM_NODES") == "1" and "SLURMD_NODENAME" in environ
