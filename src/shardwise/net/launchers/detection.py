"""Finds out which launcher started this process, and which rank of how many it is.

`LAUNCHERS` is the table of all launchers. To add one, write a function that reads its variables
and add a row; nothing else needs to know of it.
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
"""Set to 1, it says that a process is alone, whatever a launcher says."""

OF_MPI = frozenset({"mpirun", "mpiexec"})


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One launcher: how a rank recognises it and reads who it is.

    `read` returns None where the launcher did not start this process. `level` says how far inside
    it is where launchers are nested: `srun torchrun`, and mpirun inside an allocation, are
    ordinary, and the lowest level wins. `processes` are the names of its processes that start
    ranks; the kernel keeps 15 characters of a name. `sets_threads` says that it tells each rank how
    many threads to use.
    """

    name: str
    level: int
    read: Reader
    processes: frozenset[str] = frozenset()
    sets_threads: bool = False


def _shardwise_run(environ: Environ) -> Identity | None:
    """Read the identity that `shardwise run` gave (see environment.identity_variables)."""
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
    """Read SHARDWISE_RANK and SHARDWISE_SIZE, by which a user tells each process who it is."""
    if "SHARDWISE_SIZE" in environ and "SHARDWISE_RANK" not in environ:
        # The pods of an Indexed Job are told a number each, and not of how many.
        names = replace(_BY_HAND, rank="JOB_COMPLETION_INDEX")
        identity = names.read(environ) if names.rank in environ else _BY_HAND.read(environ)
    else:
        identity = _BY_HAND.read(environ)
    return None if identity is None else replace(identity, job="by hand")


def _torchrun(environ: Environ) -> Identity | None:
    """Read the variables of torchrun, or of DeepSpeed's launcher, which names the local size
    LOCAL_SIZE. Ray Train and Azure ML set the same, the latter without a local size."""
    local = {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & environ.keys()
    if not local or not {"RANK", "WORLD_SIZE"} & environ.keys():
        return None
    read_text(environ, "MASTER_ADDR", _TORCHRUN.launcher)
    is_deepspeeds = "LOCAL_SIZE" in environ and "LOCAL_WORLD_SIZE" not in environ
    names = replace(_TORCHRUN, local_size="LOCAL_SIZE") if is_deepspeeds else _TORCHRUN
    return _with_port(names.read(environ), environ)


def _torchruns_variables(environ: Environ) -> Identity | None:
    """Read RANK, WORLD_SIZE and MASTER_ADDR without local ones.

    Services set them for each pod or host (Kubeflow's PyTorchJob, Vertex AI), and scripts by hand.
    So they are outside of a launcher that starts ranks in the pod.
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


def _nothing(environ: Environ) -> Identity:
    """Return the identity of a process that nothing launched: a group of one."""
    del environ
    return Identity(launcher="python")


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
    Launcher(name="the environment", level=5, read=_torchruns_variables),
    Launcher(name="SageMaker", level=5, read=platforms.sagemaker),
    Launcher(name="SkyPilot", level=5, read=platforms.skypilot),
    Launcher(name="Kubeflow", level=5, read=platforms.kubeflow),
    Launcher(name="AWS Batch", level=5, read=platforms.aws_batch),
    # A pod's index under any of the above as well, which say more.
    Launcher(name="Kubernetes", level=6, read=platforms.indexed_job),
    Launcher(name="python", level=7, read=_nothing, sets_threads=True),
)

PROCESSES = frozenset(name[:15] for row in LAUNCHERS for name in row.processes)
"""The names of all processes that start ranks, as the kernel keeps them."""

_LEVEL_OF_MPI = 3
_STARTERS = frozenset(
    name[:15] for row in LAUNCHERS if row.level == _LEVEL_OF_MPI for name in row.processes
)
"""Those of MPI, which start nothing but ranks; a scheduler's also start batch scripts."""

SERVICES = frozenset(row.name for row in LAUNCHERS if row.level in (5, 6)) | {"HTCondor"}
"""The launchers that start one process on each host or pod."""

SETS_THREADS = frozenset(row.name for row in LAUNCHERS if row.sets_threads)
"""The launchers that tell each rank how many threads to use."""


def processes_of(launcher: str) -> frozenset[str]:
    """Return the names of the processes whose children are ranks of `launcher`."""
    rows = (row for row in LAUNCHERS if row.name == launcher)
    return frozenset(name[:15] for row in rows for name in row.processes)


def identify(environ: Environ = os.environ) -> Identity:
    """Return who this process is, from its environment and the processes above it.

    Raises LaunchError as `detect` does.
    """
    parents = [name for _, name in processes.ancestors() if name in _STARTERS]
    return detect({**environ, **pmix.ask(environ)}, parents)


def around_command() -> Identity:
    """Return which of several processes of a launcher this command is; alone inside a rank of ours.

    Pods are counted here, not the processes that each of them is to have: this command starts them.
    A number of ranks without a rank says nothing: a batch script may have set it for later.
    """
    environ = dict(os.environ)
    if OWN_NAMES["rank"] in environ:
        return Identity(launcher="python")
    if {"PET_NNODES", "PET_NODE_RANK"} <= environ.keys() and "LOCAL_RANK" not in environ:
        environ.pop("RANK", None)
    environ.pop("PET_NPROC_PER_NODE", None)
    if "RANK" not in environ:
        environ.pop("WORLD_SIZE", None)
    try:
        return identify(environ)
    except LaunchError as error:
        raise LaunchError(str(error).replace(signs.WAYS, signs.WAYS_OF_COMMAND)) from None


def detect(environ: Environ, parents: Sequence[str] = ()) -> Identity:
    """Return who this process is; where launchers are nested, the innermost wins. Pure.

    `parents` are the names of the processes above this one that start ranks.

    Raises LaunchError for variables that are missing or cannot be, where two launchers of one
    level contradict each other, and for a process that looks like one of several but is not told
    which: it would train alone.
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
        _check_by_hand(identity, environ)
    # A launcher of one process may stand around another one, which nobody can read.
    elif identity.size == 1 and level >= _LEVEL_OF_MPI:
        found_signs = signs.find(environ, parents, alone=identity.launcher == "python")
        if found_signs:
            raise LaunchError(signs.refusal(found_signs))
    return identity if identity.launcher == "python" else _with_address(identity, environ)


def _is_alone(environ: Environ) -> bool:
    """Return whether the user says that this process is alone. Raises LaunchError for a value that
    is neither 0 nor 1."""
    said = environ.get(ALONE, "")
    if said not in ("", "0", "1"):
        raise LaunchError(f"{ALONE}={said[:40]!r}: write 1, or unset it.")
    return said == "1"


def _check_by_hand(identity: Identity, environ: Environ) -> None:
    """Raise LaunchError if a launcher of ranks says otherwise, and of as many ranks or more: the
    variables were exported once, for all of them. Each of its ranks may start several."""
    for row in LAUNCHERS:
        if row.level not in (_LEVEL_OF_MPI, _LEVEL_OF_MPI + 1):
            continue
        other = row.read(environ)
        if other is not None and other.size >= identity.size:
            _agreed([identity, other])


def _with_address(identity: Identity, environ: Environ) -> Identity:
    """Add rank 0's address where the user's own script has set MASTER_ADDR and MASTER_PORT."""
    if identity.port is not None or not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return identity
    port = read_integer(environ, "MASTER_PORT", "the script that started this process")
    return replace(identity, address=environ["MASTER_ADDR"], port=port)


def _agreed(found: list[Identity]) -> Identity:
    """Return the identity that all of `found` agree on."""
    first = found[0]
    for other in found[1:]:
        if (other.rank, other.size) != (first.rank, first.size):
            raise LaunchError(
                f"{claim(first)}, but {claim(other)}. Neither is known to run inside the other: "
                f"unset the variables of the one that did not start this process."
            )
    return first


def claim(identity: Identity) -> str:
    """Return in words what a launcher says of a process, with its variables."""
    rank, size = identity.variables["rank"], identity.variables["size"]
    return f"{identity.launcher} says {rank}={identity.rank}, {size}={identity.size}"
