"""A process started by horovodrun, or by a scheduler that sets Horovod's variables.

Its rendezvous server is horovodrun's own, not rank 0's; it serves as a name of the run.
"""

from collections.abc import Mapping

from shardwise.launch.identity import Identity, read

NAMES = {
    "rank": "HOROVOD_RANK",
    "size": "HOROVOD_SIZE",
    "local_rank": "HOROVOD_LOCAL_RANK",
    "local_size": "HOROVOD_LOCAL_SIZE",
}
NODE = "HOROVOD_CROSS_RANK"
SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def detect(environ: Mapping[str, str]) -> Identity | None:
    """The identity that horovodrun gave, or None where it did not start this process."""
    if NAMES["rank"] not in environ:
        return None
    server = [environ[variable] for variable in SERVER if variable in environ]
    names = NAMES | ({"node": NODE} if NODE in environ else {})
    return Identity(
        launcher="horovodrun",
        job=":".join(("horovod", *server)) if server else None,
        variables=names,
        **read(environ, names, "horovodrun"),
    )
