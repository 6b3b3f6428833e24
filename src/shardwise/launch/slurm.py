"""A task of a Slurm step: a process that srun started.

A batch script that has not called srun carries many of the same variables, and so does the shell
of an interactive allocation; neither is a step that trains.
"""

from collections.abc import Mapping

from shardwise.errors import LaunchError
from shardwise.launch import node_list
from shardwise.launch.identity import Identity, read, text

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
        return None
    numbers = read(environ, NAMES, "Slurm")
    tasks = node_list.counts(text(environ, "SLURM_STEP_TASKS_PER_NODE", "Slurm"))
    if sum(tasks) != numbers["size"] or numbers["node"] >= len(tasks):
        raise LaunchError(
            f"Slurm says SLURM_STEP_NUM_TASKS={numbers['size']} and SLURM_NODEID="
            f"{numbers['node']}, but SLURM_STEP_TASKS_PER_NODE="
            f"{environ['SLURM_STEP_TASKS_PER_NODE']}: check what sets these variables."
        )
    return Identity(
        launcher="Slurm",
        local_size=tasks[numbers["node"]],
        address=node_list.hosts(text(environ, "SLURM_STEP_NODELIST", "Slurm"))[0],
        job=step(environ),
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
    is_shell = "SLURM_PTY_PORT" in environ and int(number) == 0
    return "SLURM_PROCID" in environ and not is_shell


def step(environ: Mapping[str, str]) -> str:
    """A name of this run alone: a requeued job runs again under its old number."""
    again = environ.get("SLURM_RESTART_COUNT", "0")
    return f"slurm {environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']} {again}"
