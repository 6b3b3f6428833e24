"""A process started by Hydra, the mpiexec of MPICH and of Intel MPI.

Slurm's srun sets the PMI variables too; only Hydra tells the local rank beside them. Nothing of
its own names the run: on one host ranks find each other by the process that started them; over
the hosts of a Slurm allocation by the step that Hydra made of itself.
"""

from collections.abc import Mapping

from shardwise.launch import slurm
from shardwise.launch.identity import Identity, read

NAMES = {
    "rank": "PMI_RANK",
    "size": "PMI_SIZE",
    "local_rank": "MPI_LOCALRANKID",
    "local_size": "MPI_LOCALNRANKS",
}


def detect(environ: Mapping[str, str]) -> Identity | None:
    """The identity that Hydra gave, or None where it did not start this process."""
    if not {"PMI_RANK", "MPI_LOCALRANKID"} <= environ.keys():
        return None
    numbers = read(environ, NAMES, "MPICH")
    over_hosts = numbers["local_size"] < numbers["size"]
    job = f"hydra in {slurm.step(environ)}" if over_hosts and slurm.in_step(environ) else None
    return Identity(launcher="MPICH", job=job, variables=NAMES, **numbers)
