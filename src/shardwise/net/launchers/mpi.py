"""Reads a rank's identity from the variables of MPI launchers.

Open MPI        OMPI_COMM_WORLD_*                 mpirun of Open MPI 4 and 5 (docs.open-mpi.org)
MPICH           PMI_RANK, MPI_LOCALRANKID         Hydra (src/pm/hydra/proxy/pmip_cb.c)
Intel MPI       the same, and I_MPI_HYDRA_UUID    its Hydra
MVAPICH         MV2_ or MVP_COMM_WORLD_*          mpirun_rsh (mpispawn.c)
PMI             PMI_RANK, PMI_SIZE                old Hydras, MPICH's gforker, Cray's launchers
"""

from dataclasses import replace

from shardwise.errors import LaunchError
from shardwise.net.identity import Identity
from shardwise.net.launchers import schedulers, slurm
from shardwise.net.launchers.signs import refusal
from shardwise.net.launchers.variables import Environ, RankVariables, say_the_same

OPEN_MPI = RankVariables(
    launcher="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    # The address of mpirun itself (Open MPI 4) and its job name together identify a run.
    job=("OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE"),
)

_MVAPICH_2 = RankVariables(
    launcher="MVAPICH",
    rank="MV2_COMM_WORLD_RANK",
    size="MV2_COMM_WORLD_SIZE",
    local_rank="MV2_COMM_WORLD_LOCAL_RANK",
    local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    job=("MPISPAWN_MPIRUN_HOST", "MPISPAWN_MPIRUN_ID"),
)

_MVAPICH_3 = replace(
    _MVAPICH_2,
    rank="MVP_COMM_WORLD_RANK",
    size="MVP_COMM_WORLD_SIZE",
    local_rank="MVP_COMM_WORLD_LOCAL_RANK",
    local_size="MVP_COMM_WORLD_LOCAL_SIZE",
)

_HYDRA = RankVariables(
    launcher="MPICH",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    job=("I_MPI_HYDRA_UUID",),
)

_PMI = RankVariables(
    launcher="PMI",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="PMI_LOCAL_RANK",
    local_size="PMI_LOCAL_SIZE",
)


def open_mpi(environ: Environ) -> Identity | None:
    """Read the variables of Open MPI's mpirun.

    Returns None for ranks of jsrun and Flux, which set some of these variables too.
    """
    # Those launchers have their own readers, because their job name is a small number that other
    # jobs share.
    for outer in (schedulers.JSRUN, schedulers.FLUX):
        given = environ.get(OPEN_MPI.rank), environ.get(OPEN_MPI.size)
        if given == (environ.get(outer.rank), environ.get(outer.size)) != (None, None):
            return None
    names = {OPEN_MPI.size, OPEN_MPI.local_size} & environ.keys()
    if not names and environ.get(OPEN_MPI.rank) == environ.get(schedulers.FLUX.rank):
        return None  # Flux sets only this for Spectrum MPI
    return OPEN_MPI.read(environ)


def mvapich(environ: Environ) -> Identity | None:
    """Read the variables of MVAPICH's mpirun_rsh."""
    return _MVAPICH_2.read(environ) or _MVAPICH_3.read(environ)


def hydra(environ: Environ) -> Identity | None:
    """Read the variables of Hydra, the mpiexec of MPICH and Intel MPI.

    Only Hydra sets MPI_LOCALRANKID. Intel MPI provides a run name, but MPICH does not. MPICH's
    ranks derive a name from the process that started them (see rendezvous_file.py) or, on several
    hosts in a Slurm allocation, from the job step in which Hydra's proxies run.
    """
    if "MPI_LOCALRANKID" not in environ:
        return None
    identity = _HYDRA.read(environ)
    if identity is None:
        shown = [
            f"{name}={environ[name]}"
            for name in ("MPI_LOCALRANKID", "PMI_PORT", "PMI_ID")
            if name in environ
        ]
        raise LaunchError(refusal(shown))
    return _in_step(identity, environ)


def pmi(environ: Environ) -> Identity | None:
    """Read PMI_RANK and PMI_SIZE, unless other variables show which launcher set them.

    srun --mpi=pmi2, Flux and PALS also set both, but their own variables hold more information.
    """
    identity = None if "MPI_LOCALRANKID" in environ else _PMI.read(environ)
    if identity is None:
        return None
    # If Hydra runs inside a scheduler's task, its ranks inherit that task's variables. The
    # scheduler started this process only if its variables give the same rank and size.
    for read in (slurm.detect, *schedulers.READERS):
        try:
            if say_the_same(identity, read(environ)):
                return None
        except LaunchError:  # its numbers are impossible, so it is the outer launcher
            continue
    return _in_step(identity, environ)


def _in_step(identity: Identity, environ: Environ) -> Identity:
    """Add the run name if Hydra started its proxies as a Slurm job step."""
    if identity.job is not None or identity.on_one_host:
        return identity
    in_step = slurm.in_step(environ)
    return replace(identity, job=f"hydra in {slurm.step_name(environ)}") if in_step else identity
