"""Finds out which launcher started this process, and which rank of how many it is.

`LAUNCHERS` is the table of all launchers. To add one, write a function that reads its variables
and add a row; nothing else needs to know of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardwise.errors import LaunchError
from shardwise.launch import slurm
from shardwise.launch.environment import OWN_NAMES, PREFIX
from shardwise.launch.identity import Identity, read_integer, read_integers, read_text

Environ = Mapping[str, str]


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
    read: Callable[[Environ], Identity | None]
    processes: frozenset[str] = frozenset()
    sets_threads: bool = False


def _shardwise_run(environ: Environ) -> Identity | None:
    """Read the identity that `shardwise run` gave (see environment.identity_variables)."""
    if OWN_NAMES["rank"] not in environ:
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


def _torchrun(environ: Environ) -> Identity | None:
    """Read what torchrun, or anything that sets its variables, gave."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        return None
    names = {
        "rank": "RANK",
        "size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_size": "LOCAL_WORLD_SIZE",
        "port": "MASTER_PORT",
    }
    names |= _if_set(environ, node="GROUP_RANK")  # left out where variables are set by hand
    numbers = read_integers(environ, names, "torchrun")
    return Identity(launcher="torchrun", address=environ["MASTER_ADDR"], variables=names, **numbers)


def _horovodrun(environ: Environ) -> Identity | None:
    """Read what horovodrun, or a scheduler that sets Horovod's variables, gave.

    Its rendezvous server is horovodrun's own, not rank 0's; it serves as a name of the run.
    """
    names = {
        "rank": "HOROVOD_RANK",
        "size": "HOROVOD_SIZE",
        "local_rank": "HOROVOD_LOCAL_RANK",
        "local_size": "HOROVOD_LOCAL_SIZE",
    }
    if names["rank"] not in environ:
        return None
    names |= _if_set(environ, node="HOROVOD_CROSS_RANK")
    server = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    found = [environ[variable] for variable in server if variable in environ]
    return Identity(
        launcher="horovodrun",
        job=":".join(("horovod", *found)) if found else None,
        variables=names,
        **read_integers(environ, names, "horovodrun"),
    )


def _open_mpi(environ: Environ) -> Identity | None:
    """Read what Open MPI's mpirun gave."""
    names = {
        "rank": "OMPI_COMM_WORLD_RANK",
        "size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    if names["rank"] not in environ:
        return None
    # Where mpirun itself listens (Open MPI 4), and the name of its job: together, one run.
    of_run = ("OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE")
    job = [environ[variable] for variable in of_run if variable in environ]
    return Identity(
        launcher="Open MPI",
        job=" ".join(("openmpi", *job)) if job else None,
        variables=names,
        **read_integers(environ, names, "Open MPI"),
    )


def _mpich(environ: Environ) -> Identity | None:
    """Read what Hydra gave, the mpiexec of MPICH and of Intel MPI.

    Slurm's srun sets the PMI variables too; only Hydra gives the local rank beside them. None of
    its variables names the run: on one host ranks find each other by the process that started
    them, over the hosts of a Slurm allocation by the step that Hydra made of itself.
    """
    if not {"PMI_RANK", "MPI_LOCALRANKID"} <= environ.keys():
        return None
    names = {
        "rank": "PMI_RANK",
        "size": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",
        "local_size": "MPI_LOCALNRANKS",
    }
    numbers = read_integers(environ, names, "MPICH")
    over_hosts = numbers["local_size"] < numbers["size"]
    in_step = over_hosts and slurm.in_step(environ)
    job = f"hydra in {slurm.step_name(environ)}" if in_step else None
    return Identity(launcher="MPICH", job=job, variables=names, **numbers)


def _mvapich(environ: Environ) -> Identity | None:
    """Read what MVAPICH's mpirun_rsh gave."""
    names = {
        "rank": "MV2_COMM_WORLD_RANK",
        "size": "MV2_COMM_WORLD_SIZE",
        "local_rank": "MV2_COMM_WORLD_LOCAL_RANK",
        "local_size": "MV2_COMM_WORLD_LOCAL_SIZE",
    }
    if names["rank"] not in environ:
        return None
    numbers = read_integers(environ, names, "MVAPICH")
    return Identity(launcher="MVAPICH", variables=names, **numbers)


def _nothing(environ: Environ) -> Identity:
    """Return the identity of a process that nothing launched: a group of one."""
    del environ
    return Identity(launcher="python")


def _if_set(environ: Environ, **names: str) -> dict[str, str]:
    """Return those of `names` whose variables are set."""
    return {name: variable for name, variable in names.items() if variable in environ}


_OF_MPI = frozenset({"mpirun", "mpiexec"})

LAUNCHERS = (
    Launcher(name="shardwise run", level=0, read=_shardwise_run, sets_threads=True),
    Launcher(name="torchrun", level=1, read=_torchrun, sets_threads=True),
    Launcher(name="horovodrun", level=1, read=_horovodrun),
    Launcher(
        name="Open MPI",
        level=2,
        read=_open_mpi,
        processes=_OF_MPI | {"mpirun.openmpi", "orted", "prted"},
    ),
    Launcher(
        name="MPICH",
        level=2,
        read=_mpich,
        processes=_OF_MPI | {"mpiexec.hydra", "hydra_pmi_proxy"},
    ),
    Launcher(name="MVAPICH", level=2, read=_mvapich, processes=_OF_MPI | {"mpispawn"}),
    Launcher(name="Slurm", level=3, read=slurm.detect, processes=frozenset({"slurmstepd"})),
    Launcher(name="python", level=4, read=_nothing, sets_threads=True),
)

PROCESSES = frozenset(name for row in LAUNCHERS for name in row.processes)
"""The names of all processes that start ranks."""

SETS_THREADS = frozenset(row.name for row in LAUNCHERS if row.sets_threads)
"""The launchers that tell each rank how many threads to use."""


def detect(environ: Environ) -> Identity:
    """Return who this process is; where launchers are nested, the innermost wins. Pure.

    Raises LaunchError for variables that are missing or cannot be, and where two launchers of one
    level contradict each other.
    """
    found: list[Identity] = []
    for level in sorted({row.level for row in LAUNCHERS}):
        rows = [row for row in LAUNCHERS if row.level == level]
        found = [who for row in rows if (who := row.read(environ)) is not None]
        if found:
            break
    identity = _agreed(found)
    return identity if identity.launcher == "python" else _with_address(identity, environ)


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
                f"{_claim(first)}, but {_claim(other)}. Neither is known to run inside the other: "
                f"unset the variables of the one that did not start this process."
            )
    return first


def _claim(identity: Identity) -> str:
    rank, size = identity.variables["rank"], identity.variables["size"]
    return f"{identity.launcher} says {rank}={identity.rank}, {size}={identity.size}"
