"""Finds out which launcher started this process, and which rank of how many it is.

`LAUNCHERS` is the table of all launchers. To add one, write a function that reads its variables
and add a row; nothing else needs to know of it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.errors import LaunchError
from shardwise.launch import processes, slurm
from shardwise.launch.environment import OWN_NAMES, PREFIX
from shardwise.launch.identity import Identity, read_integer, read_integers, read_text
from shardwise.launch.launchers import mpi, platforms, pmix, schedulers, signs
from shardwise.launch.launchers.variables import Environ, RankVariables, Reader

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
        index = {"SHARDWISE_RANK": environ.get("JOB_COMPLETION_INDEX")}
        environ = {**environ, **{name: each for name, each in index.items() if each is not None}}
    identity = _BY_HAND.read(environ)
    if identity is None or identity.size == 1:
        return identity
    place = environ.get("SHARDWISE_RENDEZVOUS")
    if place is None and not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        raise LaunchError(
            f"SHARDWISE_RANK={identity.rank} and SHARDWISE_SIZE={identity.size} do not say where "
            "the ranks meet: set SHARDWISE_RENDEZVOUS=HOST:PORT on all of them, to rank 0's host "
            "and a port that is free there (or to a folder that they share and no other run uses)."
        )
    return replace(identity, job=f"by hand in {place}")


def _torchrun(environ: Environ) -> Identity | None:
    """Read what torchrun, or anything that sets its variables, gave.

    Kubeflow's PyTorchJob and scripts that set the variables by hand leave the local ones out. Batch
    scripts set WORLD_SIZE, with or without an address, for ranks that another launcher starts.
    """
    if "RANK" not in environ and "LOCAL_WORLD_SIZE" not in environ:
        return None
    if "MASTER_ADDR" not in environ:
        return None
    if "LOCAL_RANK" not in environ:
        platforms.check_processes_per_pod(environ)
    identity = _TORCHRUN.read(environ)
    assert identity is not None
    port = read_integer(environ, "MASTER_PORT", identity.launcher)
    return replace(
        identity,
        address=environ["MASTER_ADDR"],
        port=port,
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

_STARTERS = frozenset(name[:15] for row in LAUNCHERS if row.level == 3 for name in row.processes)
"""Those of MPI, which start nothing but ranks; a scheduler's also start batch scripts."""

SETS_THREADS = frozenset(row.name for row in LAUNCHERS if row.sets_threads)
"""The launchers that tell each rank how many threads to use."""


def identify(environ: Environ = os.environ) -> Identity:
    """Return who this process is, from its environment and the processes above it.

    Raises LaunchError as `detect` does.
    """
    parents = [name for _, name in processes.ancestors() if name in _STARTERS]
    return detect({**environ, **pmix.ask(environ)}, parents)


def around_command() -> Identity:
    """Return which of several processes of a launcher this command is; alone inside a rank of ours.

    A number of ranks without a rank says nothing here: a batch script may have set it for later.
    """
    environ = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    if OWN_NAMES["rank"] in environ:
        return Identity(launcher="python")
    return identify(os.environ if "RANK" in environ else environ)


def detect(environ: Environ, parents: Sequence[str] = ()) -> Identity:
    """Return who this process is; where launchers are nested, the innermost wins. Pure.

    `parents` are the names of the processes above this one that start ranks.

    Raises LaunchError for variables that are missing or cannot be, where two launchers of one
    level contradict each other, and for a process that looks like one of several but is not told
    which: it would train alone.
    """
    if environ.get(ALONE, "0") != "0":
        ours = _shardwise_run(environ)
        return ours or Identity(launcher="python", variables={"size": ALONE})
    found: list[Identity] = []
    for level in sorted({row.level for row in LAUNCHERS}):
        rows = [row for row in LAUNCHERS if row.level == level]
        found = [who for row in rows if (who := row.read(environ)) is not None]
        if found:
            break
    identity = _agreed(found)
    if identity.launcher == "python":
        if found_signs := signs.find(environ, parents):
            raise LaunchError(signs.refusal(found_signs))
        return identity
    if identity.launcher not in ("shardwise run", "the user", "torchrun"):
        # Without an address, or with a size alone, this is nobody's word: a batch script has set
        # it for the ranks. But then it must be right.
        rank = {"RANK": str(identity.rank)} if "WORLD_SIZE" in environ else {}
        if (stated := _TORCHRUN.read({**rank, **environ})) is not None:
            _agreed([identity, stated])
    return _with_address(identity, environ)


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
