"""Detects which launcher started this process, its rank, and the number of ranks.

`LAUNCHERS` is the table of all launchers. To support another launcher, write a function that reads
its variables and add a row. Nothing else needs to change.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.errors import LaunchError
from shardwise.net.environment import OWN_NAMES, PREFIX
from shardwise.net.identity import Identity, read_integer, read_integers, read_text
from shardwise.net.launchers import mpi, platforms, pmix, processes, schedulers, signs, slurm
from shardwise.net.launchers.variables import Environ, RankVariables, Reader

ALONE = "SHARDWISE_ALONE"
"""Environment variable that the user sets to 1 to run a single process. Overrides all launchers."""

OF_MPI = frozenset({"mpirun", "mpiexec"})


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launcher, and how to detect it.

    Args:
        name: The name shown in messages.
        level: The nesting level, for combinations such as `srun torchrun` or mpirun inside an
            allocation. The innermost launcher has the lowest level and takes precedence.
        read: Function that returns this process's identity, or None if the launcher did not start
            it.
        processes: The names of the launcher's processes that start ranks.
        sets_threads: True if the launcher sets each rank's number of threads.
    """

    name: str
    level: int
    read: Reader
    processes: frozenset[str] = frozenset()
    sets_threads: bool = False


def _shardwise_run(environ: Environ) -> Identity | None:
    """Read the identity set by `shardwise run` (see environment.identity_variables)."""
    if not environ.keys() & OWN_NAMES.values():
        return None
    numbers = read_integers(environ, OWN_NAMES, "shardwise run")
    listening = PREFIX + "LISTEN_FD"
    fd = read_integer(environ, listening, "shardwise run") if listening in environ else None
    return Identity(
        launcher="shardwise run",
        address=read_text(environ, PREFIX + "ADDRESS", "shardwise run"),
        listen_fd=fd,
        variables=OWN_NAMES,
        **numbers,
    )


def _by_hand(environ: Environ) -> Identity | None:
    """Read SHARDWISE_RANK and SHARDWISE_SIZE, set by users who start each process themselves."""
    if "SHARDWISE_SIZE" in environ and "SHARDWISE_RANK" not in environ:
        # Kubernetes tells each pod of an Indexed Job its index, but not the number of pods.
        names = replace(_BY_HAND, rank="JOB_COMPLETION_INDEX")
        identity = names.read(environ) if names.rank in environ else _BY_HAND.read(environ)
    else:
        identity = _BY_HAND.read(environ)
    return None if identity is None else replace(identity, job="by hand")


def _torchrun(environ: Environ) -> Identity | None:
    """Read the variables of torchrun, Ray Train, Azure ML, or DeepSpeed's launcher.

    Azure ML sets no local size. DeepSpeed's launcher names it LOCAL_SIZE.
    """
    local = {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & environ.keys()
    if not local or not {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    read_text(environ, "MASTER_ADDR", _TORCHRUN.launcher)
    is_deepspeeds = "LOCAL_SIZE" in environ and "LOCAL_WORLD_SIZE" not in environ
    names = replace(_TORCHRUN, local_size="LOCAL_SIZE") if is_deepspeeds else _TORCHRUN
    return _with_port(names.read(environ), environ)


def _environment(environ: Environ) -> Identity | None:
    """Read RANK, WORLD_SIZE and MASTER_ADDR if no local rank is set.

    Services (Kubeflow's PyTorchJob, Vertex AI) set them for each pod or host, and users set them in
    scripts. If a launcher starts ranks inside the pod, its variables take precedence.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys() or _torchrun(environ):
        return None
    platforms.check_processes_per_pod(environ)
    names = replace(_TORCHRUN, launcher="the environment", local_rank=None, local_size=None)
    return _with_port(names.read(environ), environ)


def _with_port(identity: Identity | None, environ: Environ) -> Identity | None:
    if identity is None:
        return None
    return replace(
        identity,
        address=environ["MASTER_ADDR"],
        port=read_integer(environ, "MASTER_PORT", identity.launcher),
        variables={**identity.variables, "port": "MASTER_PORT"},
    )


_BY_HAND = RankVariables(
    launcher="the user",
    rank="SHARDWISE_RANK",
    size="SHARDWISE_SIZE",
    local_rank="SHARDWISE_LOCAL_RANK",
    local_size="SHARDWISE_LOCAL_SIZE",
)
_TORCHRUN = RankVariables(
    launcher="torchrun",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    node="GROUP_RANK",
)
_HOROVOD = RankVariables(
    launcher="horovodrun",
    rank="HOROVOD_RANK",
    size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_size="HOROVOD_LOCAL_SIZE",
    node="HOROVOD_CROSS_RANK",
    job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
)

# Levels: 0 ours, 1 set by hand, 2 Python launchers and single-host launchers, 3 MPI, 4 schedulers,
# 5 and 6 services that start one process per host, 7 no launcher.
LAUNCHERS = (
    Launcher(name="shardwise run", level=0, read=_shardwise_run, sets_threads=True),
    Launcher(name="the user", level=1, read=_by_hand),
    Launcher(name="torchrun", level=2, read=_torchrun, sets_threads=True),
    Launcher(name="horovodrun", level=2, read=_HOROVOD.read),
    Launcher(
        name="Open MPI",
        level=3,
        read=mpi.open_mpi,
        processes=OF_MPI | {"mpirun.openmpi", "orterun", "orted", "prterun", "prted"},
    ),
    Launcher(
        name="MPICH",
        level=3,
        read=mpi.hydra,
        processes=OF_MPI | {"mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_proxy"},
    ),
    Launcher(name="MVAPICH", level=3, read=mpi.mvapich, processes=OF_MPI | {"mpispawn"}),
    Launcher(name="PMI", level=3, read=mpi.pmi, processes=frozenset({"mpiexec.gforker"})),
    Launcher(name="PMIx", level=3, read=pmix.read),
    Launcher(name="Slurm", level=4, read=slurm.detect, processes=frozenset({"slurmstepd"})),
    Launcher(name="Flux", level=4, read=schedulers.FLUX.read, processes=frozenset({"flux-shell"})),
    Launcher(name="LSF", level=4, read=schedulers.lsf),
    Launcher(name="PALS", level=4, read=schedulers.pals),
    Launcher(name="HTCondor", level=4, read=schedulers.CONDOR.read),
    Launcher(name="the environment", level=5, read=_environment),
    Launcher(name="SageMaker", level=5, read=platforms.sagemaker),
    Launcher(name="SkyPilot", level=5, read=platforms.skypilot),
    Launcher(name="Kubeflow", level=5, read=platforms.kubeflow),
    Launcher(name="AWS Batch", level=5, read=platforms.aws_batch),
    # Pods of the services above may have an index too, but their own variables hold more
    # information.
    Launcher(name="Kubernetes", level=6, read=platforms.indexed_job),
    # No launcher: a single-process run.
    Launcher(
        name="python", level=7, read=lambda environ: Identity(launcher="python"), sets_threads=True
    ),
)

PROCESSES = frozenset(name[:15] for row in LAUNCHERS for name in row.processes)
"""The names of all processes that start ranks, truncated to 15 characters as by the kernel."""

_LEVEL_OF_MPI = 3
_STARTERS = frozenset(
    name[:15] for row in LAUNCHERS if row.level == _LEVEL_OF_MPI for name in row.processes
)
"""The processes of MPI launchers. Unlike a scheduler's, they start only ranks, no batch scripts."""

SERVICES = frozenset(row.name for row in LAUNCHERS if row.level in (5, 6)) | {"HTCondor"}
"""The names of the launchers that start one process per host or pod."""

SETS_THREADS = frozenset(row.name for row in LAUNCHERS if row.sets_threads)
"""The names of the launchers that set the number of threads of each rank."""


def processes_of(launcher: str) -> frozenset[str]:
    """Return the names of the processes whose children are `launcher`'s ranks."""
    rows = (row for row in LAUNCHERS if row.name == launcher)
    return frozenset(name[:15] for row in rows for name in row.processes)


def identify(environ: Environ = os.environ) -> Identity:
    """Return the identity of this process, based on its environment and its ancestors.

    Raises LaunchError under the same conditions as `detect`.
    """
    parents = [name for _, name in processes.ancestors() if name in _STARTERS]
    return detect({**environ, **pmix.ask(environ)}, parents)


def around_command() -> Identity:
    """Return the identity of this `shardwise run` command, which a launcher may start on each host.

    Inside a rank of an outer `shardwise run`, the command is treated as a single process.
    """
    environ = dict(os.environ)
    if OWN_NAMES["rank"] in environ:
        return Identity(launcher="python")
    # Kubeflow's variables count the processes of all pods. This command starts the processes of its
    # own pod, so only the number of pods matters here.
    if {"PET_NNODES", "PET_NODE_RANK"} <= environ.keys() and "LOCAL_RANK" not in environ:
        environ.pop("RANK", None)
    environ.pop("PET_NPROC_PER_NODE", None)
    # Ignore a size without a rank: a batch script may have set it for later.
    if "RANK" not in environ:
        environ.pop("WORLD_SIZE", None)
    try:
        return identify(environ)
    except LaunchError as error:
        raise LaunchError(str(error).replace(signs.WAYS, signs.WAYS_OF_COMMAND)) from None


def detect(environ: Environ, parents: Sequence[str] = ()) -> Identity:
    """Return the identity of this process, as set by its innermost launcher. No side effects.

    Args:
        environ: The environment variables.
        parents: The names of those ancestors of this process that start ranks.

    Raises:
        LaunchError: Variables are missing or have impossible values, two launchers at the same
            level contradict each other, or the process seems to be one of several but its rank
            cannot be determined.
    """
    if _is_alone(environ):
        ours = _shardwise_run(environ)
        return ours or Identity(launcher="python", variables={"size": ALONE})
    found: list[Identity] = []
    level = 0
    for level in sorted({row.level for row in LAUNCHERS}):
        rows = [row for row in LAUNCHERS if row.level == level]
        found = [who for row in rows if (who := row.read(environ)) is not None]
        if found:
            break
    identity = _agreed(found)
    if identity.launcher == "the user":
        # A user who exports SHARDWISE_RANK once and then calls mpirun gives the same rank to all
        # processes. But a launcher with fewer ranks may be an outer one, whose ranks each start
        # several processes.
        for row in LAUNCHERS:
            if row.level in (_LEVEL_OF_MPI, _LEVEL_OF_MPI + 1):
                other = row.read(environ)
                if other is not None and other.size >= identity.size:
                    _agreed([identity, other])
    # A launcher that started one process may enclose one that started several, but that we cannot
    # read.
    elif identity.size == 1 and level >= _LEVEL_OF_MPI:
        found_signs = signs.find(environ, parents, alone=identity.launcher == "python")
        if found_signs:
            raise LaunchError(signs.refusal(found_signs))
    if identity.launcher == "python" or identity.port is not None:
        return identity
    if not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return identity
    # The user's script sets rank 0's address, which the launcher did not provide.
    port = read_integer(environ, "MASTER_PORT", "the script that started this process")
    return replace(identity, address=environ["MASTER_ADDR"], port=port)


def _is_alone(environ: Environ) -> bool:
    """Return whether the user has requested a single process with SHARDWISE_ALONE.

    Raises LaunchError if the variable has an invalid value.
    """
    text = environ.get(ALONE, "")
    if text not in ("", "0", "1"):
        raise LaunchError(f"{ALONE} takes 0 or 1, not {text[:40]!r}: write 1, or unset it.")
    return text == "1"


def _agreed(found: list[Identity]) -> Identity:
    """Return the identity on which all in `found` agree. Raise LaunchError if they disagree."""
    first = found[0]
    for other in found[1:]:
        if (other.rank, other.size) != (first.rank, first.size):
            raise LaunchError(
                f"{claim(first)}, but {claim(other)}. Unset the variables of the launcher that did "
                "not start this process."
            )
    return first


def claim(identity: Identity) -> str:
    """Return a phrase that states the rank and size that a launcher has set, and the variables."""
    rank, size = identity.variables["rank"], identity.variables["size"]
    return f"{identity.launcher} says {rank}={identity.rank}, {size}={identity.size}"
