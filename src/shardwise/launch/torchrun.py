"""A process started by torchrun (or by anything that sets its variables)."""

from collections.abc import Mapping

from shardwise.launch.identity import Identity, read

NAMES = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "port": "MASTER_PORT",
}
NODE = "GROUP_RANK"
"""Left out by those who set these variables by hand."""


def detect(environ: Mapping[str, str]) -> Identity | None:
    """The identity that torchrun gave, or None where it did not start this process."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        return None
    names = NAMES | ({"node": NODE} if NODE in environ else {})
    return Identity(
        launcher="torchrun",
        address=environ["MASTER_ADDR"],
        variables=names,
        **read(environ, names, "torchrun"),
    )
