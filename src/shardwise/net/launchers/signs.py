"""Detects whether a process is one of several that an unsupported launcher has started.

Such a process must not train alone: all processes would train the same model, and silently
overwrite each other's checkpoints.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

_RANK = re.compile(
    r"(.*?)(?:RANK|RANKID|RANK_ID|PROCID|PROCNO|PROC_ID|TASK_RANK|TASK_ID|TASKID|NODE_INDEX)"
)
_SIZE = re.compile(
    r"(.*?)(?:(?:WORLD_|JOB_)?SIZE|WORLD|NPROC|"
    r"(?:N|NUM_?)(?:PROCS|PROCESSES|TASKS|RANKS|NODES|HOSTS|MACHINES))"
)
"""A rank variable and its size variable have the same prefix before these words."""

_NOT_RANKS = re.compile(
    r"SLURM_|SHARDWISE_LAUNCH_|PBS_|LSB_|LS_|SGE_|OAR_|COBALT_|(.*_)?(LOCAL|CROSS|ARRAY|ROLE)_"
)
"""Variables that are not ranks: of batch jobs (which have readers), hosts and independent tasks."""

_HYPERPARAMETERS = re.compile(r"(.*_)?(LORA|BATCH|ADAPTER|MATRIX|TENSOR|PAGE)_")
"""Prefixes of matrix ranks and of other sizes."""

_NODES = ("NODE_", "MACHINE_")
_NODE_COUNTS = ("NNODES", "NUM_NODES", "NHOSTS", "NUM_HOSTS", "NUM_MACHINES", "NMACHINES")

_SOCKETS = ("PMI_FD", "PMI_PORT", "PMIX_NAMESPACE", "PMIX_RANK", "PMI_CONTROL_FD")
"""Set for processes that can obtain their identity from a launcher through an MPI protocol."""

WAYS = (
    "Start the ranks with `shardwise run`; or set SHARDWISE_RANK, SHARDWISE_SIZE and "
    "SHARDWISE_RENDEZVOUS=HOST:PORT (rank 0's host and a free port there) for each of them; or, "
    "if this process is meant to be alone, set SHARDWISE_ALONE=1."
)

WAYS_OF_COMMAND = (
    "Call shardwise run once, or once on each host with --nnodes. If this call is meant to be the "
    "only one, or a separate run, set SHARDWISE_ALONE=1."
)


def find(environ: Mapping[str, str], parents: Sequence[str], *, alone: bool = True) -> list[str]:
    """Return the signs that this process is one of several, as text. No side effects.

    Args:
        environ: The environment variables.
        parents: The names of those ancestors of this process that start ranks.
        alone: True if no launcher was detected. False if the detected launcher claims to have
            started a single process. In that case, the only signs are pairs of variables that
            contain a rank and a size.
    """
    signs = [f"{name}={environ[name]}" for rank, size in _pairs(environ) for name in (rank, size)]
    if not alone:
        return list(dict.fromkeys(signs))
    if _number(environ.get("WORLD_SIZE")) != 1:
        signs.insert(0, f"WORLD_SIZE={environ['WORLD_SIZE']}")
    if environ.get("SLURM_STEP_NUM_TASKS") != "1":
        # The shell of a step with a single task has these variables too, but is not one of several.
        signs += [f"{name}={environ[name]}" for name in _SOCKETS if name in environ]
    names = ["ALPS_APP_PE"]
    if {"RANK", "MASTER_ADDR"} <= environ.keys():
        names.append("RANK")
    # The only pod of a Job has index 0 too. If there are more pods, they raise an error, so the Job
    # fails.
    if environ.get("JOB_COMPLETION_INDEX", "0") != "0":
        names.append("JOB_COMPLETION_INDEX")
    # Batch scripts and shells are process 0. Any other number belongs to a task of srun, in a
    # container into which only some of its variables were passed.
    if _number(environ.get("SLURM_PROCID", "0")) != 0:
        names.append("SLURM_PROCID")
    if len(environ.get("AZ_BATCH_HOST_LIST", "").split(",")) > 1:
        names.append("AZ_BATCH_HOST_LIST")
    if _number(environ.get("DET_KUBERNETES_JOB_PARALLELISM")) != 1:
        names.append("DET_KUBERNETES_JOB_PARALLELISM")
    # In PBS, task 1 is the batch script and pbsdsh starts the other tasks. Grid Engine names such
    # tasks "petask".
    if environ.get("PBS_TASKNUM", "1").lstrip("0") != "1":
        names.append("PBS_TASKNUM")
    if "SGE_ROOT" in environ and environ.get("JOB_NAME") == "petask":
        names.append("JOB_NAME")
    names += [name for name in ("TF_CONFIG", "CLUSTER_SPEC") if _hosts_in(environ, name) > 1]
    signs += [f"{name}={environ[name][:80]}" for name in names if name in environ]
    signs += [f"started by {name}" for name in parents]
    return list(dict.fromkeys(signs))


def in_job(environ: Mapping[str, str]) -> str | None:
    """Return a variable, as "NAME=VALUE", that shows that this batch job has several slots.

    Returns None if there is no such variable.
    """
    for name in ("SLURM_NTASKS", "LSB_DJOB_NUMPROC", "NSLOTS", "PBS_NP", "COBALT_JOBSIZE"):
        if _number(environ.get(name)) > 1:
            return f"{name}={environ[name]}"
    index = "JOB_COMPLETION_INDEX"
    return f"{index}={environ[index]}, of an unknown number of pods" if index in environ else None


def _hosts_in(environ: Mapping[str, str], name: str) -> int:
    """Return the number of hosts in the variable `name` (TF_CONFIG or CLUSTER_SPEC), 0 if unset."""
    roles = ("chief", "master", "worker", "workerpool0", "workerpool1")
    try:
        cluster = json.loads(environ[name])["cluster"]
        return sum(len(cluster.get(role, ())) for role in roles)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return 0


def refusal(signs: Sequence[str]) -> str:
    """Return the error message for a process that shows `signs` and would otherwise train alone."""
    return (
        f"This process looks like one of several ({', '.join(signs)}), but Shardwise cannot find "
        f"out its rank and the number of ranks. It would train alone, next to the others. {WAYS}"
    )


def _pairs(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of variables that look like a rank and its size, if the size exceeds 1."""
    sizes: dict[str, list[str]] = {}
    for name in environ:
        if (match := _SIZE.fullmatch(name)) and not _NOT_RANKS.match(name):
            sizes.setdefault(_stem(match[1]), []).append(name)
    for name in environ:
        match = _RANK.fullmatch(name)
        if match is None or _NOT_RANKS.match(name) or _HYPERPARAMETERS.match(name):
            continue
        # A rank among nodes goes with a number of nodes, any other rank with a number of processes.
        is_node = match[1].endswith(_NODES) or name.endswith("NODE_INDEX")
        for size in sizes.get(_stem(match[1].removesuffix("NODE_").removesuffix("MACHINE_")), ()):
            if size == "SIZE":
                continue  # may be the size of anything
            rank, count = _number(environ[name]), _number(environ[size])
            if is_node == size.endswith(_NODE_COUNTS) and -1 < rank < count > 1:
                yield name, size


def _stem(text: str) -> str:
    """Return the launcher's prefix of a variable name, such as `OMPI_` for `OMPI_COMM_WORLD_`."""
    for word in ("WORLD_", "COMM_", "GLOBAL_", "JOB_", "TASK_", "PROC_"):
        text = text.removesuffix(word)
    return text


def _number(text: str | None) -> int:
    """Parse `text` as a number. Return 1 if it is None or empty, and -1 if it is not a number."""
    if not text:
        return 1
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1
