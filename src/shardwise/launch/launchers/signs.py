"""Finds signs that a process is one of several, although no launcher that we can read started it.

Such a process must not train alone: its neighbours would train the same model again, and overwrite
each other's checkpoints, without a word.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

_RANK = re.compile(r"(.*?)(?:RANK|RANKID|RANK_ID|PROCID|PROCNO|PROC_ID|TASK_RANK|TASK_ID|TASKID)")
_SIZE = re.compile(
    r"(.*?)(?:(?:WORLD_|JOB_)?SIZE|WORLD|(?:N|NUM_?)(?:PROCS|PROCESSES|TASKS|RANKS|NODES|HOSTS))"
)
"""A rank and its size have the same prefix before these words."""

_NOT_RANKS = re.compile(
    r"SLURM_|SHARDWISE_LAUNCH_|PBS_|LSB_|LS_|SGE_|OAR_|COBALT_|(.*_)?(LOCAL|CROSS|ARRAY|ROLE)_"
)
"""Variables of batch jobs, which the readers know; of hosts, and of independent tasks."""

_NODE_COUNTS = ("NNODES", "NUM_NODES", "NHOSTS")

_SOCKETS = ("PMI_FD", "PMI_PORT", "PMIX_NAMESPACE", "PMIX_RANK", "PMI_CONTROL_FD")
"""Set for processes that can ask a launcher who they are, in a language that we do not speak."""

WAYS = (
    "Start the ranks with `shardwise run`; or tell each of them who it is with SHARDWISE_RANK, "
    "SHARDWISE_SIZE and SHARDWISE_RENDEZVOUS=HOST:PORT (rank 0's host and a free port there); or, "
    "if this process is meant to be alone, set SHARDWISE_ALONE=1."
)


def find(environ: Mapping[str, str], parents: Sequence[str]) -> list[str]:
    """Return the signs that this process is one of several, in words. Pure.

    `parents` are the names of the processes above this one that start ranks.
    """
    signs = (
        [] if _number(environ.get("WORLD_SIZE")) == 1 else ["WORLD_SIZE=" + environ["WORLD_SIZE"]]
    )
    for rank, size in _pairs(environ):
        signs += [f"{name}={environ[name]}" for name in (rank, size)]
    if environ.get("SLURM_STEP_NUM_TASKS") != "1":
        # The shell of a step with one task has them as well, and is alone.
        signs += [f"{name}={environ[name]}" for name in _SOCKETS if name in environ]
    names = ["JOB_COMPLETION_INDEX", "ALPS_APP_PE"]
    if _number(environ.get("DET_KUBERNETES_JOB_PARALLELISM")) != 1:
        names.append("DET_KUBERNETES_JOB_PARALLELISM")
    # Task 1 of PBS is the batch script; pbsdsh starts the others. Grid Engine's are petasks.
    if environ.get("PBS_TASKNUM", "1").lstrip("0") != "1":
        names.append("PBS_TASKNUM")
    if "SGE_ROOT" in environ and environ.get("JOB_NAME") == "petask":
        names.append("JOB_NAME")
    if _hosts_of_tensorflow(environ) > 1:
        names.append("TF_CONFIG")
    signs += [f"{name}={environ[name][:80]}" for name in names if name in environ]
    signs += [f"started by {name}" for name in parents]
    return list(dict.fromkeys(signs))


def in_job(environ: Mapping[str, str]) -> str | None:
    """Return the variable that shows that this batch job has several slots; None without one."""
    for name in ("SLURM_NTASKS", "LSB_DJOB_NUMPROC", "NSLOTS", "PBS_NP", "COBALT_JOBSIZE"):
        if _number(environ.get(name)) > 1:
            return f"{name}={environ[name]}"
    return None


def _hosts_of_tensorflow(environ: Mapping[str, str]) -> int:
    """Return the number of hosts that TF_CONFIG lists; 0 if it lists none."""
    try:
        cluster = json.loads(environ["TF_CONFIG"])["cluster"]
        return sum(len(cluster.get(name, ())) for name in ("chief", "master", "worker"))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return 0


def refusal(signs: Sequence[str]) -> str:
    """Return the message for a process with `signs` that would otherwise train alone."""
    return (
        f"This process looks like one of several ({', '.join(signs)}), but Shardwise cannot read "
        f"from that which one of how many it is. It would train alone, next to the others. {WAYS}"
    )


def _pairs(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the names of variables that look like a rank and its number of ranks above 1."""
    sizes: dict[str, list[str]] = {}
    for name in environ:
        if (match := _SIZE.fullmatch(name)) and not _NOT_RANKS.match(name):
            sizes.setdefault(_stem(match[1]), []).append(name)
    for name in environ:
        match = _RANK.fullmatch(name)
        if match is None or _NOT_RANKS.match(name):
            continue
        # A rank among nodes is counted by nodes, and any other rank by processes.
        is_node = match[1].endswith("NODE_")
        for size in sizes.get(_stem(match[1].removesuffix("NODE_")), ()):
            rank, count = _number(environ[name]), _number(environ[size])
            if is_node == size.endswith(_NODE_COUNTS) and -1 < rank < count > 1:
                yield name, size


def _stem(text: str) -> str:
    """Return the prefix of a launcher's variables: `OMPI_` for `OMPI_COMM_WORLD_`."""
    for word in ("WORLD_", "COMM_", "JOB_", "TASK_", "PROC_"):
        text = text.removesuffix(word)
    return text


def _number(text: str | None) -> int:
    """Return `text` as a number: 1 if it is absent, -1 if it is not a number."""
    if text is None:
        return 1
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1
