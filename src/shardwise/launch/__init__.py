"""How processes are started, and how a started process learns who it is."""

from collections.abc import Mapping
from dataclasses import replace

from shardwise.errors import LaunchError
from shardwise.launch import alone, horovod, hydra, mvapich, openmpi, own, slurm, torchrun
from shardwise.launch.identity import Identity, integer

LEVELS = (
    (own.detect,),
    (torchrun.detect, horovod.detect),
    (openmpi.detect, hydra.detect, mvapich.detect),
    (slurm.detect,),
)
"""From the innermost outwards: `srun torchrun`, and mpirun inside an allocation, are ordinary."""


def detect(environ: Mapping[str, str]) -> Identity:
    """Who this process is; where launchers are nested, the innermost wins. Pure.

    Raises LaunchError for variables that are missing or cannot be, and where two launchers of
    one level contradict each other.
    """
    for level in LEVELS:
        found = [identity for read in level if (identity := read(environ)) is not None]
        if found:
            return _addressed(_agreed(found), environ)
    return alone.detect(environ)


def _addressed(identity: Identity, environ: Mapping[str, str]) -> Identity:
    """With rank 0's address where the user's own script has set what torch calls it."""
    if identity.port is not None or not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return identity
    port = integer(environ, "MASTER_PORT", "the script that started this process")
    return replace(identity, address=environ["MASTER_ADDR"], port=port)


def _agreed(found: list[Identity]) -> Identity:
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
