"""A process started by `shardwise run`."""

from collections.abc import Mapping

from shardwise.launch.identity import Identity, integer, read, text

PREFIX = "SHARDWISE_LAUNCH_"

RUN = PREFIX + "RUN"
"""A name that all starts of a run share, and no other run has."""

SECRET = PREFIX + "SECRET"
"""What only the processes of a run know."""

NAMES = {
    name: PREFIX + name.upper() for name in ("rank", "size", "local_rank", "local_size", "port")
}


def detect(environ: Mapping[str, str]) -> Identity | None:
    """The identity that `shardwise run` gave, or None where it did not start this process."""
    if NAMES["rank"] not in environ:
        return None
    numbers = read(environ, NAMES, "shardwise run")
    listening = PREFIX + "LISTEN_FD"
    fd = integer(environ, listening, "shardwise run") if listening in environ else None
    return Identity(
        launcher="shardwise run",
        address=text(environ, PREFIX + "ADDRESS", "shardwise run"),
        listen_fd=fd,
        variables=NAMES,
        **numbers,
    )


def commit_file(run: str) -> str:
    """What a commit of a run is called in the temporary folder of a host."""
    return f"shardwise-commit-{run}"


def environment(identity: Identity) -> dict[str, str]:
    """The variables that `detect` reads back."""
    values = {
        "RANK": identity.rank,
        "SIZE": identity.size,
        "LOCAL_RANK": identity.local_rank,
        "LOCAL_SIZE": identity.local_size,
        "ADDRESS": identity.address,
        "PORT": identity.port,
        "LISTEN_FD": identity.listen_fd,
    }
    return {PREFIX + name: str(value) for name, value in values.items() if value is not None}
