"""A process started by Open MPI's mpirun."""

from collections.abc import Mapping

from shardwise.launch.identity import Identity, read

NAMES = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
JOB = ("OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE")
"""Where mpirun itself listens (Open MPI 4), and the name of its job: together, one run."""


def detect(environ: Mapping[str, str]) -> Identity | None:
    """The identity that Open MPI gave, or None where it did not start this process."""
    if NAMES["rank"] not in environ:
        return None
    job = [environ[variable] for variable in JOB if variable in environ]
    return Identity(
        launcher="Open MPI",
        job=" ".join(("openmpi", *job)) if job else None,
        variables=NAMES,
        **read(environ, NAMES, "Open MPI"),
    )
