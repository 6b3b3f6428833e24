"""A process started by MVAPICH's mpirun_rsh."""

from collections.abc import Mapping

from shardwise.launch.identity import Identity, read

NAMES = {
    "rank": "MV2_COMM_WORLD_RANK",
    "size": "MV2_COMM_WORLD_SIZE",
    "local_rank": "MV2_COMM_WORLD_LOCAL_RANK",
    "local_size": "MV2_COMM_WORLD_LOCAL_SIZE",
}


def detect(environ: Mapping[str, str]) -> Identity | None:
    """The identity that MVAPICH gave, or None where it did not start this process."""
    if NAMES["rank"] not in environ:
        return None
    return Identity(launcher="MVAPICH", variables=NAMES, **read(environ, NAMES, "MVAPICH"))
